"""Profile, learn, plan and run GPUs whose true time and power nobody was told.

Every stage's time and power are scaled by factors of their own; only the emulated devices know
them. In virtual time, so that no figure depends on the machine that runs the test.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kareus_pp.builders import build_1f1b
from kareus_pp.config import EmulatedConfig, ProfilingConfig
from kareus_pp.measure import ExperimentDesign, learn
from kareus_pp.measure.runs import IterationRecord, PlanRun
from kareus_pp.plan import default_settings
from kareus_pp.planner import plan
from kareus_pp.profile import Overhead
from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.simulate.gpu_model import Work
from kareus_pp.simulate.virtual import VirtualPipeline
from kareus_pp.target import Fastest, Slowdown

STAGES, MICROBATCHES = 4, 8
LAYERS = (2.0, 3.0, 3.0, 2.3)
LAYER = Work(flops=1.7e12, bytes=2.4e9)
TOLERANCE = 0.02


def pipeline(seed: int) -> VirtualPipeline:
    rng = np.random.default_rng(seed)
    config = EmulatedConfig(
        time_factors=tuple(rng.uniform(0.8, 1.2, STAGES)),
        power_factors=tuple(rng.uniform(0.8, 1.2, STAGES)),
        noise=0.002,
        seed=seed,
    )
    works = {
        InstructionClass(stage, kind): layers * times * LAYER
        for stage, layers in enumerate(LAYERS)
        for kind, times in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0))
    }
    overhead = Overhead(iteration_s=0.02, p2p_s=0.0005)
    return VirtualPipeline(
        build_1f1b(STAGES, MICROBATCHES), works, config=config, overhead=overhead
    )


def measured(iterations: Sequence[IterationRecord]) -> tuple[float, float]:
    """Mean time and energy of all iterations but the first two."""
    kept = iterations[2:]
    energy = [sum(e for e in record.energy_j if e is not None) for record in kept]
    return float(np.mean([record.iter_time_s for record in kept])), float(np.mean(energy))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_predictions_hold_on_gpus_that_differ_from_their_model(seed: int) -> None:
    job = pipeline(seed)
    clocks = job.devices[0].supported_clocks_mhz()
    default = default_settings(job.schedule)
    default_s, default_j = measured(job.run_plan(default, 20).iterations)
    design = ExperimentDesign(job.schedule, clocks, ProfilingConfig(plans=10))
    tried: list[PlanRun] = []
    while (settings := design.next_plan(job.runs(tried))) is not None:
        tried.append(job.run_plan(settings, 3))
    profile = learn(job.runs(tried)).profile
    for target in (Fastest(), Slowdown(5.0)):
        made = plan(job.schedule, profile, target)
        assert made.time_s is not None
        assert made.energy_j is not None
        time_s, energy_j = measured(job.run_plan(made.settings, 20).iterations)
        assert made.time_s == pytest.approx(time_s, rel=TOLERANCE), target
        assert made.energy_j == pytest.approx(energy_j, rel=TOLERANCE), target
        assert energy_j < default_j
        if isinstance(target, Fastest):
            assert time_s <= 1.01 * default_s
