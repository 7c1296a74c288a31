"""The clock controller over a guard process: one word to set a clock, nothing left locked.

Measured beside the alternatives by `python -m benchmarks.clock_transport`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pynvml

from kareus_pp.device import channel as ch
from kareus_pp.device.backend import NVML
from kareus_pp.device.base import DEFAULT_CLOCK, Applied, Sample
from kareus_pp.device.channel import Channel
from kareus_pp.device.errors import GuardError, decode
from kareus_pp.device.nvml import throttle_names
from kareus_pp.errors import DeviceError

SLOW_AFTER_S = 0.025
"""A set that takes longer, three times in a row, cannot follow instructions."""
SLOW_COMMAND_S = 0.25
"""The same for a site command, which starts processes."""
_START_S = 30.0
"""NVML itself takes seconds to initialise where persistence mode is off."""
_CLOSE_S = 6.0
_SILENT_NS = 2_000_000_000
_REMEDY = "default clocks come back by a fresh guard or by kareus-pp unlock"


class GuardController:
    """Sets the clocks of one GPU through its guard process; a `ClockController`.

    Args:
        uuid: The GPU, as NVML names it.
        backend: How the clock is set; see `backend.open_backend`.
        min_dwell_s: A locked clock is kept for at least this long; unlocks never wait.

    Raises:
        DeviceError: The guard could not start, the GPU is not available, or it has an owner.
    """

    def __init__(
        self, uuid: str, backend: Mapping[str, str] = NVML, min_dwell_s: float = 0.0
    ) -> None:
        self._order = {
            "uuid": uuid,
            "backend": dict(backend),
            "min_dwell_s": min_dwell_s,
            "slow_after_s": SLOW_COMMAND_S if backend["device"] == "command" else SLOW_AFTER_S,
        }
        self._pid = os.getpid()
        self._last = DEFAULT_CLOCK
        self._sequence = 0
        self._tail = 0
        self._failure: DeviceError | None = None
        self._closed = False
        self._heard_ns = time.monotonic_ns()
        self._guard_handle: int | None = None
        self._channel = Channel()
        self._words = self._channel.words
        self._start()

    @property
    def guard_pid(self) -> int:
        """Process number of the guard."""
        return self._words[ch.GUARD_PID]

    @property
    def calls(self) -> int:
        """How many times the guard asked the device to change its clock."""
        return self._words[ch.CALLS]

    @property
    def last_call_s(self) -> float | None:
        """How long the last change of the clock took in the driver; None before the first."""
        return self._words[ch.LAST_CALL_NS] / 1e9 or None

    def request(self, mhz: int) -> None:
        """Ask for a clock: one 8-byte store; a repeated value costs nothing."""
        if mhz != self._last:
            self._last = mhz
            self._sequence += 1
            self._words[ch.REQUEST] = ch.word(self._sequence, mhz)

    def applied(self) -> Applied:
        """What the guard did last, read from shared memory.

        An error is final: the clock is at default, or will be as soon as the GPU answers.
        """
        words = self._words
        failure = self.failure
        request = words[ch.APPLIED]
        mhz = DEFAULT_CLOCK if failure else ch.mhz_of(request) if request else None
        return Applied(mhz, words[ch.SWITCHES], str(failure) if failure else "")

    @property
    def failure(self) -> DeviceError | None:
        """Why the guard serves no more; None while it does."""
        if self._failure is None:
            self._failure = self._look_for_failure()
        return self._failure

    def start_sampling(self, period_s: float) -> None:
        """The guard reads the device every `period_s` seconds from now on."""
        self._words[ch.PERIOD_US] = max(1, round(period_s * 1e6))

    def stop_sampling(self) -> None:
        """The guard reads the device no more."""
        self._words[ch.PERIOD_US] = 0

    def drain(self) -> list[Sample]:
        """The samples since the last call; at most the newest 8192."""
        found, self._tail = self._channel.read(self._tail)
        return [
            Sample(
                at_s=at_s,
                energy_j=energy_j,
                power_w=power_w,
                clock_mhz=clock_mhz,
                temperature_c=temperature_c,
                throttled=throttle_names(reasons),
                requested_mhz=requested_mhz,
            )
            for at_s, energy_j, power_w, temperature_c, reasons, clock_mhz, requested_mhz in found
        ]

    def close(self) -> None:
        """Default clocks, and the end of the guard; safe to call twice, and in a forked child."""
        if self._closed or self._pid != os.getpid():
            return
        self.applied()
        self._closed = True
        self._words[ch.REQUEST] = ch.STOP
        deadline = time.monotonic() + _CLOSE_S
        while self._words[ch.STATE] != ch.CLOSED and time.monotonic() < deadline:
            if self._guard_is_dead():
                self._start_rescue()
                break
            time.sleep(0.001)
        if self._guard_handle is not None:
            os.close(self._guard_handle)
            self._guard_handle = None

    def _start(self) -> None:
        start = _own_start_time()
        order = {**self._order, "handle": self._channel.handle, "pid": self._pid, "start": start}
        try:
            _spawn(order, (self._channel.handle,))
            self._shake_hands()
        except BaseException:
            self._channel.words[ch.REQUEST] = ch.STOP
            raise

    def _shake_hands(self) -> None:
        """Wait until the guard owns the GPU; only then may a clock be asked for."""
        deadline = time.monotonic() + _START_S
        words = self._words
        while words[ch.STATE] == ch.STARTING:
            if self._guard_handle is None and words[ch.GUARD_PID]:
                with contextlib.suppress(OSError):
                    self._guard_handle = os.pidfd_open(words[ch.GUARD_PID])
            if time.monotonic() > deadline or self._guard_is_dead():
                raise GuardError(
                    "the guard process did not start",
                    f"try {sys.executable!r} -I -S by hand, or set device to 'dry-run'",
                )
            time.sleep(0.001)
        if words[ch.STATE] == ch.CLOSED:
            raise decode(self._channel.read_error())

    def _look_for_failure(self) -> DeviceError | None:
        if text := self._channel.read_error():
            return decode(text)
        now_ns = time.monotonic_ns()
        if now_ns - max(self._words[ch.HEARTBEAT_NS], self._heard_ns) < _SILENT_NS or self._closed:
            return None
        if not self._guard_is_dead():  # busy in the driver: look again later
            self._heard_ns = now_ns
            return None
        threading.Thread(target=self._start_rescue, daemon=True).start()
        return GuardError("the guard process died", _REMEDY)

    def _guard_is_dead(self) -> bool:
        if self._guard_handle is not None:
            return bool(select.select([self._guard_handle], [], [], 0)[0])
        pid = self._words[ch.GUARD_PID]
        return bool(pid) and not Path(f"/proc/{pid}").exists()

    def _start_rescue(self) -> None:
        """A fresh guard finds the stale lease, resets the clock and, told to stop, ends."""
        rescue = Channel()
        rescue.words[ch.REQUEST] = ch.STOP
        order = {**self._order, "handle": rescue.handle, "pid": self._pid}
        with contextlib.suppress(DeviceError, OSError):
            _spawn({**order, "start": _own_start_time()}, (rescue.handle,))
        rescue.close()


def _own_start_time() -> int:
    text = Path(f"/proc/{os.getpid()}/stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[19])


def _spawn(order: Mapping[str, object], handles: tuple[int, ...]) -> None:
    """Start a guard and wait until it has left this process's children.

    An exec, never a bare fork of a trainer with its threads and locks. No site packages and no
    environment of Python's own: it starts in some 50 ms and nothing is imported that hooks itself
    into interpreters.
    """
    import kareus_pp

    package = Path(kareus_pp.__file__).resolve().parent
    path = [str(package.parent), str(Path(pynvml.__file__).resolve().parent)]
    command = [sys.executable, "-I", "-S", str(package / "device" / "guard_main.py")]
    try:
        child = subprocess.Popen(
            [*command, json.dumps({**order, "path": path})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=handles,
            start_new_session=True,
        )
    except OSError as error:
        raise GuardError(
            f"the guard process cannot be started ({error})", "set device to 'dry-run'"
        ) from None
    child.wait()
