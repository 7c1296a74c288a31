"""Open the device that the configuration asks for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kareus_pp.config import KareusConfig
from kareus_pp.device.backend import NVML, open_backend
from kareus_pp.device.base import ClockController, Device, DeviceIdentity, Pacer
from kareus_pp.device.dryrun import DryRunDevice
from kareus_pp.device.emulated import EmulatedDevice
from kareus_pp.device.errors import NoDriverError
from kareus_pp.device.guard import GuardController
from kareus_pp.device.inprocess import InProcessController
from kareus_pp.device.nvml import inventory
from kareus_pp.device.preflight import PERMISSION, preflight, require, try_clock
from kareus_pp.device.visible import gpu_of_rank
from kareus_pp.device.zeusd import DEFAULT_SOCKET, SOCKET_VARIABLE
from kareus_pp.errors import DeviceError
from kareus_pp.profile import DeviceFacts
from kareus_pp.schedule import InstructionClass
from kareus_pp.simulate.gpu_model import Work

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """An open device.

    Attributes:
        controller: Sets its clocks and reads it; `close` it at the end.
        pacer: Only of an emulated device: to be called around every instruction.
        facts: What profiles record of it.
        identity: Which GPU it is.
    """

    controller: ClockController
    pacer: Pacer | None
    facts: DeviceFacts
    identity: DeviceIdentity


def open_controller(
    config: KareusConfig,
    *,
    stage: int,
    local_rank: int,
    work: Mapping[InstructionClass, Work] | None = None,
) -> Opened:
    """Open the device of this rank.

    Args:
        config: The configuration; `device` decides.
        stage: The pipeline stage of this rank.
        local_rank: The rank on its node.
        work: Work of the instruction classes of the stage; needed by the emulated device.

    Raises:
        ConfigError: The GPU model is unknown or malformed.
        DeviceError: The device cannot be opened.
    """
    name = config.device
    if name == "auto":
        name = "nvml" if _has_nvidia_gpu() else "dry-run"
        if name == "dry-run" and local_rank == 0:
            _LOG.warning(
                "no NVIDIA GPU found: dry-run, no clock is set and nothing is measured; "
                "set device to 'emulated' for an emulated GPU"
            )
    if name == "emulated":
        return _open_emulated(config, stage, work)
    if name == "dry-run":
        return _opened(DryRunDevice(), config, None, None)
    return _open_gpu(config, name, local_rank)


def backend_of(config: KareusConfig, name: str) -> dict[str, str]:
    """How clocks are set: what `backend.open_backend` reads.

    Args:
        config: The configuration.
        name: `nvml`, `zeusd` or `command`.
    """
    if name == "zeusd":
        return {"device": name, "socket": os.environ.get(SOCKET_VARIABLE, DEFAULT_SOCKET)}
    if name == "command":
        return {"device": name, "lock": config.command.lock, "unlock": config.command.unlock}
    return dict(NVML)


def _open_gpu(config: KareusConfig, name: str, local_rank: int) -> Opened:
    """A GPU behind its guard process; what preflight warns of is said once."""
    gpu = gpu_of_rank(inventory(), os.environ, local_rank, _cuda_uuid())
    backend = backend_of(config, name)
    warnings = require(preflight(gpu.uuid, backend))
    device = open_backend(backend, gpu.uuid)
    try:
        clocks = device.supported_clocks_mhz()
        source, scope = device.source, device.scope
    finally:
        device.close()
    controller = GuardController(gpu.uuid, backend, config.min_dwell_s)
    try:
        # The driver's own answer, before anything is learnt: permission, support, speed.
        switch_latency_s = try_clock(controller, clocks[-1])
    except DeviceError:
        controller.close()
        raise
    for finding in warnings:
        if finding.check != PERMISSION:
            _LOG.warning("kareus-pp: GPU %s: %s; %s", gpu.uuid, finding.text, finding.remedy)
    facts = DeviceFacts(device.identity.name, clocks, source, scope, switch_latency_s)
    return Opened(controller, None, facts, device.identity)


def _cuda_uuid() -> str | None:
    """What CUDA says this process uses; None before it was initialised, which is left to torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = getattr(properties, "uuid", None)  # torch 2.5 and newer
    return None if uuid is None else str(uuid)


def _open_emulated(
    config: KareusConfig, stage: int, work: Mapping[InstructionClass, Work] | None
) -> Opened:
    if not work:
        raise DeviceError(
            "an emulated device needs the work of its stage and got none",
            "attach kareus-pp to an engine whose modules it can count, or set device to 'dry-run'",
        )
    device = EmulatedDevice.from_config(config.emulated, work, stage)
    return _opened(device, config, device, device.model.switch_latency_s)


def _opened(
    device: Device, config: KareusConfig, pacer: Pacer | None, switch_latency_s: float | None
) -> Opened:
    facts = DeviceFacts(
        name=device.identity.name,
        clocks_mhz=device.supported_clocks_mhz(),
        source=device.source,
        scope=device.scope,
        switch_latency_s=switch_latency_s,
    )
    controller = InProcessController(device, config.min_dwell_s)
    return Opened(controller, pacer, facts, device.identity)


def _has_nvidia_gpu() -> bool:
    """True where a driver lists a GPU; its library alone is found on many machines without one."""
    try:
        return bool(inventory())
    except NoDriverError:
        return False
