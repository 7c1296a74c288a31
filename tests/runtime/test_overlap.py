"""Overlap settings reach the executor of every rank, for whole steps that the ranks agreed on."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from kareus_pp.builders import build_1f1b
from kareus_pp.errors import OverlapError
from kareus_pp.measure import load_runs
from kareus_pp.plan import Plan
from kareus_pp.planner import Planner, PlannerOptions
from kareus_pp.profile import DeviceFacts, Option, Profile, Source
from kareus_pp.schedule import Instruction, Kind, Schedule
from kareus_pp.setting import SEQUENTIAL, OverlapSetting, Setting
from kareus_pp.target import Fastest
from tests.runtime.pipeline import Pipeline, make_pipeline


class Recorded:
    """Stands for an executor: writes down what it is told, step by step."""

    def __init__(self) -> None:
        self.agrees = True
        self.begun: list[tuple[int, tuple[OverlapSetting, ...] | None]] = []
        self.told: list[dict[Instruction, Setting]] = []
        self.now: dict[Instruction, Setting] = {}
        self.closed = 0

    def begin_step(self, step: int, settings: Iterable[OverlapSetting] = ()) -> bool:
        self._begin((step, tuple(settings)))
        return self.agrees

    def skip_step(self, step: int) -> None:
        self._begin((step, None))

    def _begin(self, what: tuple[int, tuple[OverlapSetting, ...] | None]) -> None:
        self.begun.append(what)
        self.now = {}
        self.told.append(self.now)

    def on_setting(self, instruction: Instruction, setting: Setting) -> None:
        self.now.setdefault(instruction, setting)

    def candidates(self, count: int) -> tuple[tuple[OverlapSetting, OverlapSetting], ...]:
        slots = range(count)
        return tuple(
            (OverlapSetting.parse(f"mlp@{n}:0"), OverlapSetting.parse(f"mlp@{n}:1")) for n in slots
        )

    def check(self, phase: str, setting: OverlapSetting) -> None:
        for launch in setting.launches:
            if launch.partition != "mlp":
                raise OverlapError(f"there is no {launch.partition} in the {phase}")

    def close(self) -> None:
        self.closed += 1


def overlapping_plan(schedule: Schedule, partition: str = "mlp") -> Plan:
    """Another overlap setting on every instruction but the first two microbatches' own."""
    rows = tuple(
        tuple(
            Setting(1410 if n % 2 else 1200, OverlapSetting.parse(f"{partition}@{n}:{stage}"))
            if instruction.microbatch > 1
            else Setting(1410)
            for n, instruction in enumerate(row)
        )
        for stage, row in enumerate(schedule.order)
    )
    return Plan(schedule, rows)


def followed(pipeline: Pipeline) -> list[Recorded]:
    executors = [Recorded() for _ in pipeline.sessions]
    for session, executor in zip(pipeline.sessions, executors, strict=True):
        session.follow_overlap(executor)
    return executors


def test_every_overlap_setting_reaches_its_instruction(tmp_path: Path) -> None:
    schedule = build_1f1b(2, 4)
    plan = overlapping_plan(schedule)
    plan.save(tmp_path / "plan.json")
    with make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline:
        executors = followed(pipeline)
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(8):
            pipeline.step()
    for stage, executor in enumerate(executors):
        assert [number for number, _ in executor.begun] == list(range(len(executor.begun)))
        assert executor.begun[0] == (0, None), "before there is a plan nothing is agreed on"
        assert executor.begun[-1][1] == tuple(s.overlap for s in plan.settings[stage])
        wanted = dict(zip(schedule.order[stage], plan.settings[stage], strict=True))
        told = executor.told[-1]
        assert {i: s.overlap for i, s in told.items()} == {i: s.overlap for i, s in wanted.items()}
        assert executor.closed == 1, "the session closes what it follows"


def test_without_agreement_the_whole_step_is_sequential(tmp_path: Path) -> None:
    schedule = build_1f1b(2, 4)
    overlapping_plan(schedule).save(tmp_path / "plan.json")
    with make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline:
        executors = followed(pipeline)
        executors[0].agrees = False
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(6):
            pipeline.step()
    assert executors[0].begun[-1][1] is not None, "it was asked"
    assert all(s.overlap.is_sequential for s in executors[0].told[-1].values())
    assert not all(s.overlap.is_sequential for s in executors[1].told[-1].values())


def test_what_was_agreed_on_holds_to_the_end_of_the_step(tmp_path: Path) -> None:
    """A rank that stands down in midst of a step must not leave its group in the lurch."""
    schedule = build_1f1b(2, 4)
    plan = overlapping_plan(schedule)
    plan.save(tmp_path / "plan.json")
    with make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline:
        executors = followed(pipeline)
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(6):
            pipeline.step()
        session, executor, order = pipeline.sessions[1], executors[1], schedule.order[1]
        session.step_begin(schedule.microbatches)
        for number, instruction in enumerate(order):
            if number == 1:
                session.stand_down("a test says so")
            session.instruction_begin(*instruction[1:])
            session.instruction_end()
        session.step_end()
        told = [executor.told[-1][instruction].overlap for instruction in order]
        assert told == [s.overlap for s in plan.settings[1]]
        session.step_begin(schedule.microbatches)
        assert executor.begun[-1] == (len(executor.begun) - 1, None), "the peers are told"
        session.instruction_begin(*order[-1][1:])
        assert executor.now[order[-1]].overlap.is_sequential


def test_a_plan_that_cannot_be_done_is_refused_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = build_1f1b(2, 4)
    overlapping_plan(schedule, "attention").save(tmp_path / "plan.json")
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline,
    ):
        executors = followed(pipeline)
        pipeline.steps_until(lambda: all(s.standing_down for s in pipeline.sessions))
        pipeline.step()
    assert "which cannot be done: there is no attention in the forward" in caplog.text
    for executor in executors:
        assert all(settings is None for _, settings in executor.begun)


def test_a_plan_that_splits_a_forward_alone_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = build_1f1b(2, 4)
    whole = overlapping_plan(schedule)
    rows = [list(row) for row in whole.settings]
    for order, row in zip(schedule.order, rows, strict=True):
        for place, instruction in enumerate(order):
            if instruction.kind is Kind.BACKWARD:
                row[place] = Setting(1200)
    Plan(schedule, tuple(map(tuple, rows))).save(tmp_path / "plan.json")
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline,
    ):
        followed(pipeline)
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(4):
            pipeline.step()
    said = [r.getMessage() for r in caplog.records if "and not the backward of" in r.getMessage()]
    assert len(said) == 2, "once on each rank"
    assert "splits 0F2 and" in said[0] + said[1]
    assert all("that runs in halves one after the other" in line for line in said)
    assert not any(s.standing_down for s in pipeline.sessions)


def test_a_plan_that_overlaps_is_said_to_be_sequential_where_overlap_is_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = build_1f1b(2, 4)
    overlapping_plan(schedule).save(tmp_path / "plan.json")
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline,
    ):
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(4):
            pipeline.step()
    said = [r for r in caplog.records if "overlap.enabled turns it on" in r.getMessage()]
    assert len(said) == 2, "once on each rank"
    assert not any(s.standing_down for s in pipeline.sessions)


@pytest.mark.parametrize("factor", [0.8, pytest.param(1.25, marks=pytest.mark.slow)])
def test_overlap_is_measured_jointly_with_clocks_and_chosen_where_it_pays(
    tmp_path: Path, factor: float
) -> None:
    """Rules 27 and 28: what is measured is the whole overlapped instruction at its clock.

    The truth is hidden: instructions that overlap take `factor` of their time on these devices.
    """
    schedule = build_1f1b(2, 4)
    pipeline = make_pipeline(
        schedule,
        tmp_path,
        mode="profile",
        profiling={"plans": 4, "iterations_per_plan": 2},
        overlap={"candidates": 2},
        emulated={"overlap_factor": factor},
    )
    with pipeline:
        followed(pipeline)
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
    runs = load_runs(tmp_path / "runs.json").runs
    tried = [{s.overlap for row in run.settings for s in row} - {SEQUENTIAL} for run in runs]
    assert [len(found) for found in tried] == [0] * 4 + [2] * 6, "two candidates at three clocks"
    profile = Profile.load(tmp_path / "profile.json")
    for options in profile.options.values():
        clocks: dict[OverlapSetting, set[int | None]] = {}
        for option in options:
            clocks.setdefault(option.setting.overlap, set()).add(option.setting.clock_mhz)
        assert len(clocks) == 3, "sequential and two candidates"
        assert all(len(found) > 2 for found in clocks.values())
    recorded = Schedule.load(next(tmp_path.glob("schedule-*.json")))
    planner = Planner(recorded, profile, PlannerOptions(time_limit_s=1.0))
    plan = planner.plan(Fastest())
    overlapped = [not s.overlap.is_sequential for row in plan.settings for s in row]
    assert all(overlapped) if factor < 1 else not any(overlapped)


@pytest.mark.parametrize("can_overlap", [True, False])
def test_a_job_that_cannot_overlap_plans_without(tmp_path: Path, can_overlap: bool) -> None:
    """A profile may come from a job that could."""
    schedule = build_1f1b(2, 3)
    options = {
        cls: tuple(
            Option(Setting(1410, overlap), time_s, 100.0 * time_s)
            for overlap, time_s in ((SEQUENTIAL, 0.006), (OverlapSetting.parse("mlp@0:0"), 0.004))
        )
        for cls in schedule.classes
    }
    device = DeviceFacts(clocks_mhz=(1410,), source=Source.EMULATED)
    Profile(options, (50.0, 50.0), device=device).save(tmp_path / "given.json")
    pipeline = make_pipeline(schedule, tmp_path, profile=str(tmp_path / "given.json"))
    with pipeline:
        if can_overlap:
            followed(pipeline)
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
    plan = Plan.load(next(tmp_path.glob("plan-*.json")))
    overlapped = {not s.overlap.is_sequential for row in plan.settings for s in row}
    assert overlapped == {can_overlap}
