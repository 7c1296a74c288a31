"""The core without a framework: functions that run on the ranks."""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from kareus_pp.errors import OverlapError
from kareus_pp.overlap import generic
from kareus_pp.overlap.agreement import Agreement
from kareus_pp.overlap.communicators import CommunicatorPool
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.setting import SEQUENTIAL, OverlapSetting
from tests.overlap.negative import InjectedError, injected

WIDTH = 16
SPLIT = OverlapSetting.parse("mlp@1:4")


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Layer(nn.Module):
    """Linear, sum over the group, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + _Reduce.apply(self.down(torch.relu(self.up(value)))) / 2  # type: ignore[no-any-return,no-untyped-call]


def block(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(*(Layer() for _ in range(layers))).double()


def sample(batch: int = 4) -> torch.Tensor:
    return torch.linspace(0, 1, batch * WIDTH, dtype=torch.float64).reshape(batch, WIDTH)


def step(module: nn.Module, value: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    leaf = value.clone().requires_grad_()
    output = module(leaf)
    output.square().sum().backward()
    grads = [p.grad for p in module.parameters()]
    assert all(grad is not None for grad in grads)
    return [output.detach(), leaf.grad, *grads]  # type: ignore[list-item]


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)
    )


def set_both(executor: OverlapExecutor, setting: OverlapSetting) -> None:
    executor.set_next("forward", setting)
    executor.set_next("backward", setting)


def partitions() -> list[tuple[Any, ...]]:
    """What is found in a block; its gradients stay as they were."""
    module = block()
    marker = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
    module[0].up.weight.grad = marker
    found = generic.find_partitions(module, dist.group.WORLD, sample().requires_grad_())
    assert module[0].up.weight.grad is marker
    assert module[1].up.weight.grad is None
    return [
        (p.phase, p.kind, p.collective, p.bytes, p.count, [s.name for s in p.slots]) for p in found
    ]


def refused() -> list[str]:
    """Errors of user mistakes, in words."""
    messages = []
    module = block()

    def attempt(action: Any) -> None:
        try:
            action()
        except OverlapError as found:
            messages.append(str(found))

    attempt(lambda: generic.find_partitions(module, dist.group.WORLD, sample(1)))
    attempt(lambda: generic.find_partitions(module.eval(), dist.group.WORLD, sample()))
    module.train()
    executor = generic.attach(module, dist.group.WORLD)
    step(module, sample())
    attempt(lambda: executor.check("forward", OverlapSetting.parse("attention@0:0")))
    attempt(lambda: executor.check("forward", OverlapSetting.parse("mlp@9:0")))
    executor.check("forward", SPLIT)
    attempt(lambda: executor.set_next("forward", OverlapSetting.parse("mlp@9:0")))
    attempt(lambda: executor.set_next("sideways", SPLIT))
    attempt(lambda: executor.set_next("forward", "mlp@1:0"))  # type: ignore[arg-type]
    executor.close()
    attempt(lambda: executor.set_next("forward", SPLIT))
    return messages


def inconsistent_backward() -> tuple[float, list[str], list[Any]]:
    """A split forward whose backward is told to be sequential, and the other way round."""
    module, value = block(), sample()
    wanted = step(module, value)
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)
    executor.set_next("forward", SPLIT)
    worst = error(step(module, value), wanted)
    executor.set_next("forward", SEQUENTIAL)
    executor.set_next("backward", SPLIT)
    worst = max(worst, error(step(module, value), wanted))
    reasons, executed = list(executor.reasons), sorted(executor.executed)
    executor.close()
    return worst, reasons, executed


def agreement(wish: str) -> list[Any]:
    """Steps on which ranks agree, differ, or one is late; then what was executed."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    module, value = block(), sample()
    wanted = step(module, value)
    agreed = Agreement(store, wish, rank, dist.get_world_size(), 60.0)
    executor = generic.attach(module, dist.group.WORLD, agreement=agreed)
    step(module, value)
    answers = []
    for number in range(4):
        setting = SPLIT
        if number == 1 and wish == "differ" and rank == 1:
            setting = OverlapSetting.parse("mlp@2:4")
        if number == 1 and wish == "late" and rank == 1:
            store.wait([f"{agreed._prefix}/{number}/decision"])
        # Only the rank that is to lose its patience has little of it.
        late = number == 1 and wish == "late" and rank == 0
        agreed._timeout = timedelta(seconds=0.2 if late else 60.0)
        answers.append(executor.begin_step(number, [setting]))
        set_both(executor, setting)
        assert error(step(module, value), wanted) <= 1e-12
    executed = dict(executor.executed)
    executor.close()
    return [answers, executed["forward", "split"], executed.get(("forward", "sequential"), 0)]


def skipped_step() -> tuple[list[int], list[Any], float]:
    """Hooks while observing, then with, without and with overlap; what was executed."""
    module, value = block(), sample()
    wanted = step(module, value)
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)

    def count() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())

    hooks, worst = [count()], 0.0
    for number, overlaps in enumerate((True, False, True)):
        if overlaps:
            assert executor.begin_step(number, [SPLIT])
            set_both(executor, SPLIT)
        else:
            executor.skip_step(number)
        worst = max(worst, error(step(module, value), wanted))
        hooks.append(count())
    executed = sorted(executor.executed.items())
    executor.close()
    return hooks, executed, worst


def hooks_of_step(setting: str) -> list[int]:
    """Hooks on a block before, in and after a step that launches as a setting says."""
    module, value = block(), sample()
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)
    split = OverlapSetting.parse(setting)
    assert executor.begin_step(0, [split])
    set_both(executor, split)
    counts = []

    def count(*_: Any) -> None:
        counts.append(
            sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()) - 1
        )

    handle = module[0].register_forward_pre_hook(count)
    count()
    step(module, value)
    count()
    handle.remove()
    executor.close()
    return counts


def communicators() -> tuple[list[int], float, bool]:
    """Which level serves a number of SMs, and that other communicators give the same result."""
    own = dist.group.WORLD
    module, value = block(), sample()
    wanted = step(module, value)
    executor = generic.attach(module, own, levels=(8, 2, 4))
    pool = executor.pool
    level_of = {id(pool.select(own, level)): level for level in pool.levels}
    level_of[id(own)] = 0
    chosen = [level_of[id(pool.select(own, sms))] for sms in (0, 1, 2, 3, 4, 7, 8, 100)]
    step(module, value)
    set_both(executor, SPLIT)
    worst = error(step(module, value), wanted)
    limits = pool.limits_sms
    executor.close()
    try:
        CommunicatorPool.create([[0, 1]], (0,), own)
    except OverlapError:
        return chosen, worst, limits
    raise AssertionError("a level of 0 SMs was accepted")


class Passing(nn.Module):
    """A block that passes a mask on, as a pipeline stage does, or returns a loss beside."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = block(), what

    def forward(self, value: torch.Tensor) -> Any:
        output = self.inner(value)
        if self.what == "mask":
            return output, torch.ones(1, 1, 3, dtype=torch.bool)
        if self.what == "loss":
            return output, output.square().mean()
        if self.what == "number":
            return output, output.detach().sum().item()
        if self.what == "list in an object":
            return Hidden([output])
        return Hidden(output) if self.what == "dataclass" else Named(value=output)


@dataclass
class Hidden:
    """No pytree."""

    value: Any


class Named(dict[str, torch.Tensor]):
    """No pytree either, as it is no plain dictionary."""


def unjoinable(what: str) -> tuple[list[float], list[str], str]:
    """A training whose outputs cannot be put together; errors, reasons, what the search says."""
    module, value = Passing(what), sample()

    def train() -> list[torch.Tensor]:
        module.zero_grad()
        leaf = value.clone().requires_grad_()
        output, other = module(leaf)
        (output.square().sum() + torch.as_tensor(other).sum()).backward()
        return [output.detach(), leaf.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]

    try:
        found = str(generic.find_partitions(module, dist.group.WORLD, value))
    except OverlapError as error_:
        found = str(error_)
    if what in ("dataclass", "dictionary", "list in an object"):
        return [], [], found
    wanted = train()
    executor = generic.attach(module, dist.group.WORLD)
    errors = [error(train(), wanted)]
    executor.set_next("forward", OverlapSetting.parse("mlp@0:0"))
    executor.set_next("backward", OverlapSetting.parse("mlp@0:0"))
    errors += [error(train(), wanted) for _ in range(2)]
    reasons = list(executor.reasons)
    executor.close()
    return errors, reasons, found


def recomputed() -> tuple[float, list[str], int]:
    """A block that is recomputed from outside, with dropout: error, reasons, splits."""
    module = nn.Sequential(*block(), nn.Dropout(0.5)).double()
    value = sample()

    def train() -> list[torch.Tensor]:
        module.zero_grad()
        torch.manual_seed(3)
        leaf = value.clone().requires_grad_()
        output = checkpoint(module, leaf, use_reentrant=True)
        output.square().sum().backward()
        return [output.detach(), leaf.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]

    wanted = train()
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)
    set_both(executor, SPLIT)
    result = error(train(), wanted), list(executor.reasons), executor.executed["forward", "split"]
    executor.close()
    return result


def handle_of_a_collective() -> tuple[float, int]:
    """A block that polls its handle, then waits with a timeout by its name."""

    class Poll(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            value = value.clone()
            work = dist.all_reduce(value, async_op=True)
            while not work.is_completed():
                pass
            work.wait(timeout=timedelta(seconds=30))
            return value

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad

    class Polling(Layer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.down(Poll.apply(self.up(value)))  # type: ignore[no-any-return,no-untyped-call]

    torch.manual_seed(dist.get_rank())
    module, value = Polling().double(), sample()
    wanted = step(module, value)
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)
    (partition,) = (p for p in executor.partitions if p.phase == "forward")
    executor.set_next("forward", OverlapSetting.parse(f"{partition.kind}@0:0"))
    worst = error(step(module, value), wanted)
    split = executor.executed["forward", "split"]
    executor.close()
    return worst, split


def soak(steps: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Random settings and injected exceptions: nothing may pile up."""
    module, value = block().to(device), sample().to(device)
    wanted = step(module, value)
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)
    choose = random.Random(9)
    worst, failures, baseline = 0.0, 0, (0, 0)
    tracemalloc.start()
    for number in range(steps):
        if number == steps // 4:
            baseline = _counts()
        if choose.random() < 0.2:
            setting = SEQUENTIAL
        else:
            setting = OverlapSetting.parse(f"mlp@{choose.randrange(3)}:0")
        set_both(executor, setting)
        if choose.random() < 0.1:
            phase, nanobatch = choose.choice(["forward", "backward"]), choose.randrange(2)
            with injected(module[1].down, phase, nanobatch):
                try:
                    step(module, value)
                except InjectedError:
                    failures += 1
        else:
            worst = max(worst, error(step(module, value), wanted))
    objects, memory = _counts()
    threads = threading.active_count()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
    executor.close()
    tracemalloc.stop()
    return {
        "steps": steps,
        "injected_failures": failures,
        "max_rel_error": worst,
        "tensors_grown": objects - baseline[0],
        "memory_grown_bytes": memory - baseline[1],
        "nanobatch_threads": threads - threading.active_count(),
        "hooks": hooks,
        "hooks_after": sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()
        ),
    }


def _counts() -> tuple[int, int]:
    gc.collect()
    tensors = sum(1 for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
    return tensors, tracemalloc.get_traced_memory()[0]


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def state_inside() -> dict[str, Any]:
    """Thread-local state of torch while nanobatch 0 runs."""
    module, value = block(), sample()
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)
    set_both(executor, SPLIT)
    seen: list[dict[str, Any]] = []

    def look(*_: Any) -> None:
        seen.append(
            {
                "thread": threading.current_thread().name,
                "engine_threads": torch._C._is_multithreading_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "function_modes": len(_get_current_function_mode_stack()),
                "grad": torch.is_grad_enabled(),
            }
        )

    handle = module[0].register_forward_pre_hook(look)
    with _Mode(), torch.autocast("cpu", torch.bfloat16):
        module(value.clone().requires_grad_())
    handle.remove()
    executor.close()
    return seen[0]
