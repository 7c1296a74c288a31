"""A clock controller for devices that live in the trainer's own process.

Emulated and dry-run devices set a clock in microseconds and leave nothing behind when the process
dies, so they need no guard process: a request is applied where it is made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kareus_pp.device.base import DEFAULT_CLOCK, Applied, Device, Sample
from kareus_pp.errors import DeviceError

_LOG = logging.getLogger(__name__)
_MOST_SAMPLES = 100_000


class InProcessController:
    """Sets clocks of a device in this process; implements `ClockController`.

    Args:
        device: The device; `close` closes it.
        min_dwell_s: A clock is kept for at least this long; the newest request waits until then.
    """

    def __init__(self, device: Device, min_dwell_s: float = 0.0) -> None:
        self._device = device
        self._min_dwell_s = min_dwell_s
        self._wake = threading.Condition(threading.RLock())
        self._wanted_mhz: int | None = None
        self._applied = Applied(None, 0)
        self._changed_s = float("-inf")
        self._period_s: float | None = None
        self._sampler = 0
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._threads: list[threading.Thread] = []
        self._closed = False
        if min_dwell_s > 0:
            self._start(self._apply_late, "kareus-dwell")

    def request(self, mhz: int) -> None:
        """Apply a clock now, or when the minimum dwell is over; the newest request wins."""
        if mhz == self._wanted_mhz:
            return
        with self._wake:
            if self._closed:
                return
            self._wanted_mhz = mhz
            if self._dwell_left_s() <= 0:
                self._apply()
            else:
                self._wake.notify_all()

    def applied(self) -> Applied:
        """What was done last."""
        return self._applied

    def start_sampling(self, period_s: float) -> None:
        """Read the device every `period_s` seconds on a thread; a second call sets the period."""
        with self._wake:
            if self._closed:
                return
            idle = self._period_s is None
            self._period_s = period_s
            if idle:
                self._sampler += 1
                self._start(partial(self._sample, self._sampler), "kareus-sample")
            else:
                self._wake.notify_all()

    def stop_sampling(self) -> None:
        """Stop reading the device; what was read can still be drained."""
        with self._wake:
            self._period_s = None
            self._wake.notify_all()

    def drain(self) -> Sequence[Sample]:
        """The samples since the last call."""
        samples: list[Sample] = []
        while self._samples:
            samples.append(self._samples.popleft())
        return samples

    def close(self) -> None:
        """Return to default clocks, end the threads and close the device."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._period_s = None
            self._wanted_mhz = DEFAULT_CLOCK
            if self._applied.mhz not in (None, DEFAULT_CLOCK):
                self._apply()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()
        self._device.close()

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _dwell_left_s(self) -> float:
        return self._changed_s + self._min_dwell_s - time.monotonic()

    def _apply(self) -> None:
        mhz, before = self._wanted_mhz, self._applied
        if mhz is None or mhz == before.mhz:
            return
        try:
            if mhz == DEFAULT_CLOCK:
                self._device.unlock_clock()
            else:
                self._device.lock_clock(mhz)
        except DeviceError as error:
            self._applied = Applied(before.mhz, before.switches, str(error))
            self._wanted_mhz = before.mhz
            return
        # The device is found at default clocks: to ask for them first is no change.
        changed = mhz != (before.mhz or DEFAULT_CLOCK)
        self._applied = Applied(mhz, before.switches + changed)
        self._changed_s = time.monotonic() if changed else self._changed_s

    def _apply_late(self) -> None:
        with self._wake:
            while not self._closed:
                if self._wanted_mhz in (None, self._applied.mhz):
                    self._wake.wait()
                elif (left_s := self._dwell_left_s()) > 0:
                    self._wake.wait(left_s)
                else:
                    self._apply()

    def _sample(self, number: int) -> None:
        with self._wake:
            # A thread that was stopped and finds another one in its place must end.
            while self._period_s is not None and self._sampler == number:
                try:
                    self._samples.append(self._device.sample())
                except DeviceError as error:
                    _LOG.warning("sampling ends: %s", error)
                    self._period_s = None
                    return
                self._wake.wait(self._period_s)
