"""Where overlap must hold back, and what a mistake leads to: functions that run on the ranks."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kareus_pp.errors import OverlapError
from kareus_pp.overlap import generic, groups
from kareus_pp.setting import SEQUENTIAL, OverlapSetting
from tests.overlap.core_cases import SPLIT, WIDTH, block, error, sample, set_both, step


def message_of(action: Callable[[], Any]) -> str:
    """What an `OverlapError` says; empty where there is none."""
    try:
        action()
    except OverlapError as found:
        return str(found)
    return ""


def bad_arguments() -> dict[str, str]:
    """What is said of arguments that cannot be used."""
    module, value, world = block(), sample(), dist.group.WORLD
    outsider = dist.new_group([0])
    agreement = generic.group_agreement(world)
    executor = generic.attach(block(), world, agreement=agreement)
    attach: Any = generic.attach
    find: Any = generic.find_partitions
    begin: Any = executor.begin_step
    candidates: Any = executor.candidates
    attempts: dict[str, Callable[[], Any]] = {
        "no module": lambda: attach(None),
        "a name": lambda: attach(["x"]),
        "a function": lambda: attach(step),
        "nothing": lambda: attach([]),
        "twice in a list": lambda: attach([module, module]),
        "nested": lambda: attach([module, module[0]]),
        "a group's name": lambda: attach(module, "tp"),
        "no group of this rank": lambda: attach(module, outsider) if dist.get_rank() else attach(0),
        "a level": lambda: attach(module, levels=8),
        "a level's name": lambda: attach(module, levels=("a",)),
        "half an SM": lambda: attach(module, levels=(4.5,)),
        "batch dimension": lambda: attach(module, batch_dimension="a"),
        "negative dimension": lambda: attach(module, batch_dimension=-1),
        "agreement": lambda: attach(module, agreement="yes"),
        "group forgotten": lambda: find(module, value),
        "several": lambda: find(nn.ModuleList([block(), block()]), world, value),
        "a list": lambda: find([block()], world, value),
        "no gradient": lambda: find(block().requires_grad_(False), world, value),
        "no such dimension": lambda: find(module, world, value, batch_dimension=7),
        "text": lambda: begin(0, ["mlp@1:0"]),
        "one text": lambda: begin(0, "mlp@1:0"),
        "no settings": lambda: begin(0, None),
        "step": lambda: begin("a", []),
        "negative step": lambda: begin(-1, []),
        "candidates": lambda: candidates(-1),
    }
    found = {name: message_of(attempt) for name, attempt in attempts.items()}
    again = generic.attach(module, world)
    found["attached already"] = message_of(lambda: attach(module))
    found["attached within"] = message_of(lambda: attach(nn.Sequential(module)))
    found["within attached"] = message_of(lambda: attach(module[1]))
    again.close()
    executor.close()
    found["closed"] = message_of(lambda: begin(0, []))
    return found


def held_to_what_was_given() -> tuple[str, dict[Any, int]]:
    """Without an agreement: a setting besides those of a step, then a step that names none."""
    module, value = block(), sample()
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)
    assert executor.begin_step(0, OverlapSetting.parse("mlp@2:0"))  # type: ignore[arg-type]
    message = message_of(lambda: set_both(executor, SPLIT))
    assert executor.begin_step(1)
    set_both(executor, SPLIT)
    step(module, value)
    launches = dict(executor.launches)
    executor.close()
    return message, launches


def held_to_what_was_agreed() -> tuple[list[str], float, dict[Any, int]]:
    """Settings before and besides an agreement; what was executed."""
    module, value = block(), sample()
    wanted = step(module, value)
    agreement = generic.group_agreement(dist.group.WORLD, 60.0)
    executor = generic.attach(module, agreement=agreement)
    step(module, value)
    other = OverlapSetting.parse("mlp@2:0")
    messages = [message_of(lambda: set_both(executor, SPLIT))]
    worst = error(step(module, value), wanted)
    assert executor.begin_step(0, [SPLIT])
    set_both(executor, SPLIT)
    messages.append(message_of(lambda: set_both(executor, other)))
    worst = max(worst, error(step(module, value), wanted))
    # The next step begins without the setting of this one, which it may not have.
    assert executor.begin_step(1, [other])
    worst = max(worst, error(step(module, value), wanted))
    set_both(executor, SEQUENTIAL)
    worst = max(worst, error(step(module, value), wanted))
    executed = dict(executor.executed)
    executor.close()
    return messages, worst, executed


def different_levels(others: tuple[int, ...], patience_s: float) -> str:
    """Ranks that attach with other levels than the first, or with none."""
    groups._ATTACH_TIMEOUT_S = patience_s

    def attach() -> None:
        generic.attach(block(), levels=(4, 8) if dist.get_rank() == 0 else others).close()

    return message_of(attach)


class Doubled(nn.Module):
    """Its forward is patched on the instance, and keeps something on it from line to line."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = block()
        self.forward = MethodType(Doubled.patched, self)  # type: ignore[method-assign]

    def forward(self, value: torch.Tensor) -> torch.Tensor:  # type: ignore[no-redef]
        raise AssertionError("the patch was lost")

    def patched(self, value: torch.Tensor) -> torch.Tensor:
        self.kept = value
        return 2 * self.layers(value) + self.kept


def patched_forwards() -> list[float]:
    """A patched block, a copy of it, and one within another block."""
    value, errors = sample(), []
    for make in (Doubled, lambda: nn.Sequential(Doubled(), *block())):
        module = make()
        wanted = step(module, value)
        executor = generic.attach(module, dist.group.WORLD)
        copied = copy.deepcopy(module)
        step(module, value)
        set_both(executor, SPLIT)
        errors += [error(step(module, value), wanted), error(step(copied, value), wanted)]
        assert executor.executed["forward", "split"] == 1
        executor.close()
        errors.append(error(step(module, value), wanted))
    return errors


def copies() -> list[float]:
    """Copies made while attached have weights of their own: their errors against a plain block."""
    module, value = block(), sample()
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)
    set_both(executor, SPLIT)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    found = [copy.deepcopy(module), torch.load(file, weights_only=False)]
    wanted = []
    for made in found:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(2)
        plain = block()
        plain.load_state_dict(made.state_dict())
        wanted.append(step(plain, value))
    errors = [error(step(made, value), own) for made, own in zip(found, wanted, strict=True)]
    # A copy is attached like any other block.
    second = generic.attach(found[0], dist.group.WORLD)
    step(found[0], value)
    set_both(second, SPLIT)
    errors.append(error(step(found[0], value), wanted[0]))
    assert second.executed["forward", "split"] == 1
    second.close()
    executor.close()
    return errors


class Functional(nn.Module):
    """Communicates as DTensor does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + all_reduce(self.up(value).detach(), "sum", dist.group.WORLD)


def surroundings(case: str) -> tuple[float, list[str], int]:
    """A block where it cannot be split: error against none attached, reasons, splits."""
    module, value = block(), sample()
    around: Any = module
    if case == "DDP":
        around = DistributedDataParallel(module, find_unused_parameters=True)
    elif case == "checkpoint":
        around = lambda leaf: checkpoint(module, leaf, use_reentrant=False)  # noqa: E731
    elif case == "save_on_cpu":
        around = lambda leaf: _saved(module, leaf)  # noqa: E731
    elif case == "hook on a parameter":
        module[0].up.weight.register_post_accumulate_grad_hook(lambda _: None)
    elif case == "DDP within":
        module = around = nn.Sequential(DistributedDataParallel(module)).double()

    def train() -> list[torch.Tensor]:
        module.zero_grad()
        leaf = value.clone().requires_grad_()
        output = around(leaf)
        output.square().sum().backward()
        return [output.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())]  # type: ignore[list-item, union-attr]

    wanted = train()
    executor = generic.attach(module, dist.group.WORLD)
    worst = error(train(), wanted)
    reasons = list(executor.reasons)
    set_both(executor, SPLIT)
    worst = max(worst, *(error(train(), wanted) for _ in range(3)))
    found = worst, reasons, executor.executed["forward", "split"]
    executor.close()
    return found


def _saved(module: nn.Module, leaf: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return module(leaf)


def unseen_collectives() -> tuple[str, list[str]]:
    """What is said of a block whose collectives go another way, by the search and in training."""
    found = message_of(
        lambda: generic.find_partitions(
            Functional().double(), dist.group.WORLD, sample().requires_grad_()
        )
    )
    module = Functional().double()
    executor = generic.attach(module, dist.group.WORLD)
    executor.set_next("forward", SPLIT)
    for _ in range(2):
        module(sample().requires_grad_()).sum().backward()
    reasons = list(executor.reasons)
    executor.close()
    return found, reasons


def taken_before_it_was_observed() -> tuple[float, list[str], dict[Any, int]]:
    """A setting that names nothing of the block, given before anybody can know."""
    module, value = block(), sample()
    wanted = step(module, value)
    executor = generic.attach(module, dist.group.WORLD)
    set_both(executor, OverlapSetting.parse("nonsense@1:0"))
    worst = max(error(step(module, value), wanted) for _ in range(2))
    executor.set_next("forward", SPLIT)
    worst = max(worst, error(step(module, value), wanted))
    found = worst, list(executor.reasons), dict(executor.executed)
    executor.close()
    return found


def closed_from_within() -> tuple[str, float]:
    """The message where a block closes its own executor, and the error of what follows."""
    module, value = block(), sample()
    wanted = step(module, value)
    executor = generic.attach(module, dist.group.WORLD)
    step(module, value)
    set_both(executor, SPLIT)
    handle = module[1].register_forward_pre_hook(lambda *_: executor.close())
    message = message_of(lambda: step(module, value))
    handle.remove()
    worst = error(step(module, value), wanted)
    executor.close()
    return message, max(worst, error(step(module, value), wanted))


class InPlace(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = block()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value.mul_(2))  # type: ignore[no-any-return]


def changes_in_place() -> tuple[float, list[str], str]:
    """Error and reasons where the input needs no gradient; what is said where it does."""
    module = InPlace()

    def train() -> list[torch.Tensor]:
        module.zero_grad()
        value = sample()
        output = module(value)
        output.square().sum().backward()
        return [output.detach(), value, *(p.grad for p in module.parameters())]  # type: ignore[list-item]

    wanted = train()
    executor = generic.attach(module, dist.group.WORLD)
    worst = error(train(), wanted)
    set_both(executor, SPLIT)
    worst = max(worst, error(train(), wanted))
    reasons = list(executor.reasons)
    executor.close()
    executor = generic.attach(module, dist.group.WORLD)
    message = message_of(lambda: module(sample().requires_grad_() * 1))
    executor.close()
    return worst, reasons, message


def closed_before_backward() -> str:
    """What is said of a backward whose forward was split by an executor that is closed since."""
    module = block()
    executor = generic.attach(module, dist.group.WORLD)
    step(module, sample())
    set_both(executor, SPLIT)
    output = module(sample().requires_grad_())
    executor.close()
    return message_of(lambda: output.sum().backward())


def wrapped_later() -> tuple[float, int]:
    """A wrapper that was put around an attached block stays when the executor is closed."""
    module, value = block(), sample()
    wanted = step(module, value)
    executor = generic.attach(module, dist.group.WORLD)
    calls = itertools.count()
    inner = module.forward

    def wrapper(*args: Any) -> Any:
        next(calls)
        return inner(*args)

    module.forward = wrapper  # type: ignore[method-assign]
    worst = error(step(module, value), wanted)
    executor.close()
    worst = max(worst, error(step(module, value), wanted))
    return worst, next(calls)


def search_leaves_no_trace() -> dict[str, bool]:
    """What finding the partitions of a block must not change."""
    module = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), *block()).double()
    value = sample().requires_grad_()
    buffers = [buffer.clone() for buffer in module.buffers()]
    state = torch.random.get_rng_state()
    generic.find_partitions(module, dist.group.WORLD, value)
    return {
        "gradient of the sample": value.grad is None,
        "buffers": all(map(torch.equal, buffers, module.buffers())),
        "random state": torch.equal(state, torch.random.get_rng_state()),
        "attached": "forward" not in module.__dict__,
    }
