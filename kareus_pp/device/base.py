"""The device protocol, the clock controller protocol and what they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the guard process imports this module and must start fast
    from kareus_pp.profile import Source
    from kareus_pp.schedule import InstructionClass

POWER_CAP = "power cap"
"""In `Sample.throttled`: the power limit holds the clock down."""
DEFAULT_CLOCK = 0
"""In a clock request: default clocks, no lock."""


@dataclass(frozen=True)
class DeviceIdentity:
    """Which GPU this is; the UUID decides, indices differ between NVML, CUDA and cgroups."""

    uuid: str
    name: str
    pci_bus_id: str = ""


@dataclass(frozen=True)
class Sample:
    """One reading of a GPU; a value that could not be read is None.

    Attributes:
        at_s: `time.monotonic()` of the reading.
        energy_j: Energy counter in joules since an arbitrary start. It moves in ticks.
        power_w: Power in watts.
        clock_mhz: Actual SM clock.
        temperature_c: GPU temperature in degrees Celsius.
        throttled: Reasons by which the clock is held below the request; empty for none.
        requested_mhz: Clock requested at the time, `DEFAULT_CLOCK` for none.
    """

    at_s: float
    energy_j: float | None = None
    power_w: float | None = None
    clock_mhz: int | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()
    requested_mhz: int | None = None


class Device(Protocol):
    """One GPU. Every call may take milliseconds: never on the training thread.

    All calls raise `DeviceError` with cause and remedy.
    """

    @property
    def identity(self) -> DeviceIdentity: ...

    @property
    def source(self) -> Source:
        """Where `energy_j` and `power_w` come from."""
        ...

    @property
    def scope(self) -> str:
        """What the readings cover: `gpu` or `module`."""
        ...

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Supported SM clocks, ascending."""
        ...

    def lock_clock(self, mhz: int) -> None:
        """Lock the SM clock at one of the supported clocks."""
        ...

    def unlock_clock(self) -> None:
        """Return to default clocks."""
        ...

    def sample(self) -> Sample:
        """Read everything that can be read, now."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Applied:
    """What a clock controller last did.

    Attributes:
        mhz: The clock now requested of the device, `DEFAULT_CLOCK` for none, None before the first.
        switches: Number of clock changes so far.
        error: The last error as one sentence; empty for none.
    """

    mhz: int | None
    switches: int
    error: str = ""


class ClockController(Protocol):
    """Sets clocks for one GPU from the training thread without ever blocking it.

    The newest request wins; repeated values cost nothing. Whatever happens to the trainer, default
    clocks come back.
    """

    def request(self, mhz: int) -> None:
        """Ask for a clock (`DEFAULT_CLOCK` for default clocks); returns within microseconds."""
        ...

    def applied(self) -> Applied:
        """What was done last; costs no system call."""
        ...

    def start_sampling(self, period_s: float) -> None:
        """Begin to read the device every `period_s` seconds, off the training thread."""
        ...

    def stop_sampling(self) -> None: ...

    def drain(self) -> Sequence[Sample]:
        """The samples since the last call."""
        ...

    def close(self) -> None:
        """Return to default clocks and end; safe to call twice."""
        ...


class Pacer(Protocol):
    """What an emulated GPU offers beyond the protocol: it executes instructions in paced time.

    Attributes:
        instructions: Instructions paced so far.
        overruns: Those of them whose real execution took longer than the paced time.
    """

    instructions: int
    overruns: int

    def begin_instruction(self, cls: InstructionClass, time_factor: float = 1.0) -> None:
        """Called by the session before the real execution of an instruction.

        Args:
            cls: Its class.
            time_factor: Factor on its true time.
        """
        ...

    def end_instruction(self) -> None:
        """Called after the real execution; returns when the paced time is over."""
        ...
