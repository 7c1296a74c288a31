"""Which steps share one reading of the energy counter, and what readings say."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from kareus_pp.device.base import POWER_CAP, Sample
from kareus_pp.runtime.steps import StepTracker

# The counter of a GPU moves every 100 ms: wait for its next tick before a step's energy is taken.
TICK_WAIT_S = 0.25
# Steps further apart than this do not share a window: something else ran between them.
_GAP_S = 0.1
_WINDOW_S = 1.0
# Fewer power-capped readings than this share of those under load are no ceiling.
_CAPPED_SHARE = 0.1


def next_window(
    waiting: Sequence[StepTracker], sampling: bool, now_s: float | None
) -> list[StepTracker]:
    """The next steps whose energy is read as one; none while samples must still come.

    The counter moves every 100 ms: steps shorter than a second share one reading.

    Args:
        waiting: Finished steps, in order.
        sampling: Whether energy is read at all; else every step stands alone.
        now_s: The present on the scale of `time.monotonic()`; None: nothing more will come.
    """
    if not sampling:
        return list(waiting[:1])
    window: list[StepTracker] = []
    for step in waiting:
        if window and step.row is not window[0].row:
            break
        if window and step.started_s - window[-1].ended_s > _GAP_S:
            break
        window.append(step)
        if step.ended_s - window[0].started_s >= _WINDOW_S:
            break
    else:
        if now_s is not None:
            return []
    if window and now_s is not None and now_s < window[-1].ended_s + TICK_WAIT_S:
        return []
    return window


def ceiling_mhz(samples: Sequence[Sample]) -> int | None:
    """The clock that the power limit left at default clocks; None where it did not limit."""
    capped = [
        sample.clock_mhz
        for sample in samples
        if POWER_CAP in sample.throttled and sample.clock_mhz is not None
    ]
    if len(capped) < max(1, _CAPPED_SHARE * len(samples)):
        return None
    return int(median(capped))


def share_of(value: float | None, share: float) -> float | None:
    """A part of a reading; None where there is none."""
    return None if value is None else value * share
