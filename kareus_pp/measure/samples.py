"""Energy of a time window from samples of a counter that moves in ticks, and when not to trust it.

NVML's energy counter moves about every 100 ms (field measurements: ml.energy blog; arXiv
2312.02741). Samples come every 20 ms or so, from a helper process. A tick is seen between two
samples; the counter is interpolated between ticks, so that a window may begin and end anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid

from kareus_pp.device.base import DEFAULT_CLOCK, POWER_CAP, Sample

MIN_TICKS = 3
"""A window must hold at least this many counter ticks."""
MAX_STILL_S = 1.0
"""A counter that does not move for this long stands still."""
MAX_POWER_W = 3000.0
"""No single GPU or module draws more; a faster counter has jumped."""
CLOCK_TOLERANCE = 0.02
"""Relative difference of actual and requested clock that still counts as held."""
MAX_SHARE_NOT_HELD = 0.1
"""Share of a window's samples that may show another clock than requested."""


@dataclass(frozen=True)
class WindowReading:
    """What the samples say about one window of time.

    Attributes:
        energy_j: Energy in joules; None where it cannot be told.
        energy_sd_j: Standard deviation of `energy_j`; None as above.
        temperature_c: Mean temperature; None where not read.
        rejected: Why the window must not be used; empty where it may.
    """

    energy_j: float | None
    energy_sd_j: float | None
    temperature_c: float | None
    rejected: str = ""


def energy_between(
    samples: Sequence[Sample], start_s: float, end_s: float
) -> tuple[float, float] | None:
    """Energy and its standard deviation in joules between two monotonic times.

    None where the samples do not allow it: fewer than `MIN_TICKS` ticks inside, no tick before or
    after the window, a counter that fell, jumped or stood still, or mixed sources. Samples must
    reach a tick (100 ms) beyond the end: ask for an iteration one tick after it ended.
    """
    reading = _energy(samples, start_s, end_s)
    return None if isinstance(reading, str) else reading


def read_window(
    samples: Sequence[Sample], start_s: float, end_s: float, top_mhz: int | None = None
) -> WindowReading:
    """Energy, temperature and grounds for rejection of one window, as of one iteration.

    Args:
        samples: Readings that reach beyond both ends.
        start_s: Begin of the window, on the scale of `time.monotonic()`.
        end_s: End of the window.
        top_mhz: Highest supported clock. To ask for it, or for default clocks, means as fast as the
            power limit lets the GPU run: there the limit is no ground for rejection.
    """
    inside = [sample for sample in samples if start_s <= sample.at_s <= end_s]
    heat = [sample.temperature_c for sample in inside if sample.temperature_c is not None]
    temperature = float(np.mean(heat)) if heat else None
    reading = _energy(samples, start_s, end_s)
    energy, energy_sd = (None, None) if isinstance(reading, str) else reading
    reason = (
        _throttled(samples, start_s, end_s, top_mhz)
        or _not_held(samples, start_s, end_s, top_mhz)
        or (reading if isinstance(reading, str) else "")
    )
    return WindowReading(energy, energy_sd, temperature, reason)


def _energy(samples: Sequence[Sample], start_s: float, end_s: float) -> tuple[float, float] | str:
    ordered = sorted(samples, key=lambda sample: sample.at_s)
    near = [s for s in ordered if start_s - MAX_STILL_S <= s.at_s <= end_s + MAX_STILL_S]
    counted = sum(sample.energy_j is not None for sample in near)
    if 0 < counted < len(near):
        return "mixed sources: the energy counter was read in some samples only"
    if counted:
        return _counter_energy(near, start_s, end_s)
    if near and all(sample.power_w is not None for sample in near):
        return _power_energy(near, start_s, end_s)
    return "no reading of energy or power"


def _counter_energy(
    samples: Sequence[Sample], start_s: float, end_s: float
) -> tuple[float, float] | str:
    at = np.array([sample.at_s for sample in samples])
    energy = np.array([sample.energy_j for sample in samples], dtype=float)
    step = np.diff(energy)
    relevant = (at[1:] >= start_s) & (at[:-1] <= end_s)
    if np.any(step[relevant] < 0):
        return "the energy counter was reset"
    moved = np.flatnonzero(step > 0)
    tick_at, tick_sd = _tick_times(at, moved)
    tick_energy = energy[moved + 1]
    before = int(np.searchsorted(tick_at, start_s, side="right")) - 1
    after = int(np.searchsorted(tick_at, end_s, side="left"))
    if before < 0 or after >= len(tick_at):
        return "no counter tick before and after the window"
    if after - before - 1 < MIN_TICKS:
        return f"too short: fewer than {MIN_TICKS} ticks of the energy counter"
    span_s = np.diff(tick_at[before : after + 1])
    span_j = np.diff(tick_energy[before : after + 1])
    if float(span_s.max()) > MAX_STILL_S:
        return "the energy counter stood still"
    gap_s = at[moved + 1] - at[moved]
    if np.any(span_j > MAX_POWER_W * (span_s + gap_s[before + 1 : after + 1])):
        return "the energy counter jumped"
    start_j, start_sd = _at(start_s, tick_at, tick_energy, tick_sd, before)
    end_j, end_sd = _at(end_s, tick_at, tick_energy, tick_sd, after - 1)
    return end_j - start_j, math.hypot(start_sd, end_sd)


def _tick_times(
    at: NDArray[np.float64], moved: NDArray[np.intp]
) -> tuple[NDArray[np.float64], float]:
    """When the counter moved, and how well that is known.

    A tick lies between two samples. Its middle is right on average, with the standard deviation
    of a uniform distribution over the gap.
    """
    if len(moved) == 0:
        return np.empty(0), 0.0
    tick_at = (at[moved] + at[moved + 1]) / 2
    return tick_at, float(np.median(at[moved + 1] - at[moved])) / math.sqrt(12)


def _at(
    time_s: float,
    tick_at: NDArray[np.float64],
    tick_energy: NDArray[np.float64],
    tick_sd_s: float,
    left: int,
) -> tuple[float, float]:
    """Interpolated counter and its standard deviation at a time between two ticks.

    Between ticks the power may differ from its mean; how much is taken from how the mean power
    of neighbouring ticks differs (a Brownian bridge with that spread).
    """
    width = tick_at[left + 1] - tick_at[left]
    share = (time_s - tick_at[left]) / width
    rise = tick_energy[left + 1] - tick_energy[left]
    lower, upper = max(0, left - 2), min(len(tick_at) - 1, left + 3)
    power = [
        (tick_energy[i + 1] - tick_energy[i]) / (tick_at[i + 1] - tick_at[i])
        for i in range(lower, upper)
    ]
    spread = float(np.std(power)) * width * math.sqrt(max(0.0, share * (1 - share)))
    return float(tick_energy[left] + share * rise), math.hypot(spread, tick_sd_s * rise / width)


def _power_energy(
    samples: Sequence[Sample], start_s: float, end_s: float
) -> tuple[float, float] | str:
    at = np.array([sample.at_s for sample in samples])
    power = np.array([sample.power_w for sample in samples], dtype=float)
    inside = (at >= start_s) & (at <= end_s)
    if inside.sum() < MIN_TICKS:
        return f"too short: fewer than {MIN_TICKS} power readings"
    if at[0] > start_s or at[-1] < end_s:
        return "no power reading before and after the window"
    if float(np.diff(at).max()) > MAX_STILL_S:
        return "a gap between power readings"
    time_s = np.concatenate([[start_s], at[inside], [end_s]])
    value = np.interp(time_s, at, power)
    energy = float(trapezoid(value, time_s))
    period = float(np.median(np.diff(at)))
    spread = float(np.std(np.diff(power[inside]))) / math.sqrt(2)
    return energy, spread * math.sqrt(period * (end_s - start_s))


def _throttled(samples: Sequence[Sample], start_s: float, end_s: float, top_mhz: int | None) -> str:
    """Grounds for throttling, but for those that hold while a clock request is being followed."""
    reasons: set[str] = set()
    for before, sample in pairwise(sorted(samples, key=lambda s: s.at_s)):
        if not start_s <= sample.at_s <= end_s or sample.requested_mhz != before.requested_mhz:
            continue
        capped = sample.requested_mhz not in (DEFAULT_CLOCK, top_mhz)
        reasons.update(r for r in sample.throttled if r != POWER_CAP or capped)
    return f"throttled: {', '.join(sorted(reasons))}" if reasons else ""


def _not_held(samples: Sequence[Sample], start_s: float, end_s: float, top_mhz: int | None) -> str:
    """A clock that was requested before the last sample already, and is not there."""
    checked = missed = 0
    example = ""
    for before, sample in pairwise(sorted(samples, key=lambda s: s.at_s)):
        if not start_s <= sample.at_s <= end_s or sample.requested_mhz != before.requested_mhz:
            continue
        wanted, actual = sample.requested_mhz, sample.clock_mhz
        if wanted is None or actual is None or wanted in (DEFAULT_CLOCK, top_mhz):
            continue
        checked += 1
        if abs(actual - wanted) > CLOCK_TOLERANCE * wanted:
            missed += 1
            example = f"{actual} MHz instead of {wanted} MHz"
    if checked and missed > MAX_SHARE_NOT_HELD * checked:
        return f"the clock was not held: {example}"
    return ""
