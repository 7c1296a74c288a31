"""Watching a plan: is training as fast as planned?"""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 20
_TOLERANCE = 0.05


class DriftWatch:
    """Compares measured iteration times with the planned one.

    The median over 20 iterations decides, so that a checkpoint or a slow batch does not.

    Args:
        planned_s: Predicted iteration time in seconds; None where there is nothing to compare.

    Attributes:
        held: For how many added iterations the plan has held.
    """

    def __init__(self, planned_s: float | None) -> None:
        self._planned_s = planned_s
        self.held = 0
        self._times_s: deque[float] = deque(maxlen=_WINDOW)

    def add(self, iter_time_s: float) -> str:
        """Add a measured iteration; why the plan does not hold, or empty text."""
        self._times_s.append(iter_time_s)
        if self._planned_s is None or len(self._times_s) < _WINDOW:
            return ""
        typical_s = median(self._times_s)
        if typical_s <= self._planned_s * (1 + _TOLERANCE):
            self.held += 1
            return ""
        return (
            f"iterations take {typical_s:.4f} s and {self._planned_s:.4f} s were planned: the plan "
            f"does not hold"
        )
