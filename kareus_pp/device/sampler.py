"""Sampling in the guard process, beside the loop that changes clocks."""

from __future__ import annotations

import threading
import time

from kareus_pp.device.base import Sample
from kareus_pp.device.channel import Channel
from kareus_pp.device.counter import CounterWatch
from kareus_pp.device.errors import ClockError
from kareus_pp.device.nvml import NvmlDevice
from kareus_pp.device.readback import NOT_HELD, verdict
from kareus_pp.errors import DeviceError

SETTLE_S = 0.05
"""A clock is read back once it was held for this long; the switch itself takes some 10 ms."""
MISSES = 3


class Sampler:
    """Reads the device every period in a thread of its own, so that a reading delays no switch.

    Attributes:
        asked: The clock that is locked (0: none) and since when, on the scale of
            `time.monotonic()`; replaced as one.
        problem: Why it stopped; None while it works.
    """

    def __init__(self, channel: Channel, device: NvmlDevice) -> None:
        self._channel, self._device = channel, device
        self._period_s = 0.0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.asked = (0, 0.0)
        self.problem: DeviceError | None = None

    def set_period(self, period_s: float) -> None:
        """Sample every `period_s`; 0: not at all."""
        if period_s == self._period_s:
            return
        self.stop()
        self._period_s = period_s
        if period_s:
            self._end = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._end,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End sampling; a reading that hangs in the driver is left alone."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None

    def _run(self, end: threading.Event) -> None:
        counter = CounterWatch(self._device.label)
        due, misses = time.monotonic(), 0
        while not end.is_set():
            mhz, since_s = self.asked
            try:
                sample, reasons = self._device.sample_and_reasons()
                sample = counter.check(sample)
            except DeviceError as error:
                self.problem = error
                return
            settled = mhz and sample.at_s > since_s + SETTLE_S and self.asked == (mhz, since_s)
            if settled and verdict(mhz, sample.clock_mhz, reasons) == NOT_HELD:
                misses += 1
                if misses >= MISSES:
                    self.problem = not_held(self._device, mhz, sample.clock_mhz)
                    return
            elif settled:
                misses = 0
            self._push(sample, reasons, mhz)
            due = max(due + self._period_s, time.monotonic())
            end.wait(due - time.monotonic())

    def _push(self, sample: Sample, reasons: int, requested_mhz: int) -> None:
        self._channel.push(
            (
                sample.at_s,
                sample.energy_j,
                sample.power_w,
                sample.temperature_c,
                reasons,
                sample.clock_mhz,
                requested_mhz,
            )
        )


def not_held(device: NvmlDevice, locked_mhz: int, actual_mhz: int | None) -> ClockError:
    """The error of a clock that is locked and not held."""
    return ClockError(
        f"{device.label} was locked at {locked_mhz} MHz and runs at {actual_mhz} MHz, with no "
        f"reason given",
        "look for another tool that sets clocks; default clocks are back",
    )
