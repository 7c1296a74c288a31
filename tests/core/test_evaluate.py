from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kareus_pp.builders import build_schedule
from kareus_pp.errors import ProfileError
from kareus_pp.evaluate import evaluate, start_times
from kareus_pp.plan import default_settings
from kareus_pp.profile import Option, Overhead, Profile
from kareus_pp.schedule import Schedule
from kareus_pp.setting import Setting
from tests.core.strategies import schedules


def uniform_profile(schedule: Schedule, forward_s: float = 1.0, backward_s: float = 2.0) -> Profile:
    return Profile(
        options={
            cls: (Option(Setting(1000), forward_s if cls.kind.value == "F" else backward_s, 100.0),)
            for cls in schedule.classes
        },
        blocking_power_w=(10.0,) * schedule.stages,
    )


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_length_of_balanced_pipelines(name: str) -> None:
    """(M + S - 1)(F + B), as in every paper on pipelines."""
    schedule = build_schedule(name, stages=4, microbatches=8)
    cost = evaluate(schedule, default_settings(schedule), uniform_profile(schedule))
    assert cost.time_s == pytest.approx((8 + 4 - 1) * 3.0)
    assert cost.idle_s == pytest.approx((9.0,) * 4)
    assert cost.energy_j == pytest.approx(64 * 100.0 + 4 * 9.0 * 10.0)


def test_overhead_and_latency() -> None:
    schedule = build_schedule("1f1b", stages=2, microbatches=1)
    profile = uniform_profile(schedule)
    slow = Profile(profile.options, profile.blocking_power_w, Overhead(iteration_s=0.5, p2p_s=0.25))
    cost = evaluate(schedule, default_settings(schedule), slow)
    assert cost.time_s == pytest.approx(6.0 + 2 * 0.25 + 0.5)


@given(schedules(), st.integers(0, 2**31))
def test_starts_respect_every_edge(schedule: Schedule, seed: int) -> None:
    duration = np.random.default_rng(seed).uniform(0, 1, len(schedule.instructions))
    start = start_times(schedule, duration, p2p_s=0.1)
    slack = [
        start[e.after] - start[e.before] - duration[e.before] - 0.1 * e.crosses_stages
        for e in schedule.edges
    ]
    assert min(slack, default=0.0) >= -1e-9
    tight = {e.after for e, s in zip(schedule.edges, slack, strict=True) if s < 1e-9}
    assert tight | {n for n in range(len(duration)) if start[n] == 0} == set(range(len(duration)))


def test_missing_class_and_setting() -> None:
    schedule = build_schedule("1f1b", stages=2, microbatches=1)
    with pytest.raises(ProfileError, match="no options for instruction class 0F"):
        evaluate(schedule, default_settings(schedule), Profile({}, (1.0, 1.0)))
    rows = tuple(tuple(Setting(999) for _ in row) for row in schedule.order)
    with pytest.raises(ProfileError, match="no option 999 for instruction class 0F"):
        evaluate(schedule, rows, uniform_profile(schedule))
