"""The profile phase against the emulator's truth: limits are those that are promised to users."""

from __future__ import annotations

import pytest

from benchmarks.learning_emulated import profile_phase
from benchmarks.learning_faults import FAULTS, inject
from kareus_pp.config import ProfilingConfig


@pytest.mark.parametrize(
    ("gpu", "seed"),
    [
        ("a100", 0),
        pytest.param("a100", 1, marks=pytest.mark.slow),
        pytest.param("a40", 0, marks=pytest.mark.slow),
        pytest.param("a40", 1, marks=pytest.mark.slow),
    ],
)
def test_options_match_the_model(gpu: str, seed: int) -> None:
    outcome = profile_phase(gpu, seed, ProfilingConfig(plans=12, iterations_per_plan=3))
    assert outcome.plans <= 12
    assert outcome.iterations <= 36
    assert outcome.iterations < outcome.sweep_iterations
    assert outcome.time_worst < 0.02
    assert outcome.energy_worst < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason", "limit"),
    [
        ("throttling", "throttled", 0.03),
        ("counter reset", "the energy counter was reset", 0.03),
        ("outlier iterations", "outlier in iteration time", 0.03),
        # Where the clock is asked for anew in every sample, not holding it cannot be seen.
        ("clock never reached", "the clock was not held", 0.05),
    ],
)
def test_faults_are_rejected(fault: str, reason: str, limit: float) -> None:
    outcome = inject(FAULTS[fault], unchecked=False)[1]
    assert outcome["rejected"][reason] > 0
    assert outcome["energy_mean"] < limit
