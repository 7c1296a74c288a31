"""Before training: what can be controlled and trusted on one GPU, and what to do where it cannot.

Used by the runtime at start and by `kareus-pp doctor`. Reads only; nothing is set.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kareus_pp.device.backend import open_backend
from kareus_pp.device.base import DEFAULT_CLOCK
from kareus_pp.device.counter import PLAUSIBLE_W, CounterWatch
from kareus_pp.device.errors import CounterError, NoPermissionError, NotSupportedError, OwnedError
from kareus_pp.device.guard import GuardController
from kareus_pp.device.lease import leases
from kareus_pp.device.nvml import PERMISSION_REMEDY, NvmlDevice, throttle_names
from kareus_pp.device.readback import NOT_HELD, verdict
from kareus_pp.errors import DeviceError

Level = Literal["ok", "warning", "error"]

PERMISSION = "permission"
"""The check that only a try can settle; see `try_clock`."""
COUNTER_S = 0.65
"""Long enough for six ticks of the energy counter."""
_AGREEMENT = 0.25
"""Power readings are averages over up to a second: more disagreement than this is no noise."""
_CAP_SYS_ADMIN = 21
_BUSY_PERCENT = 50


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What was looked at, in a word or two.
        level: `ok`; `warning` where training under control works with a limit; `error` where it
            does not.
        text: What was found and what follows from it.
        remedy: What to do; empty where nothing is.
        error: The error to raise where the level is `error`.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""
    error: DeviceError | None = None


def preflight(
    uuid: str, backend: Mapping[str, str], counter_s: float = COUNTER_S
) -> tuple[Finding, ...]:
    """Look at one GPU through a backend.

    Args:
        uuid: The GPU, as NVML names it.
        backend: How clocks are set; see `backend.open_backend`.
        counter_s: How long the energy counter is watched, in seconds.
    """
    try:
        device = open_backend(backend, uuid)
    except DeviceError as error:
        return (_failed("device", error),)
    try:
        opened = Finding("device", "ok", f"{device.label} through {backend['device']}")
        checks: tuple[Callable[[], Finding], ...] = (
            lambda: _clocks(device),
            lambda: _permission(backend),
            lambda: _persistence(device),
            lambda: _counter(device, counter_s),
            lambda: _owner(uuid),
            lambda: _capped(device),
            lambda: _others(device),
        )
        return (opened, *(_guarded(check) for check in checks))
    finally:
        device.close()


def require(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The warnings among the findings.

    Raises:
        DeviceError: The first error among them.
    """
    for finding in findings:
        if finding.level == "error":
            raise finding.error or DeviceError(finding.text, finding.remedy)
    return tuple(finding for finding in findings if finding.level == "warning")


def try_clock(controller: GuardController, mhz: int, patience_s: float = 10.0) -> float | None:
    """Lock a clock and unlock it at once, through the guard: what no reading can tell.

    Returns:
        How long the driver took for a change, in seconds.

    Raises:
        DeviceError: The driver refused; default clocks are back.
    """
    for wanted in (mhz, DEFAULT_CLOCK):
        controller.request(wanted)
        deadline = time.monotonic() + patience_s
        while controller.applied().mhz != wanted and time.monotonic() < deadline:
            time.sleep(0.001)
            if controller.failure is not None:
                raise controller.failure
    return controller.last_call_s


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except DeviceError as error:
        return _failed("reading", error)


def _failed(check: str, error: DeviceError) -> Finding:
    return Finding(check, "error", error.cause, error.remedy, error)


def _clocks(device: NvmlDevice) -> Finding:
    clocks = device.supported_clocks_mhz()
    if len(clocks) < 2:
        cause = f"{device.label} offers {len(clocks)} SM clocks, so there is nothing to choose"
        return _failed("clocks", NotSupportedError(cause, "set device to 'dry-run'"))
    return Finding("clocks", "ok", f"{len(clocks)} SM clocks from {clocks[0]} to {clocks[-1]} MHz")


def _permission(backend: Mapping[str, str]) -> Finding:
    if backend["device"] == "zeusd":
        return Finding(PERMISSION, "ok", f"zeusd at {backend['socket']} offers GPU control")
    if backend["device"] == "command":
        program = shlex.split(backend["lock"])[0]
        if shutil.which(program) is None:
            cause = f"the site command {program!r} is not on this machine's path"
            return _failed(PERMISSION, NoPermissionError(cause, "correct command.lock"))
        return Finding(PERMISSION, "ok", f"clocks are set by {program!r}")
    if not has_sys_admin():
        return Finding(
            PERMISSION,
            "warning",
            f"this process (user {os.geteuid()}) lacks CAP_SYS_ADMIN, which setting clocks takes: "
            f"the driver will refuse",
            PERMISSION_REMEDY,
        )
    return Finding(PERMISSION, "ok", "this process has CAP_SYS_ADMIN")


def has_sys_admin() -> bool:
    """True where this process has the capability that setting clocks takes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return os.geteuid() == 0


def _persistence(device: NvmlDevice) -> Finding:
    mode = device.persistence_mode()
    if mode is False:
        return Finding(
            "persistence",
            "warning",
            "persistence mode is off: the first call takes seconds, and a lock may be lost between "
            "jobs",
            "nvidia-smi -pm 1, or run nvidia-persistenced",
        )
    return Finding("persistence", "ok", "persistence mode is on" if mode else "not readable here")


def _counter(device: NvmlDevice, counter_s: float) -> Finding:
    """Does the counter move, and does it agree with power?"""
    watch = CounterWatch(device.label)
    first = last = watch.check(device.sample())
    powers = []
    deadline = time.monotonic() + counter_s
    while time.monotonic() < deadline:
        time.sleep(0.02)
        last = watch.check(device.sample())
        powers.append(last.power_w)
    assert first.energy_j is not None
    if last.energy_j is None or last.energy_j == first.energy_j:
        cause = f"the energy counter of {device.label} did not move in {counter_s:.1f} s"
        return _failed("energy counter", CounterError(cause, "energy cannot be planned from it"))
    counted_w = (last.energy_j - first.energy_j) / (last.at_s - first.at_s)
    known = [power for power in powers if power is not None]
    if not known:
        return Finding("energy counter", "ok", f"moves at {counted_w:.0f} W; power not readable")
    power_w = sum(known) / len(known)
    text = f"counter {counted_w:.0f} W, power reading {power_w:.0f} W ({device.scope} scope)"
    # A window of six ticks holds one tick more or less than its time.
    if not abs(counted_w - power_w) <= _AGREEMENT * power_w or counted_w > PLAUSIBLE_W:
        return Finding(
            "energy counter",
            "warning",
            f"{text}: they disagree, so they may cover different parts or one of them is wrong",
            "compare with nvidia-smi under a steady load before trusting energy numbers",
        )
    return Finding("energy counter", "ok", text)


def _owner(uuid: str) -> Finding:
    for path, lease, live in leases():
        if lease.uuid != uuid:
            continue
        if live:
            cause = f"the clocks of GPU {uuid} belong to process {lease.trainer_pid} ({path})"
            return _failed("lease", OwnedError(cause, "end that process, or use another GPU"))
        return Finding(
            "lease",
            "warning",
            f"an earlier session was killed and may have left the clock locked ({path})",
            "the next session resets it, and so does kareus-pp unlock",
        )
    return Finding("lease", "ok", "no kareus-pp session holds this GPU")


def _capped(device: NvmlDevice) -> Finding:
    """A lock cannot be read back, but a busy GPU below its highest clock for no reason tells."""
    busy = device.utilization_percent()
    actual, reasons = device.clock_mhz(), device.reason_bits()
    highest = device.supported_clocks_mhz()[-1]
    if busy is None or busy < _BUSY_PERCENT:
        return Finding(
            "foreign lock", "ok", "not visible: the GPU is idle, and NVML cannot read a lock back"
        )
    if verdict(highest, actual, reasons) == NOT_HELD:
        return Finding(
            "foreign lock",
            "warning",
            f"inferred: the GPU is {busy} % busy at {actual} MHz, below its {highest} MHz, and "
            f"gives no reason, so somebody else may have locked its clock; control would undo that",
            "ask the site whether clocks are capped; nvidia-smi -rgc resets a forgotten lock",
        )
    why = ", ".join(throttle_names(reasons))
    return Finding("foreign lock", "ok", f"{actual} MHz under load" + (f" ({why})" if why else ""))


def _others(device: NvmlDevice) -> Finding:
    others = [pid for pid in device.compute_pids() if pid != os.getpid()]
    if others:
        return Finding(
            "processes",
            "warning",
            f"other processes compute on this GPU ({', '.join(map(str, others))}): their energy is "
            f"counted with this job's, and they run at its clocks",
            "give the job GPUs of its own",
        )
    return Finding("processes", "ok", "no other process computes on this GPU")
