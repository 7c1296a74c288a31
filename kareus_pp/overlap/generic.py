"""Overlap for other people's blocks: any module that communicates through one process group.

    from kareus_pp.overlap import generic

    for partition in generic.find_partitions(block, group, sample):
        print(partition.kind, partition.phase, [slot.name for slot in partition.slots])
    executor = generic.attach(block, group)
    executor.set_next("forward", OverlapSetting.parse("mlp@1:0"))

The block must treat the samples of a batch independently of each other, as transformer blocks do
and batch norm does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.agreement import Agreement
from kareus_pp.overlap.block import OverlapBlock, replace_forward
from kareus_pp.overlap.communicators import CommunicatorPool
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.overlap.partitions import Partition
from kareus_pp.overlap.run import Swap
from kareus_pp.overlap.shadow import ShadowTree
from kareus_pp.setting import Launch, OverlapSetting


def attach(
    blocks: nn.Module | Sequence[nn.Module],
    group: ProcessGroup | None = None,
    batch_dimension: int = 0,
    swaps: Sequence[Swap] = (),
    agreement: Agreement | None = None,
    levels: Sequence[int] = (),
) -> OverlapExecutor:
    """Attach to blocks; their first training forward and backward are observed.

    With levels a collective call: every rank of the job makes it, at the same place.

    Args:
        blocks: One block or several of the same rank.
        group: Process group whose collectives are overlapped; None: all ranks.
        batch_dimension: Batch dimension of inputs and outputs. Tensors whose size differs there
            are passed whole to both nanobatches.
        swaps: State that the blocks keep in globals across a collective.
        agreement: Agreement of the ranks; none: the caller gives all ranks the same settings.
        levels: Numbers of SMs for which to make communicators; every one costs GPU memory.
            Without, the numbers in settings are of no effect.

    Returns:
        The executor; its `close` undoes everything.

    Raises:
        OverlapError: A block's forward was replaced by a function that a shadow cannot call.
    """
    group = group or dist.distributed_c10d._get_default_group()
    pool = group_pool(group, levels) if levels else None
    executor = OverlapExecutor([group], swaps, agreement, pool)
    modules = [blocks] if isinstance(blocks, nn.Module) else list(blocks)
    try:
        for number, module in enumerate(modules):
            refusal = "tensor parallel size is 1" if group.size() == 1 else ""
            name = f"block {number} ({type(module).__name__})"
            attach_module(executor, module, name, batch_dimension, refusal)
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

    A collective call: every rank of the group makes it. Gradients of the parameters are as before
    afterwards; hooks on them, such as those of data parallelism, do run, so call it before the
    block is wrapped.

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
    if not block.training:
        raise OverlapError(
            "the block is in evaluation mode, which is never overlapped; call block.train() first"
        )
    saved = [(parameter, parameter.grad) for parameter in block.parameters()]
    executor = attach(block, group, batch_dimension)
    try:
        # Not sequential, so that reasons against overlap are looked for and reported; nothing is
        # observed yet that it could be checked against.
        executor.set_next("forward", OverlapSetting((Launch("any", 0),)))
        for parameter, _ in saved:
            parameter.grad = None
        outputs = [
            leaf
            for leaf in tree_leaves(block(*args, **kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        (attached,) = executor.blocks
        for reason in (*executor.reasons, attached.refusal):
            if reason:
                raise OverlapError(f"the block cannot be overlapped: {reason}")
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return executor.partitions
    finally:
        executor.close()
        for parameter, grad in saved:
            parameter.grad = grad


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
        OverlapError: The module's forward was replaced by a function that a shadow cannot call.
    """
    original: Any = module.forward
    if getattr(original, "__self__", None) is not module:
        raise OverlapError(
            f"the forward of {name} was replaced by a function that is bound to this instance; "
            f"attach overlap before whatever replaced it"
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
        if not block.decide(lambda: _reason(leaves, dimensions, batch)):
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


def _reason(leaves: Iterable[Any], dimensions: Iterable[int | None], batch: int) -> str:
    if batch < 2:
        return f"the microbatch size is {batch}"
    for leaf, dimension in zip(leaves, dimensions, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and dimension is None:
            return (
                f"an input of shape {tuple(leaf.shape)}, which both nanobatches share, needs a "
                f"gradient"
            )
    return ""


def group_agreement(group: ProcessGroup, timeout_s: float = 10.0) -> Agreement:
    """Agreement of the ranks of a group through the job's own key-value store.

    Args:
        group: The process group.
        timeout_s: Longest wait for the other ranks at the beginning of a step.
    """
    return Agreement(
        dist.distributed_c10d._get_default_store(),
        group="-".join(map(str, dist.get_process_group_ranks(group))),
        rank=group.rank(),
        size=group.size(),
        timeout_s=timeout_s,
    )


def group_pool(group: ProcessGroup, levels: Sequence[int]) -> CommunicatorPool:
    """Communicators for every group of this kind; a collective call of all ranks of the job.

    Args:
        group: This rank's own group.
        levels: Numbers of SMs.
    """
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tuple(dist.get_process_group_ranks(group)))
    return CommunicatorPool.create(sorted(set(everywhere)), levels, group)
