from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kareus_pp.builders import build_1f1b, build_interleaved, build_schedule
from kareus_pp.config import parse_config
from kareus_pp.device.emulated import EmulatedDevice
from kareus_pp.errors import ConfigError, FormatError
from kareus_pp.exchanges import Exchange
from kareus_pp.plan import Plan
from kareus_pp.profile import DeviceFacts, Option, Profile, Source
from kareus_pp.runtime import drift, publisher
from kareus_pp.runtime.session import Session
from kareus_pp.runtime.topology import Topology
from kareus_pp.schedule import Schedule
from kareus_pp.setting import Setting
from tests.core.test_exchanges import exchanges_of
from tests.runtime.pipeline import Pipeline, make_pipeline


def striped_plan(schedule: Schedule) -> Plan:
    """A plan in which neighbouring instructions differ."""
    rows = tuple(
        tuple(Setting((1410, 1200, 1005)[(stage + n) % 3]) for n in range(len(row)))
        for stage, row in enumerate(schedule.order)
    )
    return Plan(schedule, rows)


def test_observed_schedule_is_the_executed_one(tmp_path: Path) -> None:
    schedule = build_1f1b(3, 4)
    with make_pipeline(schedule, tmp_path, mode="observe") as pipeline:
        for _ in range(4):
            pipeline.step()
        pipeline.steps_until(lambda: any(tmp_path.glob("schedule-*.json")))
    recorded = Schedule.load(next(tmp_path.glob("schedule-*.json")))
    assert recorded.order == schedule.order
    assert recorded.signature == schedule.signature
    assert all(e["plan"] == "default" for e in pipeline.events(1, "step"))


def test_waits_of_exchanges_are_recorded_and_tell_plans_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = build_interleaved(3, 3, 2, p2p="blocking")
    striped_plan(build_interleaved(3, 3, 2)).save(tmp_path / "plan.json")
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline,
    ):
        pipeline.exchanges = exchanges_of(schedule, group=3, overlapped=False)
        pipeline.steps_until(lambda: bool(caplog.records))
    recorded = Schedule.load(next(tmp_path.glob("schedule-*.json")))
    assert recorded.waits == schedule.waits
    assert recorded.signature == schedule.signature
    assert f"3 microbatches, {len(schedule.waits)} waits for messages)" in caplog.text


def test_messages_that_do_not_match_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = build_interleaved(3, 3, 2)
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        make_pipeline(schedule, tmp_path, mode="observe") as pipeline,
    ):
        pipeline.exchanges = ((Exchange(1, "N"),), (), ())
        pipeline.steps_until(lambda: any(tmp_path.glob("schedule-*.json")))
    recorded = Schedule.load(next(tmp_path.glob("schedule-*.json")))
    assert recorded.signature == schedule.signature
    assert "stage 0 sends 1 messages to stage 1, which receives 0" in caplog.text
    assert "may take longer than predicted" in caplog.text


def test_every_setting_reaches_its_instruction(tmp_path: Path) -> None:
    schedule = build_1f1b(3, 4)
    plan = striped_plan(schedule)
    plan.save(tmp_path / "plan.json")
    with make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline:
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(8):
            pipeline.step()
    for stage, order in enumerate(schedule.order):
        applied = [e for e in pipeline.events(stage, "step") if e["phase"] == "apply"]
        assert len(applied) >= 5
        expected = [f"{i} {s.clock_mhz}" for i, s in zip(order, plan.settings[stage], strict=True)]
        for event in applied:
            assert event["instructions"] == expected
            assert event["source"] == "emulated"


def test_other_microbatch_count_falls_back_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule, other = build_1f1b(2, 4), build_1f1b(2, 6)
    striped_plan(schedule).save(tmp_path / "plan.json")
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline,
    ):
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(4):
            pipeline.step()
        for _ in range(4):
            pipeline.step(other)
        for _ in range(3):
            pipeline.step()
    assert not any(s.standing_down for s in pipeline.sessions)
    steps = pipeline.events(0, "step")
    assert [e["plan"] for e in steps if e["key"] == "6:"] == ["default"] * 4
    assert steps[-1]["plan"] == "given"
    warnings = [r.message for r in caplog.records if "steps of 6 microbatches" in r.getMessage()]
    assert len(warnings) == 2  # one on each rank


def test_plan_of_another_schedule_is_not_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    striped_plan(build_1f1b(2, 7)).save(tmp_path / "plan.json")
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        make_pipeline(build_1f1b(2, 4), tmp_path, plan=str(tmp_path / "plan.json")) as pipeline,
    ):
        pipeline.steps_until(lambda: bool(caplog.records))
        for _ in range(3):
            pipeline.step()
    assert len(caplog.records) == 1
    assert "7 microbatches" in caplog.text
    assert "default clocks" in caplog.text
    assert all(e["plan"] == "default" for e in pipeline.events(0, "step"))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_hook_restores_default_clocks_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    schedule = build_1f1b(2, 4)
    striped_plan(schedule).save(tmp_path / "plan.json")

    class Broken:
        def __getattr__(self, name: str) -> Any:
            def broken(*_: object) -> None:
                if name != "close":
                    raise RuntimeError("the executor broke")

            return broken

    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline,
    ):
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        pipeline.sessions[failing].follow_overlap(Broken())
        pipeline.steps_until(lambda: all(s.standing_down for s in pipeline.sessions))
        pipeline.step()
        requested = [s._controller.applied().mhz for s in pipeline.sessions]
    assert requested == [0, 0]
    assert [r for r in caplog.records if f"rank {failing} stands down" in r.getMessage()]
    assert caplog.text.count("the executor broke") == 2  # once on each rank


def test_user_exception_inside_a_step(tmp_path: Path) -> None:
    schedule = build_1f1b(2, 4)
    striped_plan(schedule).save(tmp_path / "plan.json")
    with make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline:
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for session in pipeline.sessions:
            session.step_begin(4)
            session.instruction_begin(*schedule.order[session.topology.stage][0][1:])
            session.instruction_end()
            session.step_abort()
            assert session._controller.applied().mhz == 0
        for _ in range(3):
            pipeline.step()
    assert not any(s.standing_down for s in pipeline.sessions)
    assert pipeline.events(0, "step")[-1]["plan"] == "given"


def test_evaluation_runs_at_default_clocks(tmp_path: Path) -> None:
    schedule = build_1f1b(2, 4)
    striped_plan(schedule).save(tmp_path / "plan.json")
    with make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline:
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        pipeline.step()
        pipeline.step()
        for session in pipeline.sessions:
            session.suspend("evaluation")
            assert session._controller.applied().mhz == 0
            session.resume()
        pipeline.step()
    assert pipeline.events(0, "step")[-1]["plan"] == "given"


def test_malformed_files_end_before_training(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    for rank in (0, 1):
        topology = Topology(rank, 2, ((0, 0), (1, 0)), rank=rank, world_size=2)
        values = {"device": "dry-run", "output": str(tmp_path)}
        with pytest.raises(FormatError, match=r"plan\.json"):
            Session(parse_config({**values, "plan": str(tmp_path / "plan.json")}), topology)
        with pytest.raises(ConfigError, match="neither 'plan' nor 'profile'"):
            Session(parse_config({**values, "mode": "apply"}), topology)


def test_dry_run_records_and_sets_nothing(tmp_path: Path) -> None:
    schedule = build_schedule("1f1b", 2, 3)
    with make_pipeline(schedule, tmp_path, device="dry-run") as pipeline:
        pipeline.steps_until(lambda: any(tmp_path.glob("schedule-*.json")))
    assert not any(s.standing_down for s in pipeline.sessions)
    assert all(e["energy_j"] is None for e in pipeline.events(0, "step"))


def test_whole_job_profiles_plans_and_applies(tmp_path: Path) -> None:
    schedule = build_1f1b(3, 6)
    with make_pipeline(
        schedule,
        tmp_path,
        forward_s=(0.006, 0.004, 0.004),
        profiling={"plans": 4, "iterations_per_plan": 2},
        planner={"points": 3, "time_limit_s": 2},
    ) as pipeline:
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(6):
            pipeline.step()
    assert not any(s.standing_down for s in pipeline.sessions)
    plan = Plan.load(next(tmp_path.glob("plan-*.json")))
    assert plan.schedule.order == schedule.order
    applied = [e for e in pipeline.events(2, "step") if e["phase"] == "apply"]
    assert applied
    assert applied[-1]["plan"] == "fastest"


SETTINGS_OF_JOB = {"precision": "bf16", "recompute": "full"}


def planning(schedule: Schedule, output: Path, **config: Any) -> Pipeline:
    """A job that profiles itself quickly; the second stage has time to spare."""
    pipeline = make_pipeline(
        schedule,
        output,
        forward_s=(0.004, 0.003),
        profiling={"plans": 4, "iterations_per_plan": 2},
        planner={"points": 3, "time_limit_s": 2},
        **config,
    )
    pipeline.fingerprint = SETTINGS_OF_JOB
    return pipeline


def slow_down(pipeline: Pipeline, factor: float) -> None:
    """A hidden slow state: the clocks are as requested, nothing is throttled."""
    for session in pipeline.sessions:
        assert isinstance(session._pacer, EmulatedDevice)
        session._pacer._time_factor *= factor


def test_a_plan_that_held_and_holds_no_longer_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drift shows in iteration times alone: the job profiles itself and plans again."""
    monkeypatch.setattr(publisher, "_REPORT_PERIOD_S", 0.0)
    # The plan must hold at first, on a busy machine too, and not once it is slower by 40 %.
    monkeypatch.setattr(drift, "_TOLERANCE", 0.2)
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        planning(build_1f1b(2, 4), tmp_path) as pipeline,
    ):
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        found = Plan.load(next(tmp_path.glob("plan-*.json")))
        lead = pipeline.sessions[0]._coordinator._leader
        assert lead is not None
        took = lead._plan_step - lead._profile_step
        pipeline.steps_until(lambda: lead._drift is not None and lead._drift.held >= took)
        slow_down(pipeline, 1.4)
        pipeline.steps_until(lambda: "planning again" in caplog.text)
        pipeline.steps_until(lambda: all(s.phase == "profile" for s in pipeline.sessions))
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(3):
            pipeline.step()
    assert not any(s.standing_down for s in pipeline.sessions)
    again = Plan.load(next(tmp_path.glob("plan-*.json")))
    assert found.time_s is not None
    assert again.time_s is not None
    assert again.time_s > 1.2 * found.time_s
    assert [e["reason"] for e in pipeline.events(0, "replan")] == [
        record.getMessage().removeprefix("kareus-pp: ").partition(" any more")[0]
        for record in caplog.records
        if "planning again" in record.getMessage()
    ]
    profiled = [e for e in pipeline.events(1, "step") if e["phase"] == "profile"]
    assert profiled[-1]["energy_j"] is not None


def test_every_number_of_microbatches_has_its_own_plan(tmp_path: Path) -> None:
    """Batch ramp-up: the profile serves both schedules, plans change at the step boundary."""
    schedule, more = build_1f1b(2, 4), build_1f1b(2, 6)
    with planning(schedule, tmp_path) as pipeline:
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
        for _ in range(100):
            pipeline.step(more)
            if len(list(tmp_path.glob("plan-*.json"))) == 2:
                break
        for n in range(12):
            pipeline.step((schedule, more)[n % 2])
    plans = {p.schedule.signature: p for p in map(Plan.load, tmp_path.glob("plan-*.json"))}
    for stage in range(2):
        last = [e for e in pipeline.events(stage, "step") if e["phase"] == "apply"][-4:]
        assert [e["key"] for e in last] == ["4:", "6:"] * 2
        for event in last:
            plan = plans[(schedule if event["key"] == "4:" else more).signature]
            assert event["instructions"] == [
                f"{i} {s.clock_mhz or 'default'}"
                for i, s in zip(plan.schedule.order[stage], plan.settings[stage], strict=True)
            ]


def test_a_plan_that_never_held_ends_the_job_at_default_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_REPORT_PERIOD_S", 0.0)
    with planning(build_1f1b(2, 4), tmp_path) as pipeline:
        pipeline.steps_until(lambda: any(tmp_path.glob("plan-*.json")))
        slow_down(pipeline, 1.4)
        pipeline.steps_until(lambda: all(s.standing_down for s in pipeline.sessions))
        pipeline.step()
        requested = [s._controller.applied().mhz for s in pipeline.sessions]
    assert requested == [0, 0]
    assert all("the plan does not hold" in s.standing_down for s in pipeline.sessions)


def profile_for(schedule: Schedule, **fingerprint: str) -> Profile:
    """A profile of two clocks, taken with these settings."""
    options = {
        cls: (Option(Setting(1410), 0.004, 1.0), Option(Setting(1200), 0.005, 0.8))
        for cls in schedule.classes
    }
    facts = DeviceFacts(source=Source.EMULATED)
    return Profile(options, (80.0, 80.0), device=facts, fingerprint=fingerprint)


def test_a_profile_of_the_same_settings_is_planned_from(tmp_path: Path) -> None:
    schedule = build_1f1b(2, 4)
    profile_for(schedule, **SETTINGS_OF_JOB).save(tmp_path / "given.json")
    with planning(schedule, tmp_path, mode="apply", profile=str(tmp_path / "given.json")) as job:
        job.steps_until(lambda: all(s.phase == "apply" for s in job.sessions))
    assert not job.events(0, "profile")


def test_the_intended_time_is_published_on_every_rank(tmp_path: Path) -> None:
    """Whoever watches for stragglers can tell an intended slowdown from a fault."""
    schedule = build_1f1b(2, 4)
    plan = replace(striped_plan(schedule), time_s=0.25, energy_j=20.0)
    plan.save(tmp_path / "plan.json")
    with make_pipeline(schedule, tmp_path, plan=str(tmp_path / "plan.json")) as pipeline:
        pipeline.steps_until(lambda: all(s.phase == "apply" for s in pipeline.sessions))
    for rank in (0, 1):
        (told,) = pipeline.events(rank, "assignment")
        assert (told["phase"], told["predicted_time_s"]) == ("apply", 0.25)
        assert told["first_step"] >= 2


@pytest.mark.parametrize(
    ("name", "taken", "here"), [("precision", "fp32", "bf16"), ("recompute", "None", "full")]
)
def test_a_profile_of_other_settings_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, taken: str, here: str
) -> None:
    schedule = build_1f1b(2, 4)
    profile_for(schedule, **SETTINGS_OF_JOB | {name: taken}).save(tmp_path / "given.json")
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        planning(schedule, tmp_path, mode="apply", profile=str(tmp_path / "given.json")) as job,
    ):
        job.steps_until(lambda: bool(caplog.records))
        for _ in range(5):
            job.step()
    (record,) = caplog.records
    assert f"was taken with {name} = {taken} and this job has {here}" in record.getMessage()
    assert "default clocks" in record.getMessage()
    assert {e["plan"] for e in job.events(0, "step")} == {"default"}
    assert not any(tmp_path.glob("plan-*.json"))


def test_a_job_profiles_anew_where_its_profile_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = build_1f1b(2, 4)
    profile_for(schedule, **SETTINGS_OF_JOB | {"precision": "fp32"}).save(tmp_path / "given.json")
    with (
        caplog.at_level(logging.WARNING, "kareus_pp"),
        planning(schedule, tmp_path, profile=str(tmp_path / "given.json")) as job,
    ):
        job.steps_until(lambda: all(s.phase == "profile" for s in job.sessions))
    assert "this job has bf16; profiling anew" in caplog.text
