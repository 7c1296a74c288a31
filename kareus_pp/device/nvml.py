"""GPUs through NVML (nvidia-ml-py): identity, clocks, counter; locked graphics clocks only.

Light on purpose: the guard process imports it. Nothing here touches memory clocks, application
clocks, power limits or persistence mode, and nothing depends on the name of a GPU: clocks and
limits are read from the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pynvml

from kareus_pp.device.base import DeviceIdentity, Sample
from kareus_pp.device.errors import (
    ClockError,
    GpuLostError,
    GpuNotFoundError,
    MigError,
    NoDriverError,
    NoPermissionError,
    NotSupportedError,
    NvmlError,
)
from kareus_pp.errors import DeviceError

if TYPE_CHECKING:
    from kareus_pp.profile import Source

PERMISSION_REMEDY = (
    "give the process CAP_SYS_ADMIN, or set device to 'zeusd' or 'command', or to 'dry-run'"
)
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clock setting",
}
"""Bits of nvmlClocksEventReasons that hold a clock down; idle and clock settings are none."""

_MISSING = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
}
_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
_NO_DRIVER = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}


@dataclass(frozen=True)
class GpuEntry:
    """One GPU as NVML lists it; `mig_uuids` names its MIG slices, `mig` says MIG is enabled."""

    index: int
    uuid: str
    name: str
    pci_bus_id: str
    mig: bool = False
    mig_uuids: tuple[str, ...] = ()


def explain(error: Any, doing: str, gpu: str) -> DeviceError:
    """The `DeviceError` for an NVML error that happened while `doing` something to `gpu`."""
    code = error.value
    cause = f"{doing} failed on {gpu}: {error}"
    if code == pynvml.NVML_ERROR_NO_PERMISSION:
        return NoPermissionError(cause, PERMISSION_REMEDY)
    if code in _MISSING:
        return NotSupportedError(cause, "set device to 'dry-run' for this GPU")
    if code in _LOST:
        return GpuLostError(cause, "see the kernel log for Xid errors; the GPU needs a reset")
    if code in _NO_DRIVER:
        return NoDriverError(
            f"NVML cannot be used: {error}",
            "install or load a matching NVIDIA driver, or set device to 'dry-run' or 'emulated'",
        )
    return NvmlError(cause, "run kareus-pp doctor")


def initialise() -> None:
    """Initialise NVML; every call needs one `pynvml.nvmlShutdown()`.

    Raises:
        NoDriverError: There is no usable driver.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise explain(error, "initialising NVML", "this machine") from None


def inventory() -> tuple[GpuEntry, ...]:
    """All GPUs that NVML lists, in NVML's order, with their MIG slices.

    Raises:
        DeviceError: There is no usable driver, or a GPU does not answer.
    """
    initialise()
    try:
        return tuple(_entry(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise explain(error, "listing the GPUs", "this machine") from None
    finally:
        pynvml.nvmlShutdown()


def _entry(index: int) -> GpuEntry:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    mig = bool(_optional(pynvml.nvmlDeviceGetMigMode, handle, default=(0, 0))[0])
    slices = []
    if mig:
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                mig_handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except pynvml.NVMLError:
                continue  # a place for a slice that was not created
            slices.append(_text(pynvml.nvmlDeviceGetUUID(mig_handle)))
    return GpuEntry(
        index,
        _text(pynvml.nvmlDeviceGetUUID(handle)),
        _text(pynvml.nvmlDeviceGetName(handle)),
        _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        mig,
        tuple(slices),
    )


class NvmlDevice:
    """One GPU, found by its UUID; implements `kareus_pp.device.base.Device`.

    Args:
        uuid: As NVML reports it.

    Raises:
        DeviceError: No driver, no such GPU, or MIG is enabled.
    """

    def __init__(self, uuid: str) -> None:
        initialise()
        self._open = True
        try:
            self._handle = self._find(uuid)
            self._identity = DeviceIdentity(
                uuid=uuid,
                name=_text(self._call("reading the name", pynvml.nvmlDeviceGetName)),
                pci_bus_id=_text(self._call("reading PCI", pynvml.nvmlDeviceGetPciInfo).busId),
            )
            if self._optional(pynvml.nvmlDeviceGetMigMode, (0, 0))[0]:
                raise MigError(
                    f"{self.label} is split by MIG, and its slices share one clock and one counter",
                    "disable MIG (nvidia-smi -mig 0), or set device to 'dry-run'",
                )
            self._clocks = self._read_clocks()
            self._has_counter = self._energy_j() is not None
            self._has_instant_power = self._instant_power_w() is not None
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> DeviceIdentity:
        """Which GPU this is."""
        return self._identity

    @property
    def label(self) -> str:
        """The GPU in words, for messages."""
        return f"{self._identity.name} ({self._identity.uuid})"

    @property
    def source(self) -> Source:
        """The counter where there is one, else instantaneous power, else average power."""
        from kareus_pp.profile import Source

        if self._has_counter:
            return Source.COUNTER
        return Source.INSTANT_POWER if self._has_instant_power else Source.AVERAGE_POWER

    @property
    def scope(self) -> str:
        """`module` where GPU and CPU share one package over C2C (Grace Hopper), else `gpu`."""
        info = self._optional(pynvml.nvmlDeviceGetC2cModeInfoV, None)
        return "module" if info is not None and info.isC2cEnabled else "gpu"

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Supported SM clocks at the highest memory clock, ascending."""
        return self._clocks

    def power_limit_w(self) -> float | None:
        """The enforced power limit in watts; None where it cannot be read."""
        limit_mw = self._optional(pynvml.nvmlDeviceGetEnforcedPowerLimit, None)
        return None if limit_mw is None else limit_mw / 1e3

    def lock_clock(self, mhz: int) -> None:
        """Lock the SM clock at `mhz`.

        Raises:
            ClockError: The clock is not supported.
            DeviceError: NVML refused.
        """
        self._check_clock(mhz)
        self._call("locking the clock", pynvml.nvmlDeviceSetGpuLockedClocks, mhz, mhz)

    def unlock_clock(self) -> None:
        """Return to default clocks; raises `DeviceError`."""
        self._call("resetting the clock", pynvml.nvmlDeviceResetGpuLockedClocks)

    def sample(self) -> Sample:
        """Read everything that can be read, now; what is not supported is None."""
        return self.sample_and_reasons()[0]

    def sample_and_reasons(self) -> tuple[Sample, int]:
        """A sample, and NVML's clock event reasons as bits."""
        at_s = time.monotonic()
        energy_j = self._energy_j()
        power_w = self._instant_power_w() if self._has_instant_power else self._average_power_w()
        celsius = self._optional_arg(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        reasons = self.reason_bits()
        sample = Sample(
            at_s=at_s,
            energy_j=energy_j,
            power_w=power_w,
            clock_mhz=self.clock_mhz(),
            temperature_c=None if celsius is None else float(celsius),
            throttled=throttle_names(reasons),
        )
        return sample, reasons

    def clock_mhz(self) -> int | None:
        """The actual SM clock; None where it cannot be read."""
        clock: int | None = self._optional_arg(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
        return clock

    def reason_bits(self) -> int:
        """NVML's clock event reasons as bits; 0 where not supported."""
        bits: int = self._optional(pynvml.nvmlDeviceGetCurrentClocksEventReasons, 0)
        return bits

    def persistence_mode(self) -> bool | None:
        """True where persistence mode is on; None where it cannot be read."""
        mode = self._optional(pynvml.nvmlDeviceGetPersistenceMode, None)
        return None if mode is None else bool(mode)

    def utilization_percent(self) -> int | None:
        """Share of the last sample period in which a kernel ran; None where not supported."""
        found = self._optional(pynvml.nvmlDeviceGetUtilizationRates, None)
        return None if found is None else int(found.gpu)

    def compute_pids(self) -> tuple[int, ...]:
        """Processes with a compute context on this GPU, as far as they are visible."""
        found = self._optional(pynvml.nvmlDeviceGetComputeRunningProcesses, [])
        return tuple(process.pid for process in found)

    def close(self) -> None:
        """Let go of NVML; safe to call twice. The clock stays as it is."""
        if self._open:
            self._open = False
            pynvml.nvmlShutdown()

    def _find(self, uuid: str) -> Any:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError_NotFound:
            raise GpuNotFoundError(
                f"no GPU has the UUID {uuid!r}", "nvidia-smi -L lists the UUIDs"
            ) from None
        except pynvml.NVMLError as error:
            raise explain(error, "finding the GPU", uuid) from None

    def _read_clocks(self) -> tuple[int, ...]:
        memory = self._call("listing memory clocks", pynvml.nvmlDeviceGetSupportedMemoryClocks)
        clocks = self._call(
            "listing SM clocks", pynvml.nvmlDeviceGetSupportedGraphicsClocks, max(memory)
        )
        return tuple(sorted(set(clocks)))

    def _check_clock(self, mhz: int) -> None:
        if mhz not in self._clocks:
            near = min(self._clocks, key=lambda clock: abs(clock - mhz))
            raise ClockError(
                f"{mhz} MHz is not a supported SM clock of {self.label}",
                f"the nearest is {near} MHz; nvidia-smi -q -d SUPPORTED_CLOCKS lists them",
            )

    def _energy_j(self) -> float | None:
        energy_mj = self._optional(pynvml.nvmlDeviceGetTotalEnergyConsumption, None)
        return None if energy_mj is None else energy_mj / 1e3

    def _instant_power_w(self) -> float | None:
        fields = self._optional_arg(
            pynvml.nvmlDeviceGetFieldValues,
            [(pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_POWER_SCOPE_GPU)],
        )
        if not fields or fields[0].nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        return float(fields[0].value.uiVal) / 1e3

    def _average_power_w(self) -> float | None:
        power_mw = self._optional(pynvml.nvmlDeviceGetPowerUsage, None)
        return None if power_mw is None else power_mw / 1e3

    def _call(self, doing: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(self._handle, *arguments)
        except pynvml.NVMLError as error:
            label = self.label if hasattr(self, "_identity") else "the GPU"
            raise explain(error, doing, label) from None

    def _optional(self, function: Callable[..., Any], default: Any) -> Any:
        try:
            return _optional(function, self._handle, default=default)
        except pynvml.NVMLError as error:
            label = self.label if hasattr(self, "_identity") else "the GPU"
            raise explain(error, "reading", label) from None

    def _optional_arg(self, function: Callable[..., Any], argument: Any) -> Any:
        return self._optional(lambda handle: function(handle, argument), None)


def throttle_names(bits: int) -> tuple[str, ...]:
    """The reasons behind NVML's bits that hold a clock down, in words."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def _optional(function: Callable[..., Any], handle: Any, default: Any) -> Any:
    try:
        return function(handle)
    except pynvml.NVMLError as error:
        if error.value in _MISSING:
            return default
        raise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
