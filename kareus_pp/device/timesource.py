"""Where an emulated device takes its time from: the wall clock, or a clock that only it moves."""

from __future__ import annotations

import time
from typing import Protocol


class TimeSource(Protocol):
    """A monotonic clock that can be waited on."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    def sleep_until(self, at_s: float) -> None:
        """Return at `at_s`, or earlier so that the caller may look whether its goal has moved."""
        ...


class WallTime:
    """`time.monotonic`, slept on in slices: coarse ones, then short ones near the goal.

    The ranks of an emulated pipeline share few cores, so there is no spinning.
    """

    COARSE_S = 0.004
    FINE_S = 0.0002
    _MARGIN_S = 0.0015

    def now(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()

    def sleep_until(self, at_s: float) -> None:
        """Sleep for a slice of the time until `at_s`."""
        left = at_s - time.monotonic()
        if left > self._MARGIN_S:
            time.sleep(min(left - self._MARGIN_S, self.COARSE_S))
        elif left > 0:
            time.sleep(min(left, self.FINE_S))


class VirtualTime:
    """Time that passes only by `sleep_until`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The virtual time in seconds."""
        return self._now_s

    def sleep_until(self, at_s: float) -> None:
        """Move to `at_s`; never back."""
        self._now_s = max(self._now_s, at_s)
