from __future__ import annotations

import pytest

from kareus_pp.builders import build_schedule
from kareus_pp.config import ProfilingConfig
from kareus_pp.errors import ProfileError
from kareus_pp.measure import ExperimentDesign, learn
from kareus_pp.plan import default_settings
from kareus_pp.schedule import Instruction, Kind, Schedule
from tests.measure.job import Job


def test_first_default_then_lowest_then_varied_within_the_slowdown() -> None:
    job = Job()
    budget = ProfilingConfig(plans=6, max_slowdown_percent=25)
    design = ExperimentDesign(job.schedule, job.clocks_mhz, budget)
    runs = job.runs()
    while (settings := design.next_plan(runs)) is not None:
        runs = runs.with_runs((*runs.runs, job.run(settings)))
    plans = [run.settings for run in runs.runs]
    assert 2 < len(plans) <= 6
    assert plans[0] == default_settings(job.schedule)
    assert {s.clock_mhz for row in plans[1] for s in row} == {design.grid_mhz()[0]}
    assert design.grid_mhz()[0] >= 1410 / 1.25
    assert len(set(plans)) == len(plans)
    default_s = runs.runs[0].iterations[0].iter_time_s
    assert max(run.iterations[0].iter_time_s for run in runs.runs) <= 1.25 * default_s * 1.01
    assert all(s.clock_mhz in job.clocks_mhz for p in plans[1:] for row in p for s in row)
    again = ExperimentDesign(job.schedule, job.clocks_mhz, budget)
    assert again.next_plan(runs.with_runs(runs.runs[:3])) == plans[3]


def test_it_stops_when_all_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    runs = job.runs(blocking_power_w=(80.0,) * 4)
    design = ExperimentDesign(
        job.schedule, job.clocks_mhz, ProfilingConfig(plans=12), runs.blocking_power_w
    )
    monkeypatch.setattr("kareus_pp.measure.design.ENERGY_ACCURACY", 1e-6)
    for _ in range(7):
        settings = design.next_plan(runs)
        assert settings is not None
        runs = runs.with_runs((*runs.runs, job.run(settings)))
    monkeypatch.setattr("kareus_pp.measure.design.ENERGY_ACCURACY", 0.1)
    assert design.next_plan(runs) is None


def test_without_clocks_there_is_nothing_to_profile() -> None:
    job = Job()
    with pytest.raises(ProfileError, match="no SM clock"):
        ExperimentDesign(job.schedule, (), ProfilingConfig())
    single = ExperimentDesign(job.schedule, (1410,), ProfilingConfig())
    runs = job.runs(job.run(default_settings(job.schedule)))
    assert single.next_plan(job.runs()) == default_settings(job.schedule)
    assert single.next_plan(runs) is None


def test_other_schedules_and_fixed_instructions() -> None:
    base = build_schedule("zb-h1", 2, 4)
    order = tuple(
        (Instruction(stage, Kind.LOAD, 0), *row, Instruction(stage, Kind.OPTIMIZER, 0))
        for stage, row in enumerate(base.order)
    )
    job = Job(Schedule(order, base.model_order))
    design = ExperimentDesign(job.schedule, job.clocks_mhz, ProfilingConfig(plans=5))
    runs = job.runs()
    while (settings := design.next_plan(runs)) is not None:
        assert all(row[0].clock_mhz is None and row[-1].clock_mhz is None for row in settings)
        runs = runs.with_runs((*runs.runs, job.run(settings)))
    learned = learn(runs)
    assert learned.report.supports_planning, learned.report.reasons
    assert learned.profile.options.keys() == set(job.schedule.classes)
    for cls, options in learned.profile.options.items():
        assert len(options) == 1 if cls.kind.is_fixed else len(options) > 10
