"""What can go wrong with a GPU: each error names the cause and the remedy.

Light on purpose (the guard process imports it). An error crosses from the guard to the trainer as
text: `encode` and `decode`.
"""

from __future__ import annotations

from kareus_pp.errors import DeviceError


class NoDriverError(DeviceError):
    """NVML or the NVIDIA driver is not there."""


class NoPermissionError(DeviceError):
    """This user may not set clocks."""


class NotSupportedError(DeviceError):
    """The GPU or its driver does not offer a function."""


class GpuLostError(DeviceError):
    """The GPU fell off the bus or needs a reset."""


class GpuNotFoundError(DeviceError):
    """No GPU answers to this name, or the name cannot be resolved without doubt."""


class MigError(DeviceError):
    """The GPU is split by MIG: its slices share one clock and one energy counter."""


class OwnedError(DeviceError):
    """Another process owns the clocks of this GPU."""


class ClockError(DeviceError):
    """A clock is not supported, is not held, or takes too long to set."""


class CounterError(DeviceError):
    """The energy counter is absent or tells nonsense."""


class NvmlError(DeviceError):
    """NVML failed in a way that has no class of its own."""


class GuardError(DeviceError):
    """The guard process could not start, or died."""


class DaemonError(DeviceError):
    """Zeus' daemon cannot be reached or refused."""


class SiteCommandError(DeviceError):
    """The site's command for setting clocks failed."""


_CLASSES = {
    cls.__name__: cls
    for cls in (
        NoDriverError,
        NoPermissionError,
        NotSupportedError,
        GpuLostError,
        GpuNotFoundError,
        MigError,
        OwnedError,
        ClockError,
        CounterError,
        NvmlError,
        GuardError,
        DaemonError,
        SiteCommandError,
    )
}
_SEPARATOR = "\x1f"


def encode(error: DeviceError) -> str:
    """The error as one line of text that `decode` reads."""
    parts = (type(error).__name__, error.cause, error.remedy)
    return _SEPARATOR.join(" ".join(part.split()) for part in parts)


def decode(text: str) -> DeviceError:
    """The error that `encode` wrote; plain text becomes a `GuardError`."""
    name, separator, rest = text.partition(_SEPARATOR)
    if not separator:
        return GuardError(text)
    cause, _, remedy = rest.partition(_SEPARATOR)
    return _CLASSES.get(name, GuardError)(cause, remedy)
