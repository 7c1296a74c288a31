from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kareus_pp.builders import build_1f1b, build_interleaved
from kareus_pp.config import ProfilingConfig
from kareus_pp.errors import ProfileError
from kareus_pp.measure import (
    ExperimentDesign,
    PlanRun,
    Runs,
    choose_by_design,
    learn,
    load_runs,
)
from kareus_pp.measure.holdout import (
    choose_by_chance,
    count_of,
    highest_plan,
    hold_out,
    summary,
)
from kareus_pp.plan import Settings
from kareus_pp.profile import Origin, Profile
from kareus_pp.schedule import InstructionClass
from kareus_pp.setting import Setting
from tests.measure.job import Job


def profiled(job: Job, plans: int = 8, **changes: object) -> Runs:
    design = ExperimentDesign(job.schedule, job.clocks_mhz, ProfilingConfig(plans=plans))
    runs = job.runs(**changes)
    while (settings_ := design.next_plan(runs)) is not None:
        runs = runs.with_runs((*runs.runs, job.run(settings_)))
    return runs


@pytest.fixture(scope="module")
def recorded() -> Runs:
    return profiled(Job(time_noise=0.01, energy_noise=0.003), blocking_power_w=(80.0,) * 4)


def test_time_that_stages_wait_for_messages_is_no_overhead() -> None:
    """The same runs without the waits: what they take is then put down to something else."""
    job = Job(build_interleaved(3, 6, 2, p2p="blocking"))
    runs = profiled(job, 10)
    learned = learn(runs)
    assert learned.profile.overhead.iteration_s == pytest.approx(job.overhead_s, abs=0.002)
    assert learned.report.time_error is not None
    assert learned.report.time_error < 0.002
    blind = learn(replace(runs, schedule=replace(job.schedule, waits=frozenset())))
    assert blind.profile.overhead.iteration_s > 1.5 * job.overhead_s


@pytest.mark.parametrize("blocking", [None, (80.0,) * 4])
def test_noiseless_truth_is_recovered(blocking: tuple[float, ...] | None) -> None:
    job = Job(spin=0.2)
    runs = profiled(job, 12, blocking_power_w=blocking)
    learned = learn(runs)
    assert learned.report.supports_planning
    assert learned.report.time_error is not None
    assert learned.report.time_error < 0.002
    lowest = min(s.clock_mhz or 1410 for run in runs.runs for row in run.settings for s in row)
    for cls, options in learned.profile.options.items():
        assert [o.setting.clock_mhz for o in options] == [c for c in job.clocks_mhz if c >= lowest]
        for option in options:
            mhz = float(option.setting.clock_mhz or 0)
            assert option.time_s == pytest.approx(job.time_s(cls, mhz), rel=0.005)
            energy = job.time_s(cls, mhz) * job.power_w(cls, mhz)
            assert option.energy_j == pytest.approx(energy, rel=0.03)


def test_a_class_that_never_varied_is_unknown_not_invented() -> None:
    job = Job()
    still = InstructionClass.parse("1B")

    def frozen(plan: Settings) -> Settings:
        return tuple(
            tuple(
                Setting(1410) if job.schedule.class_of(i) == still else s
                for i, s in zip(order, row, strict=True)
            )
            for order, row in zip(job.schedule.order, plan, strict=True)
        )

    plans = [frozen(job.uniform(mhz)) for mhz in (1410, 1200, 1050, 1305, 1110, 1380)]
    learned = learn(job.runs(*(job.run(plan) for plan in plans)))
    assert learned.report.unknown_classes == (still,)
    assert not learned.report.supports_planning
    assert "1B" in learned.report.reasons[0]
    assert [o.setting.clock_mhz for o in learned.profile.options[still]] == [1410]
    assert learned.profile.options[still][0].origin is Origin.MEASURED
    unknown, known = learned.predict([job.uniform(1200), plans[1]])
    assert unknown.time_s is None
    assert unknown.energy_j is None
    assert known.time_s is not None


def test_without_energy_nothing_is_planned() -> None:
    job = Job()
    runs = [job.run(job.uniform(mhz)) for mhz in (1410, 1200, 1050)]
    blind = [
        replace(run, iterations=tuple(replace(i, energy_j=(None,) * 4) for i in run.iterations))
        for run in runs
    ]
    learned = learn(job.runs(*blind))
    assert not learned.report.supports_planning
    assert "no usable energy" in " ".join(learned.report.reasons)
    assert learned.profile.options == {}


def test_nothing_usable_is_one_sentence() -> None:
    job = Job()
    with pytest.raises(ProfileError, match="no usable iteration"):
        learn(job.runs(PlanRun(job.uniform(1200), ())))


@settings(max_examples=4, deadline=None)
@given(factor=st.floats(0.1, 20))
def test_scaling_all_energies_scales_the_result(recorded: Runs, factor: float) -> None:
    scaled = replace(
        recorded,
        blocking_power_w=tuple(factor * w for w in recorded.blocking_power_w or ()),
        runs=tuple(
            replace(
                run,
                iterations=tuple(
                    replace(i, energy_j=tuple(factor * e for e in i.energy_j if e is not None))
                    for i in run.iterations
                ),
            )
            for run in recorded.runs
        ),
    )
    before, after = learn(recorded).profile, learn(scaled).profile
    for cls, options in before.options.items():
        for old, new in zip(options, after.options[cls], strict=True):
            assert new.time_s == pytest.approx(old.time_s, rel=1e-9)
            assert new.energy_j == pytest.approx(factor * old.energy_j, rel=1e-5)


def test_permuting_microbatches_does_not_change_the_options() -> None:
    """Forwards and backwards of one clock each: any order of them is the same experiment."""
    job = Job(build_1f1b(3, 6), time_noise=0.02)
    runs = job.runs(*(job.run(job.uniform(mhz)) for mhz in (1410, 1050, 1200, 1305, 1110, 1260)))
    rng = np.random.default_rng(1)

    def permuted(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        result = []
        for order, row in zip(job.schedule.order, rows, strict=True):
            values = list(row)
            for kind in {i.kind for i in order}:
                places = [n for n, i in enumerate(order) if i.kind is kind]
                for place, other in zip(places, rng.permutation(places), strict=True):
                    values[place] = row[int(other)]
            result.append(tuple(values))
        return tuple(result)

    changed = runs.with_runs(
        tuple(
            replace(
                run,
                iterations=tuple(
                    replace(i, duration_s=permuted(i.duration_s)) for i in run.iterations
                ),
            )
            for run in runs.runs
        )
    )
    before, after = learn(runs).profile, learn(changed).profile
    for cls, options in before.options.items():
        for old, new in zip(options, after.options[cls], strict=True):
            assert new.time_s == pytest.approx(old.time_s, rel=2e-3)
            assert new.energy_j == pytest.approx(old.energy_j, rel=1e-2)


def test_a_profile_survives_its_file(recorded: Runs, tmp_path: Path) -> None:
    profile = learn(recorded).profile
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


@pytest.mark.parametrize("design", [False, True])
def test_of_a_left_out_plan_only_clocks_are_read(recorded: Runs, design: bool) -> None:
    count = 5
    train = choose_by_design(recorded, count) if design else choose_by_chance(recorded, count, 3)
    blanked = recorded.with_runs(
        tuple(
            run if number in train else replace(run, iterations=())
            for number, run in enumerate(recorded.runs)
        )
    )
    again = choose_by_design(blanked, count) if design else choose_by_chance(blanked, count, 3)
    assert again == train
    full, blank = hold_out(recorded, train), hold_out(blanked, train)
    assert [c.predicted for c in full.test] == [c.predicted for c in blank.test]
    assert full.learned.profile == blank.learned.profile
    assert summary(full)["time_mape"] is not None
    assert summary(blank)["time_mape"] is None


def test_predictions_and_intervals_hold(recorded: Runs) -> None:
    found = hold_out(recorded, choose_by_chance(recorded, 6, 0))
    for comparison in found.test:
        assert comparison.time_error is not None
        assert comparison.energy_error is not None
        assert abs(comparison.time_error) < 0.02
        assert abs(comparison.energy_error) < 0.02


def test_choice_of_training_plans(recorded: Runs) -> None:
    total = len(recorded.runs)
    assert count_of(0.5, total) == round(total / 2)
    assert count_of(3, total) == 3
    for wrong in (0, -1, total, 2.5, 1.0 * total):
        with pytest.raises(ProfileError):
            count_of(wrong, total)
    picks = {choose_by_chance(recorded, 3, seed) for seed in range(6)}
    assert len(picks) > 1
    assert all(highest_plan(recorded) in pick for pick in picks)
    free = {choose_by_chance(recorded, 1, seed, anchor=False) for seed in range(20)}
    assert len(free) > 1


@pytest.mark.parametrize("name", ["a100+bert-huge-uncased", "a100+wide-resnet101_8"])
def test_measured_workloads(shared_data: Path, name: str) -> None:
    """Limits are those that the learner promises, on data measured by the Perseus authors."""
    runs = load_runs(shared_data / "sosp24" / "runs" / f"{name}.json.gz")
    found = summary(hold_out(runs, choose_by_design(runs, 8)))
    assert found["time_mape"] < 0.005  # type: ignore[operator]
    assert found["energy_mape"] < 0.01  # type: ignore[operator]
