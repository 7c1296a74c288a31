"""Overlap for other people's blocks: any module that communicates through one process group.

    from kareus_pp.overlap import generic

    for partition in generic.find_partitions(block, group, sample):
        print(partition.kind, partition.phase, [slot.name for slot in partition.slots])
    executor = generic.attach(block, group, agreement=generic.group_agreement(group))
    train(block)  # observed
    setting = OverlapSetting.parse("mlp@1:0")
    executor.begin_step(1, [setting])
    executor.set_next("forward", setting)
    executor.set_next("backward", setting)
    train(block)  # overlapped

The block must treat the samples of a batch independently of each other, as transformer blocks do
and batch norm does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map_only

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.agreement import Agreement
from kareus_pp.overlap.block import (
    OverlapBlock,
    is_attached,
    is_within_attached,
    replace_forward,
)
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.overlap.groups import group_agreement as group_agreement
from kareus_pp.overlap.groups import group_pool, own_group
from kareus_pp.overlap.partitions import Partition
from kareus_pp.overlap.run import Swap
from kareus_pp.overlap.shadow import ShadowTree
from kareus_pp.setting import Launch, OverlapSetting


def attach(
    blocks: nn.Module | Iterable[nn.Module],
    group: ProcessGroup | None = None,
    batch_dimension: int = 0,
    swaps: Sequence[Swap] = (),
    agreement: Agreement | None = None,
    levels: Sequence[int] = (),
) -> OverlapExecutor:
    """Attach to blocks; their first training forward and backward are observed.

    With levels a collective call: every rank of the job makes it, at the same place.

    Args:
        blocks: One block or several of the same rank, none of them within another.
        group: Process group whose collectives are overlapped; None: all ranks.
        batch_dimension: Batch dimension of inputs and outputs; 1 where the sequence comes first.
            Tensors whose size differs there are passed whole to both nanobatches.
        swaps: State that the blocks keep in globals across a collective.
        agreement: Agreement of the ranks, as `group_agreement` makes it: nothing overlaps that
            `begin_step` did not agree on. None: the caller gives all ranks the same settings.
        levels: Numbers of SMs for which to make communicators; every one costs GPU memory.
            Without, the numbers in settings are of no effect.

    Returns:
        The executor; its `close` undoes everything.

    Raises:
        OverlapError: An argument cannot be used, a block is attached already, its forward was
            replaced by a function that a shadow cannot call, or the ranks give different levels.
    """
    group = own_group(group)
    modules = modules_of(blocks)
    _refuse_nested(modules)
    if type(batch_dimension) is not int or batch_dimension < 0:
        raise OverlapError(
            f"the batch dimension {batch_dimension!r} is none; use 0, or 1 where the sequence "
            f"comes first"
        )
    if agreement is not None and not isinstance(agreement, Agreement):
        raise OverlapError(
            f"the agreement {agreement!r} is none; make one with generic.group_agreement(group)"
        )
    executor = OverlapExecutor([group], swaps, agreement, group_pool(group, levels))
    try:
        for number, module in enumerate(modules):
            name = f"block {number} ({type(module).__name__})"
            attach_module(executor, module, name, batch_dimension, _refusal(module, group))
    except OverlapError:
        executor.close()
        raise
    return executor


def find_partitions(
    block: nn.Module,
    group: ProcessGroup | None,
    *args: Any,
    batch_dimension: int = 0,
    **kwargs: Any,
) -> tuple[Partition, ...]:
    """Run a block once on a sample and report its partitions, forward before backward.

    A collective call: every rank of the group makes it. Gradients, buffers and torch's random
    state are as before afterwards; hooks on parameters, such as those of data parallelism, do run,
    so call it before the block is wrapped.

    Args:
        block: The block, in training mode.
        group: Process group whose collectives are overlapped; None: all ranks.
        *args: Sample arguments of the block.
        batch_dimension: Batch dimension of inputs and outputs.
        **kwargs: Sample keyword arguments.

    Returns:
        The partitions with their operations, slots, collective and bytes.

    Raises:
        OverlapError: The block cannot be overlapped; the message says why.
    """
    if not isinstance(block, nn.Module) or isinstance(block, nn.ModuleList):
        raise OverlapError(
            f"a {type(block).__name__} is no block; give one torch module, of several the first"
        )
    if not block.training:
        raise OverlapError(
            "the block is in evaluation mode, which is never overlapped; call block.train() first"
        )
    grads = [(parameter, parameter.grad) for parameter in block.parameters()]
    buffers = [
        (owner, name, buffer, buffer.clone())
        for owner in block.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    executor = attach(block, group, batch_dimension)
    try:
        # Not sequential, so that reasons against overlap are looked for and reported; nothing is
        # observed yet that it could be checked against.
        executor.set_next("forward", OverlapSetting((Launch("any", 0),)))
        for parameter, _ in grads:
            parameter.grad = None
        with torch.random.fork_rng(_devices_of(block)):
            own_args, own_kwargs = tree_map_only(torch.Tensor, _separate, (args, kwargs))
            outputs = [
                leaf
                for leaf in tree_leaves(block(*own_args, **own_kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            _refuse_any(executor.reasons)
            _refuse_any([] if outputs else ["no output of it has a gradient"])
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        _refuse_any(executor.reasons)
        return executor.partitions
    finally:
        executor.close()
        for parameter, grad in grads:
            parameter.grad = grad
        for owner, name, buffer, value in buffers:
            owner._buffers[name] = buffer
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _devices_of(block: nn.Module) -> list[torch.device]:
    return list({p.device for p in block.parameters() if p.device.type == "cuda"})


def _separate(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _refuse_any(reasons: Iterable[str]) -> None:
    for reason in reasons:
        raise OverlapError(f"the block cannot be overlapped: {reason}")


def modules_of(blocks: object) -> list[nn.Module]:
    """One module or several as a list.

    Raises:
        OverlapError: There is none, or something else among them.
    """
    if isinstance(blocks, nn.ModuleDict):
        blocks = blocks.values()
    several = isinstance(blocks, nn.ModuleList) or not isinstance(blocks, nn.Module)
    modules = list(blocks) if several and isinstance(blocks, Iterable) else [blocks]
    for module in modules:
        if not isinstance(module, nn.Module):
            raise OverlapError(f"{module!r} is no torch module; give one module or a list of them")
    if not modules:
        raise OverlapError("there is no module to overlap in an empty list")
    return modules


def _refuse_nested(modules: Sequence[nn.Module]) -> None:
    given = {id(module) for module in modules}
    if len(given) < len(modules):
        raise OverlapError("a block is given twice; give every block once")
    for module in modules:
        for name, inner in module.named_modules():
            if inner is not module and (id(inner) in given or is_attached(inner)):
                raise OverlapError(
                    f"{name} is a block too, within a block of type {type(module).__name__}; "
                    f"attach either the outer or the inner one"
                )
        if is_within_attached(module) and not is_attached(module):
            raise OverlapError(
                f"a block of type {type(module).__name__} is within one that is attached; attach "
                f"either the outer or the inner one"
            )


def _refusal(module: nn.Module, group: ProcessGroup) -> str:
    bases = {base.__name__ for inner in module.modules() for base in type(inner).__mro__}
    parameters = list(module.parameters())
    checks = (
        (group.size() == 1, "tensor parallel size is 1"),
        (
            "DistributedDataParallel" in bases,
            "DistributedDataParallel is within it; attach the blocks within that one",
        ),
        (
            bool(bases & {"FSDPModule", "FullyShardedDataParallel"}),
            "FSDP gathers parameters in the order of whole microbatches",
        ),
        (
            any(type(parameter).__name__ == "DTensor" for parameter in parameters),
            "its parameters are DTensors, whose collectives cannot be seen",
        ),
        (
            any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters),
            "hooks on its parameters would see the gradients of half a microbatch",
        ),
    )
    return next((words for holds, words in checks if holds), "")


def attach_module(
    executor: OverlapExecutor,
    module: nn.Module,
    name: str,
    batch_dimension: int,
    refusal: str = "",
    complete_shadow: Callable[[ShadowTree], None] = lambda tree: None,
) -> OverlapBlock:
    """Attach one module to an executor; arguments as those of `OverlapBlock`.

    Raises:
        OverlapError: The module is attached already, or its forward was replaced by a function
            that a shadow cannot call.
    """
    if is_attached(module):
        raise OverlapError(f"{name} is attached already; close the executor that it follows first")
    original: Any = module.forward
    if getattr(original, "__self__", None) is not module:
        raise OverlapError(
            f"the forward of {name} was replaced by a function that is bound to this instance; "
            f"attach overlap to the module itself and before whatever replaced it, such as "
            f"torch.compile"
        )
    block = OverlapBlock(
        executor,
        module,
        name,
        output_dimension=batch_dimension,
        hidden=("forward",),
        refusal=refusal,
        undo=lambda: undo(),
        complete_shadow=complete_shadow,
    )

    def run(nanobatch: int, *args: Any, **kwargs: Any) -> Any:
        if nanobatch == 0:
            return original(*args, **kwargs)
        return MethodType(original.__func__, block.shadow_of(module))(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        batch = _batch_size(leaves, batch_dimension)
        dimensions = batch_dimensions(leaves, batch_dimension, batch)
        if not block.decide(lambda: _reason(leaves, batch_dimension, dimensions, batch)):
            return original(*args, **kwargs)
        return block.execute(run, args, kwargs, dimensions, batch)

    undo = replace_forward(module, forward)
    return block


def _batch_size(leaves: Iterable[Any], dimension: int) -> int:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dimension:
            return int(leaf.size(dimension))
    return 0


def batch_dimensions(leaves: Iterable[Any], dimension: int, batch: int) -> list[int | None]:
    """The batch dimension of every leaf of arguments: the same for all tensors that have it.

    Args:
        leaves: Leaves of the arguments.
        dimension: Batch dimension.
        batch: Batch size; tensors of another size in that dimension are shared whole.
    """
    return [
        dimension
        if isinstance(leaf, torch.Tensor)
        and leaf.dim() > dimension
        and leaf.size(dimension) == batch
        else None
        for leaf in leaves
    ]


def _reason(
    leaves: Iterable[Any], wanted: int, dimensions: Sequence[int | None], batch: int
) -> str:
    if all(dimension is None for dimension in dimensions):
        return f"no input has a batch dimension {wanted}"
    if batch < 2:
        return f"the microbatch size is {batch}"
    for leaf, dimension in zip(leaves, dimensions, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and dimension is None:
            return (
                f"an input of shape {tuple(leaf.shape)}, which both nanobatches share, needs a "
                f"gradient"
            )
    return ""
