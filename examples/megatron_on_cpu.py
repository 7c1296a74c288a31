"""Megatron-Core on a CPU: the few places where it takes a CUDA device for granted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from kareus_pp.integrations._import_hook import on_import
from torch.overrides import TorchFunctionMode

_STREAM = type("Stream", (), {"__getattr__": lambda self, name: lambda *a, **k: None})


def _on_cpu(device: Any) -> Any:
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    return torch.device("cpu") if is_cuda or str(device).startswith("cuda") else device


class CpuMode(TorchFunctionMode):
    """Maps CUDA devices to the CPU in every call of a torch function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if name == "to":
            args = tuple(_on_cpu(arg) if not isinstance(arg, torch.Tensor) else arg for arg in args)
        return func(*args, **kwargs)


class _NullTracker:
    """Stands in for the tracker of CUDA random states."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}

    def reset(self) -> None: ...

    def add(self, name: str, seed: int) -> None: ...

    def set_states(self, states: dict[str, Any]) -> None: ...

    @contextlib.contextmanager
    def fork(self, *_: Any) -> Iterator[None]:
        yield


def _without_cuda_states(random: Any) -> None:
    random._CUDA_RNG_STATE_TRACKER = _NullTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random.initialize_rng_tracker = lambda *_, **__: None


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run Megatron-Core on this CPU; everything it does is otherwise its own."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: _STREAM()
    torch.cuda.set_device = lambda *_: None
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.random.set_rng_state = lambda *_, **__: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    on_import("megatron.core.tensor_parallel.random", _without_cuda_states)
    with CpuMode():
        yield
