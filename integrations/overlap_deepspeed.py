"""Overlap on DeepSpeed pipeline modules built from DeepSpeed's tensor-parallel layers.

The part of a `PipelineModule` that a rank holds is one block. Build its layers with their group
explicitly (`LinearLayer(linear, mp_group=group)`, `LinearAllreduce(linear, mp_group=group)`):
DeepSpeed's own sharding by configuration does not take pipeline modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.overlap.generic import attach_module
from kareus_pp.overlap.groups import group_agreement, group_pool
from kareus_pp.overlap.shadow import ShadowTree
from kareus_pp.overlap.swaps import random_tracker


def attach(
    module: PipelineModule, levels: Sequence[int] = (), timeout_s: float = 10.0
) -> OverlapExecutor:
    """Attach to the pipeline module of an engine (`engine.module`).

    A collective call: every rank of the job makes it, after `deepspeed.initialize`. Until a setting
    says otherwise the module runs as before, but for the first training microbatch, which is
    observed.

    Args:
        module: The pipeline module; inputs and outputs of its stages have the batch first.
        levels: Numbers of SMs for which to make communicators; every one costs GPU memory.
        timeout_s: Longest wait for the other ranks of the group at the beginning of a step.

    Returns:
        The executor; its `close` undoes everything.

    Raises:
        OverlapError: No layer of this rank has a tensor-parallel group, the module is attached
            already, or the ranks give different levels.
    """
    group = tensor_parallel_group(module)
    swaps = [random_tracker(checkpointing.get_cuda_rng_tracker)]
    agreement = group_agreement(group, timeout_s)
    executor = OverlapExecutor([group], swaps, agreement, group_pool(group, levels))
    try:
        attach_module(
            executor,
            module,
            f"stage {module.stage_id}",
            batch_dimension=0,
            refusal=refusal(module),
            complete_shadow=_remap_functions,
        )
    except OverlapError:
        executor.close()
        raise
    return executor


def tensor_parallel_group(module: nn.Module) -> dist.ProcessGroup:
    """The group that DeepSpeed's tensor-parallel layers of a module communicate through.

    Raises:
        OverlapError: There is none, or there are several.
    """
    groups: dict[int, dist.ProcessGroup] = {}
    for layer in module.modules():
        found = getattr(layer, "mp_group", None)
        if found is not None:
            groups[id(found)] = found
    if len(groups) != 1:
        what = "no tensor-parallel layer" if not groups else f"{len(groups)} groups"
        raise OverlapError(
            f"the pipeline module has {what} where one tensor-parallel group is needed; build its "
            f"layers with LinearLayer and LinearAllreduce of deepspeed.module_inject.layers and "
            f"the same mp_group"
        )
    return next(iter(groups.values()))


def refusal(module: PipelineModule) -> str:
    """Why a pipeline module must run sequentially; empty where it need not."""
    bases = {base for layer in module.modules() for base in type(layer).__mro__}
    checks = (
        (tensor_parallel_group(module).size() == 1, "tensor parallel size is 1"),
        (
            any(base.__module__.startswith("deepspeed.runtime.domino") for base in bases),
            "Domino overlaps by itself and keeps its handles in globals",
        ),
        (MoE in bases, "mixture of experts routes across the microbatch"),
        (
            checkpointing.PARTITION_ACTIVATIONS
            or checkpointing.CONTIGUOUS_CHECKPOINTING
            or checkpointing.CPU_CHECKPOINT,
            "partitioned, contiguous and CPU checkpointing keep buffers in the order of whole "
            "microbatches",
        ),
        (
            getattr(module, "seed_layers", False),
            "seed_layers would give both halves of a microbatch the same random numbers",
        ),
        (hasattr(module, "phase_funcs"), "DualPipeV changes the layers between instructions"),
        (
            any(hasattr(parameter, "ds_id") for parameter in module.parameters()),
            "ZeRO stage 3 gathers parameters in the order of whole microbatches",
        ),
    )
    return next((words for holds, words in checks if holds), "")


def _remap_functions(tree: ShadowTree) -> None:
    """Let the shadow call its own layers: the module keeps them in a plain list."""
    root: Any = tree.root
    root.forward_funcs = [_remapped(tree, function) for function in root.forward_funcs]


def _remapped(tree: ShadowTree, function: Any) -> Any:
    if isinstance(function, nn.Module):
        return tree.of(function)
    if isinstance(function, partial):
        # A tied layer: its forward_fn, bound to the module that it shares.
        args = [tree.of(arg) if isinstance(arg, nn.Module) else arg for arg in function.args]
        return partial(function.func, *args, **function.keywords)
    return function
