"""What a Megatron-LM checkout needs on a machine without CUDA.

Its `initialize_megatron` insists on CUDA, and its loop reports memory and seeds generators: here a
device is claimed that answers such questions and does nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch


class _Inert:
    """A stream, or an event, of a device that does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_, **__: 0


def claim_cuda() -> None:
    """Have `torch.cuda` answer as if there were a device."""
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.Stream = cuda.Event = _Inert
    cuda.current_stream = cuda.default_stream = lambda *_: _Inert()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.device_count = lambda: 8
    cuda.get_device_name = lambda *_: "none"
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        major=8, minor=0, name="none", multi_processor_count=1, total_memory=1 << 30
    )
    for name in ("manual_seed", "manual_seed_all", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.max_memory_reserved = cuda.memory_reserved
    cuda.memory_stats = lambda *_, **__: dict.fromkeys(
        ("allocation.all.current", "num_alloc_retries", "num_ooms"), 0
    )
    cuda.mem_get_info = lambda *_: (1 << 30, 1 << 30)
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda *_: None


def use_installed_helpers(module: ModuleType) -> None:
    """Take the compiled data set helpers of the installed megatron-core: nothing is built."""
    folder = Path(importlib.metadata.distribution("megatron-core").locate_file("megatron"))
    library = next(folder.glob("core/datasets/helpers_cpp*.so"))
    name = "megatron.core.datasets.helpers_cpp"
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    module.compile_helpers = lambda: None  # type: ignore[attr-defined]
