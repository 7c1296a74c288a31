"""A device that sets nothing and reads nothing: for machines without an NVIDIA GPU."""

from __future__ import annotations

import time

from kareus_pp.device.base import DEFAULT_CLOCK, DeviceIdentity, Sample
from kareus_pp.profile import Source


class DryRunDevice:
    """Accepts every clock, forgets it, and reads None; implements `Device`."""

    def __init__(self) -> None:
        self._requested_mhz = DEFAULT_CLOCK

    @property
    def identity(self) -> DeviceIdentity:
        """No GPU."""
        return DeviceIdentity("", "dry-run")

    @property
    def source(self) -> Source:
        """Readings are always None; no source but `FILE` is not a reading."""
        return Source.FILE

    @property
    def scope(self) -> str:
        """Nothing is read."""
        return ""

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """No clocks are known."""
        return ()

    def lock_clock(self, mhz: int) -> None:
        """Remember the request, so that samples show it."""
        self._requested_mhz = mhz

    def unlock_clock(self) -> None:
        """Forget the request."""
        self._requested_mhz = DEFAULT_CLOCK

    def sample(self) -> Sample:
        """Time and request; everything else is None."""
        return Sample(at_s=time.monotonic(), requested_mhz=self._requested_mhz)

    def close(self) -> None:
        """Nothing to do."""
