"""From a CUDA device to its GPU: every form of CUDA_VISIBLE_DEVICES, MIG detected.

The index that CUDA gives a device, the one that NVML gives it, and the ones of cgroups and device
files differ. What names a GPU is its UUID. Semantics as in the CUDA programming guide (section on
environment variables) and as implemented by `torch.cuda._parse_visible_devices`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kareus_pp.device.errors import GpuNotFoundError, MigError
from kareus_pp.device.nvml import GpuEntry

VARIABLE = "CUDA_VISIBLE_DEVICES"
_REMEDY = f"set {VARIABLE} to ordinals or GPU UUIDs as nvidia-smi -L lists them"


def parse_visible(text: str | None, count: int) -> tuple[int, ...] | tuple[str, ...]:
    """The ordinals, or the GPU or MIG names, that CUDA reads from the variable.

    As CUDA does: the first invalid entry hides what follows it, a repeated entry hides everything,
    and `2x` reads as 2.

    Args:
        text: The value; None where the variable is not set.
        count: Number of devices there are.
    """
    if text is None:
        return tuple(range(count))
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            return _named(text, prefix)
    ordinals: list[int] = []
    for entry in text.split(","):
        match = re.match(r"[+-]?[0-9]+", entry.strip())
        ordinal = int(match[0]) if match else -1
        if ordinal in ordinals:
            return ()
        if ordinal < 0:
            break
        ordinals.append(ordinal)
    return tuple(ordinals)


def _named(text: str, prefix: str) -> tuple[str, ...]:
    names: list[str] = []
    for entry in text.split(","):
        if entry in names:
            return ()
        if not entry.startswith(prefix):
            break
        names.append(entry)
    return tuple(names)


def visible_gpus(gpus: Sequence[GpuEntry], environment: Mapping[str, str]) -> tuple[GpuEntry, ...]:
    """The GPUs behind CUDA devices 0, 1, ... of a process with this environment.

    Args:
        gpus: All GPUs of the node, as `nvml.inventory` lists them.
        environment: `os.environ` of the process.

    Raises:
        MigError: A MIG slice, or a GPU with MIG enabled, is among them.
        GpuNotFoundError: A name fits no GPU or several, or the order is not certain.
    """
    text = environment.get(VARIABLE)
    entries = parse_visible(text, len(gpus))
    if any(isinstance(entry, str) and entry.startswith("MIG-") for entry in entries):
        raise MigError(
            f"{VARIABLE}={text} names a MIG slice, and slices share one clock and one counter",
            "train on whole GPUs, or set device to 'dry-run'",
        )
    chosen = []
    for entry in entries:
        if isinstance(entry, str):
            chosen.append(_by_name(gpus, entry))
        elif entry < len(gpus):
            chosen.append(_in_cuda_order(gpus, environment)[entry])
        else:
            break  # CUDA hides an ordinal that does not exist and what follows it
    for gpu in chosen:
        if gpu.mig:
            raise MigError(
                f"{gpu.name} ({gpu.uuid}) is split by MIG, and its slices share one clock",
                "disable MIG (nvidia-smi -mig 0), or set device to 'dry-run'",
            )
    return tuple(chosen)


def gpu_of_rank(
    gpus: Sequence[GpuEntry],
    environment: Mapping[str, str],
    local_rank: int,
    cuda_uuid: str | None = None,
) -> GpuEntry:
    """The GPU that a rank trains on.

    Args:
        gpus: All GPUs of the node, as `nvml.inventory` lists them.
        environment: `os.environ` of the process.
        local_rank: The rank on its node: the CUDA device index it uses, unless its launcher shows
            each rank one GPU only.
        cuda_uuid: The UUID as CUDA itself reports it, where CUDA could be asked; it decides.

    Raises:
        MigError: It is, or may be, a MIG slice.
        GpuNotFoundError: There is no such GPU, or which it is is not certain.
    """
    if cuda_uuid is not None:
        if cuda_uuid.startswith("MIG-"):
            raise MigError(f"CUDA uses the MIG slice {cuda_uuid}", "set device to 'dry-run'")
        name = cuda_uuid if cuda_uuid.startswith("GPU-") else f"GPU-{cuda_uuid}"
        return visible_gpus(gpus, {VARIABLE: name})[0]
    visible = visible_gpus(gpus, environment)
    shown = environment.get(VARIABLE)
    if not visible:
        raise GpuNotFoundError(
            f"{VARIABLE}={shown!r} shows no GPU" if gpus else "the driver lists no GPU", _REMEDY
        )
    index = 0 if len(visible) == 1 else local_rank
    if index >= len(visible):
        raise GpuNotFoundError(
            f"local rank {local_rank} has no GPU: {len(visible)} are visible"
            + (f" with {VARIABLE}={shown!r}" if shown is not None else ""),
            "start at most one rank for each GPU",
        )
    return visible[index]


def _by_name(gpus: Sequence[GpuEntry], name: str) -> GpuEntry:
    """CUDA takes a prefix of a UUID where it is unique."""
    found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(name.lower())]
    if len(found) != 1:
        many = "no GPU" if not found else f"{len(found)} GPUs"
        raise GpuNotFoundError(f"{VARIABLE} has {name!r}, which fits {many}", _REMEDY)
    return found[0]


def _in_cuda_order(gpus: Sequence[GpuEntry], environment: Mapping[str, str]) -> Sequence[GpuEntry]:
    """CUDA orders by speed unless told otherwise; among equal GPUs that is the PCI order."""
    ordered = sorted(gpus, key=lambda gpu: gpu.pci_bus_id)
    by_pci = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_pci and len({gpu.name for gpu in gpus}) > 1:
        raise GpuNotFoundError(
            "the GPUs of this node differ and CUDA orders them by speed, so an ordinal does not "
            "say which GPU it is",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    return ordered
