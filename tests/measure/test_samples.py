from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kareus_pp.device.base import POWER_CAP, Sample
from kareus_pp.measure import energy_between, read_window

TICK_S = 0.1


def counter(
    energy_at: Callable[[float], float], end_s: float, period_s: float = 0.02, phase_s: float = 0.03
) -> list[Sample]:
    """Samples of a counter that shows the energy of its last tick."""
    samples = []
    for n in range(round(end_s / period_s)):
        at = n * period_s + 0.001
        tick = phase_s + TICK_S * int((at - phase_s) // TICK_S)
        samples.append(Sample(at, energy_at(tick), 300.0, 1200, 60.0, (), 1200))
    return samples


@settings(max_examples=60, deadline=None)
@given(
    start=st.floats(0.5, 2.0),
    length=st.floats(0.6, 3.0),
    phase=st.floats(0.0, 0.099),
    power=st.floats(50, 700),
)
def test_a_window_anywhere_between_ticks(
    start: float, length: float, phase: float, power: float
) -> None:
    reading = energy_between(
        counter(lambda t: power * t, 7.0, phase_s=phase), start, start + length
    )
    assert reading is not None
    energy, sd = reading
    # At most one sample period of doubt at each end.
    assert abs(energy - power * length) <= power * 0.021
    assert 0 < sd <= power * 0.02


def test_mean_error_is_far_below_a_tick() -> None:
    def energy_at(t: float) -> float:
        return 300 * t + 20 * (t % 0.5)

    errors = []
    for n in range(40):
        start = 1.0 + 0.013 * n
        reading = energy_between(counter(energy_at, 6.0), start, start + 2.0)
        assert reading is not None
        errors.append(abs(reading[0] - (energy_at(start + 2.0) - energy_at(start))))
    assert sum(errors) / len(errors) < 300 * TICK_S / 6


GOOD = counter(lambda t: 300 * t, 4.0)


def changed(where: Callable[[Sample], bool], **values: object) -> list[Sample]:
    return [replace(s, **values) if where(s) else s for s in GOOD]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (
            [
                replace(s, energy_j=(s.energy_j or 0) - 500 * (s.at_s > 2.0))  # a driver restart
                for s in GOOD
            ],
            "reset",
        ),
        ([replace(s, energy_j=(s.energy_j or 0) + 1e5 * (s.at_s > 2.0)) for s in GOOD], "jumped"),
        (
            [replace(s, energy_j=min(s.energy_j or 0, 450.0) + (s.at_s > 3.1)) for s in GOOD],
            "stood still",
        ),
        (changed(lambda s: 1.9 < s.at_s < 2.1, energy_j=None), "mixed sources"),
        (changed(lambda s: True, energy_j=None, power_w=None), "no reading"),
        (changed(lambda s: 1.9 < s.at_s < 2.0, throttled=("thermal",)), "throttled: thermal"),
        (changed(lambda s: 1.9 < s.at_s < 2.0, throttled=(POWER_CAP,)), "throttled"),
        (changed(lambda s: s.at_s > 1.5, clock_mhz=1000), "not held: 1000 MHz instead of 1200"),
        ([s for s in GOOD if s.at_s < 2.9], "no counter tick before and after"),
    ],
)
def test_what_must_not_be_used(samples: list[Sample], reason: str) -> None:
    assert reason in read_window(samples, 1.0, 3.0).rejected


def test_a_good_window_is_kept_and_a_short_one_is_not() -> None:
    reading = read_window(GOOD, 1.0, 3.0)
    assert reading.rejected == ""
    assert reading.energy_j == pytest.approx(600, rel=0.02)
    assert reading.temperature_c == 60.0
    assert "too short" in read_window(GOOD, 1.0, 1.2).rejected
    assert energy_between(GOOD, 1.0, 1.2) is None


def test_power_limit_at_the_highest_clock_is_no_fault() -> None:
    samples = changed(lambda s: True, throttled=(POWER_CAP,), clock_mhz=1100)
    assert read_window(samples, 1.0, 3.0, top_mhz=1200).rejected == ""
    assert read_window(samples, 1.0, 3.0, top_mhz=1410).rejected != ""


def test_power_readings_stand_in_for_a_counter() -> None:
    samples = changed(lambda s: True, energy_j=None)
    reading = energy_between(samples, 1.0, 3.0)
    assert reading is not None
    assert reading[0] == pytest.approx(600, rel=1e-6)
