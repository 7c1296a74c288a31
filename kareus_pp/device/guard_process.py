"""What the guard process does: the loop that applies the word, and every way out of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from typing import Any

from kareus_pp.device import channel as ch
from kareus_pp.device.backend import open_backend
from kareus_pp.device.channel import Channel
from kareus_pp.device.errors import (
    ClockError,
    GuardError,
    NoPermissionError,
    NotSupportedError,
    encode,
)
from kareus_pp.device.lease import Lease, Ownership, leases, runtime_folder
from kareus_pp.device.nvml import NvmlDevice
from kareus_pp.device.readback import NOT_HELD, verdict
from kareus_pp.device.sampler import MISSES, SETTLE_S, Sampler, not_held
from kareus_pp.errors import DeviceError

ACTIVE_POLL_S = 0.0002
IDLE_POLL_S = 0.005
_ACTIVE_FOR_S = 1.0
_RESET_FOR_S = 5.0
_PRIORITY = -10
_RETRY_S = 1.0


def main(order: dict[str, Any]) -> int:
    """Run one guard to its end.

    Args:
        order: `handle` (descriptor of the channel), `pid` and `start` (the trainer and its start
            time in clock ticks), `uuid`, `backend`, `min_dwell_s`, `slow_after_s`.
    """
    terminated = _quiet()
    channel = Channel(order["handle"])
    channel.words[ch.GUARD_PID] = os.getpid()
    try:
        watch = Trainer(order["pid"], order["start"])
        ownership = Ownership(order["uuid"], runtime_folder())
    except DeviceError as error:
        return _give_up(channel, error)
    try:
        device = open_backend(order["backend"], order["uuid"])
        if ownership.stale() is not None:  # an earlier owner was killed together with its guard
            device.unlock_clock()
    except Exception as error:
        ownership.release()
        return _give_up(channel, _explained(error))
    guard = Guard(channel, device, ownership, order)
    try:
        guard.run(watch, terminated)
    except Exception as error:
        guard.problem = guard.problem or _explained(error)
    finally:
        guard.close()
    return 0


def _explained(error: Exception) -> DeviceError:
    if isinstance(error, DeviceError):
        return error
    return GuardError(f"the guard failed: {error!r}", "report this")


def _quiet() -> threading.Event:
    """Only TERM ends a guard from outside; the kernel should kill others first.

    On a host whose cores are full, the guard goes first where it may: it needs little, and in time.
    """
    terminated = threading.Event()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    for score in ("-900", "0"):  # lowering it takes CAP_SYS_RESOURCE
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:
            stream.write(score)
            stream.flush()
            break
    return terminated


def _give_up(channel: Channel, error: DeviceError) -> int:
    channel.write_error(encode(error))
    channel.words[ch.STATE] = ch.CLOSED
    return 1


class Trainer:
    """The guarded process, told apart from a later one with the same number by its start time."""

    def __init__(self, pid: int, start: int) -> None:
        self._pid, self._start = pid, start
        self._handle: int | None = None
        with contextlib.suppress(OSError):  # gone already, or a kernel before 5.3
            self._handle = os.pidfd_open(pid)
        self._gone = start_time(pid) != start

    def wait(self, seconds: float) -> bool:
        """Sleep for up to `seconds`; True as soon as the trainer is dead."""
        if self._gone:
            return True
        if self._handle is not None:
            return bool(select.select([self._handle], [], [], seconds)[0])
        time.sleep(seconds)
        return start_time(self._pid) != self._start


def start_time(pid: int) -> int:
    """Start of a process in clock ticks since boot, 0 where it is dead or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


class Guard:
    """Applies requests to one GPU; what it locked, it resets.

    Attributes:
        problem: Why it stood down; None while it serves.
    """

    def __init__(
        self, channel: Channel, device: NvmlDevice, ownership: Ownership, order: dict[str, Any]
    ) -> None:
        self._channel, self._device, self._ownership = channel, device, ownership
        self._dwell_s: float = order["min_dwell_s"]
        self._slow_after_s: float = order["slow_after_s"]
        self._lease = Lease(
            uuid=order["uuid"],
            guard_pid=os.getpid(),
            trainer_pid=order["pid"],
            since_s=time.time(),
            backend=order["backend"],
        )
        self.problem: DeviceError | None = None
        self._mhz = 0
        self._changed_s = self._checked_s = 0.0
        self._may_be_locked = False
        self._retry_s = 0.0
        self._slow = self._misses = 0
        self._verified: set[int] = set()
        self._sampler = Sampler(channel, device)

    def run(self, trainer: Trainer, terminated: threading.Event) -> None:
        """Serve until the trainer dies or asks, or somebody terminates this process."""
        words = self._channel.words
        self._ownership.write(self._lease)
        words[ch.STATE] = ch.READY
        threading.Thread(target=clean_up, args=(self._lease.uuid,), daemon=True).start()
        seen, active_until = 0, 0.0
        while not terminated.is_set():
            now = time.monotonic()
            request = words[ch.REQUEST]
            if request != seen:
                active_until = now + _ACTIVE_FOR_S
                if request == ch.STOP:
                    return
                if self._take(request, now):
                    seen = request
            self._look_after(now)
            words[ch.HEARTBEAT_NS] = time.monotonic_ns()
            if trainer.wait(ACTIVE_POLL_S if now < active_until else IDLE_POLL_S):
                return
        self.problem = self.problem or GuardError(
            "the guard was terminated from outside", "default clocks are back; training goes on"
        )

    def close(self) -> None:
        """Reset what may be locked, with patience, and give up the lease."""
        self._sampler.stop()
        deadline = time.monotonic() + _RESET_FOR_S
        pause_s = 0.02
        while not self._try_reset() and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
        if self.problem is not None:
            self._channel.write_error(encode(self.problem))
        with contextlib.suppress(OSError):
            if self._may_be_locked:
                reason = self.problem.cause if self.problem else "unknown"
                self._ownership.write(
                    Lease(**{**vars(self._lease), "problem": f"the reset failed: {reason}"})
                )
            else:
                self._ownership.clear()
        self._channel.words[ch.STATE] = ch.CLOSED
        self._ownership.release()
        self._device.close()

    def _take(self, request: int, now: float) -> bool:
        """Apply a request; False where it has to wait for the dwell time. Unlocks never wait."""
        mhz = ch.mhz_of(request)
        if self.problem is None and mhz != self._mhz:
            if mhz and now < self._changed_s + self._dwell_s:
                return False
            self._change(mhz)
        if self.problem is None:
            self._channel.words[ch.APPLIED] = request
        return True

    def _change(self, mhz: int) -> None:
        words = self._channel.words
        begin = time.monotonic_ns()
        try:
            if mhz:
                self._may_be_locked = True
                self._device.lock_clock(mhz)
            else:
                self._device.unlock_clock()
                self._may_be_locked = False
        except (NoPermissionError, NotSupportedError) as error:
            if mhz and not self._mhz:
                self._may_be_locked = False  # it was never allowed to lock anything
            self._stand_down(error)
            return
        except DeviceError as error:
            self._stand_down(error)
            return
        finally:
            took = time.monotonic_ns() - begin
            words[ch.CALLS] += 1
        self._mhz = mhz
        self._changed_s = self._checked_s = time.monotonic()
        words[ch.LAST_CALL_NS] = took
        words[ch.SWITCHES] += 1
        self._slow = self._slow + 1 if took > self._slow_after_s * 1e9 else 0
        if self._slow >= MISSES:
            self._stand_down(
                ClockError(
                    f"setting the clock of {self._device.label} takes {took / 1e6:.0f} ms, too "
                    f"long to follow instructions (at most {self._slow_after_s * 1e3:.0f} ms)",
                    "look for other tools that poll the driver; default clocks are back",
                )
            )

    def _look_after(self, now: float) -> None:
        """What goes on beside requests: sampling, reading back, resets that failed before."""
        words = self._channel.words
        self._sampler.asked = (self._mhz, self._changed_s)
        self._sampler.set_period(words[ch.PERIOD_US] / 1e6 if self.problem is None else 0.0)
        if self.problem is None:
            if self._sampler.problem is not None:
                self._stand_down(self._sampler.problem)
            elif self._mhz and self._mhz not in self._verified and now > self._checked_s + SETTLE_S:
                self._read_back()
        elif self._may_be_locked and now > self._retry_s:
            self._retry_s = now + _RETRY_S
            self._try_reset()

    def _read_back(self) -> None:
        """Once for each clock, and again while it is not held: no polling in steady state."""
        try:
            actual = self._device.clock_mhz()
            found = verdict(self._mhz, actual, self._device.reason_bits())
        except DeviceError as error:
            self._stand_down(error)
            return
        self._checked_s = time.monotonic()
        if found != NOT_HELD:
            self._verified.add(self._mhz)
            self._misses = 0
            return
        self._misses += 1
        if self._misses >= MISSES:
            self._stand_down(not_held(self._device, self._mhz, actual))

    def _stand_down(self, error: DeviceError) -> None:
        """Default clocks, then the news; from here on requests are ignored."""
        self.problem = error
        self._try_reset()
        self._retry_s = time.monotonic() + _RETRY_S
        self._channel.words[ch.APPLIED] = ch.word(1, 0)
        self._channel.write_error(encode(error))
        self._channel.words[ch.STATE] = ch.STOOD_DOWN

    def _try_reset(self) -> bool:
        if self._may_be_locked:
            try:
                self._device.unlock_clock()
            except DeviceError as error:
                self.problem = self.problem or error
                return False
            finally:
                self._channel.words[ch.CALLS] += 1
            self._may_be_locked = False
            self._mhz = 0
        return True


def clean_up(own_uuid: str = "") -> None:
    """Reset the other GPUs whose owners, of this user, died together with their guards."""
    for path, lease, live in leases():
        with contextlib.suppress(DeviceError, OSError):
            if not live and lease.uuid != own_uuid and path.stat().st_uid == os.geteuid():
                reset_stale(lease, path)


def reset_stale(lease: Lease, path: Any, patience_s: float = 0.0) -> None:
    """Reset the GPU of a stale lease and remove the lease.

    A lease of another user decides neither which command runs nor which socket is spoken to.

    Raises:
        DeviceError: It has an owner again, or the reset failed; the lease stays.
    """
    ownership = Ownership(lease.uuid, path.parent, patience_s)
    try:
        if ownership.stale() is None:
            return
        trusted = path.stat().st_uid == os.geteuid()
        device = open_backend(lease.backend if trusted else {}, lease.uuid)
        try:
            device.unlock_clock()
        finally:
            device.close()
        ownership.clear()
    finally:
        ownership.release()
