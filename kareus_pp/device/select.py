"""Open the device that the configuration asks for."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from kareus_pp.config import KareusConfig
from kareus_pp.device.base import ClockController, Device, DeviceIdentity, Pacer
from kareus_pp.device.dryrun import DryRunDevice
from kareus_pp.device.emulated import EmulatedDevice
from kareus_pp.device.inprocess import InProcessController
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
        name = "nvml" if _has_nvidia_driver() else "dry-run"
        if name == "dry-run" and local_rank == 0:
            _LOG.warning(
                "no NVIDIA GPU found: dry-run, no clock is set and nothing is measured; "
                "set device to 'emulated' for an emulated GPU"
            )
    if name == "emulated":
        return _open_emulated(config, stage, work)
    if name == "dry-run":
        return _opened(DryRunDevice(), config, None, None)
    raise DeviceError(
        f"the device {name!r} is not available in this build",
        "set device to 'emulated' or 'dry-run'",
    )


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


def _has_nvidia_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True
