"""An accelerator of its own on the CPU, whose backwards run on the autograd engine's device thread.

torch gives every accelerator a thread of the autograd engine; the CPU has none. A PrivateUse1
backend, written with torch's own Python facilities, has one: its tensors wrap CPU tensors, and
every operation runs on those.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import backend_registration
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from kareus_pp.overlap import generic
from kareus_pp.setting import Launch, OverlapSetting
from tests.overlap.cases import expected_launches

WIDTH, LAYERS = 16, 3
STARTS_S, HANGS_S = 60.0, 4.0


@functools.cache
def _library() -> torch.library.Library:
    """The backend, registered once in this process; kept, because it goes with its library."""
    backend = backend_registration._DummyBackendModule()
    backend.get_amp_supported_dtype = list  # type: ignore[attr-defined]
    backend_registration._setup_privateuseone_for_python_backend("paper", backend)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_on_cpu, "PrivateUse1")
    return library


_values: dict[int, tuple[Any, torch.Tensor]] = {}


def on_device(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the backend over a CPU tensor."""
    wrapped: torch.Tensor = torch._C._acc.create_empty_tensor(value.shape, value.dtype)
    # By storage: autograd saves copies of a tensor that have nothing else in common with it.
    storage = wrapped.untyped_storage()
    _values[storage._cdata] = storage, value
    return wrapped


def cpu_value(value: Any) -> Any:
    """The CPU tensor under one of the backend's; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != "paper":
        return value
    return _values[value.untyped_storage()._cdata][1]


def _on_cpu(operation: Any, *args: Any, **kwargs: Any) -> Any:
    if operation is torch.ops.aten._copy_from.default:
        cpu_value(args[1]).copy_(cpu_value(args[0]))
        return args[1]
    known = {id(cpu_value(a)): a for a in args if isinstance(a, torch.Tensor)}
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    found = operation(*tree_map(cpu_value, args), **tree_map(cpu_value, kwargs))

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else on_device(value)

    return tree_map(wrap, found)


class _Reduce(torch.autograd.Function):
    """Sums over the group, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _sum(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _threads[threading.current_thread().name] += 1
        return _sum(grad)


_threads: Counter[str] = Counter()


def _sum(value: torch.Tensor) -> torch.Tensor:
    total = cpu_value(value).clone()
    dist.all_reduce(total)
    return on_device(total)


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH
        self.weight = nn.Parameter(on_device(weight))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.weight


class _Layer(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up, self.down = _Linear(), _Linear()
        self._recompute = recompute

    def _compute(self, value: torch.Tensor) -> torch.Tensor:
        inner = _Reduce.apply(self.down(torch.relu(self.up(value))))  # type: ignore[no-untyped-call]
        return value + inner / 2  # type: ignore[no-any-return]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not self._recompute:
            return self._compute(value)
        result: torch.Tensor = checkpoint(
            self._compute, value, use_reentrant=True, preserve_rng_state=False
        )
        return result


def without_protection(recompute: bool) -> tuple[bool, bool]:
    """Whether the backward hangs, in an engine run, where nanobatches keep the engine's threads.

    The outer backward runs on the device thread and waits for the nanobatches, whose own backwards
    wait for that thread. The process is of no use afterwards.
    """
    switch = torch.autograd.set_multithreading_enabled
    torch.autograd.set_multithreading_enabled = lambda mode: switch(True)  # type: ignore[assignment,misc]
    thread = threading.Thread(target=overlapped, args=(recompute,), daemon=True)
    thread.start()
    limit = time.monotonic() + STARTS_S
    while not _in_engine("kareus-nanobatch-0") and time.monotonic() < limit:
        time.sleep(0.1)
    thread.join(HANGS_S)
    return thread.is_alive(), _in_engine("kareus-nanobatch-0")


def _in_engine(name: str) -> bool:
    """Whether a thread waits for a run of the autograd engine."""
    frames = sys._current_frames()
    return any(
        entry.name == "_engine_run_backward"
        for thread in threading.enumerate()
        if thread.name == name
        for entry in traceback.extract_stack(frames.get(thread.ident or 0))
    )


def overlapped(recompute: bool) -> dict[str, Any]:
    """Loss and gradients against the unmodified block, and where collectives were launched.

    Args:
        recompute: Recompute every layer, with an engine run inside the engine's run.
    """
    _library()
    _threads.clear()
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(*(_Layer(recompute) for _ in range(LAYERS)))
    torch.manual_seed(9)
    value = torch.randn(4, WIDTH, dtype=torch.float64)

    def step() -> list[torch.Tensor]:
        module.zero_grad()
        leaf = on_device(value.clone()).requires_grad_()
        output = module(leaf)
        output.square().sum().backward()
        return [cpu_value(t.detach()).clone() for t in (output, leaf.grad, *_gradients(module))]

    wanted = step()
    executor = generic.attach(module, dist.group.WORLD)
    engine_threads = set(_threads)
    _threads.clear()
    try:
        step()
        setting = {
            phase: OverlapSetting(
                tuple(Launch(p.kind, len(p.slots) - 1) for p in program.partitions)
            )
            for phase, program in executor.blocks[0].programs.items()
        }
        expected: Counter[tuple[str, str, int]] = Counter()
        for phase, chosen in setting.items():
            executor.set_next(phase, chosen)
            expected += expected_launches(executor.blocks[0].programs[phase], chosen)
        found = step()
        launches = {k: n for k, n in executor.launches.items() if k[1] != "tail"}
        return {
            "max_rel_error": max(
                float((a - b).abs().max() / b.abs().max())
                for a, b in zip(found, wanted, strict=True)
            ),
            "launches_as_planned": launches == dict(expected),
            "backward_launches": sum(n for k, n in launches.items() if k[0] == "backward"),
            "engine_threads": engine_threads,
            "threads": set(_threads),
        }
    finally:
        executor.close()


def _gradients(module: nn.Module) -> list[torch.Tensor]:
    grads = [parameter.grad for parameter in module.parameters()]
    assert all(grad is not None for grad in grads)
    return grads  # type: ignore[return-value]
