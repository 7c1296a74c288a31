from __future__ import annotations

import pytest

from kareus_pp.config import ProfilingConfig
from kareus_pp.measure import ExperimentDesign, Runs, learn
from kareus_pp.schedule import InstructionClass
from tests.measure.job import Job


def profiled(job: Job, plans: int = 12, **changes: object) -> Runs:
    design = ExperimentDesign(job.schedule, job.clocks_mhz, ProfilingConfig(plans=plans))
    runs = job.runs(**changes)
    while (settings := design.next_plan(runs)) is not None:
        runs = runs.with_runs((*runs.runs, job.run(settings)))
    return runs


@pytest.mark.parametrize("blocking", [None, (80.0,) * 4])
def test_noiseless_truth_is_recovered(blocking: tuple[float, ...] | None) -> None:
    job = Job()
    learned = learn(profiled(job, blocking_power_w=blocking))
    assert learned.report.supports_planning
    assert learned.profile.blocking_power_w == pytest.approx([80.0] * 4, rel=0.1)
    for cls, options in learned.profile.options.items():
        for option in options:
            mhz = float(option.setting.clock_mhz or 0)
            if mhz < 1110:
                continue
            assert option.time_s == pytest.approx(job.time_s(cls, mhz), rel=0.01)
            energy = job.time_s(cls, mhz) * job.power_w(cls, mhz)
            assert option.energy_j == pytest.approx(energy, rel=0.03)


def test_a_class_that_never_varied_is_unknown_not_invented() -> None:
    job = Job()
    learned = learn(job.runs(job.run(job.uniform(None))))
    assert not learned.report.supports_planning
    assert set(learned.report.unknown_classes) == set(job.schedule.classes)
    clocks = [o.setting.clock_mhz for o in learned.profile.options[InstructionClass.parse("0F")]]
    assert clocks == [1410]
