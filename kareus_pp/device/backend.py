"""Which backend sets the clocks: text keys and values, so that a lease can carry them.

Light on purpose: the guard process imports it, and only the backend that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kareus_pp.device.errors import GuardError

if TYPE_CHECKING:
    from kareus_pp.device.nvml import NvmlDevice

NVML: Mapping[str, str] = {"device": "nvml"}


def open_backend(backend: Mapping[str, str], uuid: str) -> NvmlDevice:
    """Open the GPU `uuid` through the backend that `backend["device"]` names.

    Args:
        backend: `{"device": "nvml"}`, `{"device": "zeusd", "socket": path}` or
            `{"device": "command", "lock": template, "unlock": template}`.
        uuid: The GPU, as NVML names it.

    Raises:
        DeviceError: The GPU or the backend is not available.
    """
    name = backend.get("device", "nvml")
    if name == "nvml":
        from kareus_pp.device.nvml import NvmlDevice

        return NvmlDevice(uuid)
    if name == "zeusd":
        from kareus_pp.device.zeusd import ZeusdDevice

        return ZeusdDevice(uuid, backend["socket"])
    if name == "command":
        from kareus_pp.device.command import CommandDevice

        return CommandDevice(uuid, backend["lock"], backend["unlock"])
    raise GuardError(f"{name!r} is not a backend", "use nvml, zeusd or command")
