"""Overlap on Megatron-Core's own transformer blocks.

Megatron-Core 0.16 (PyPI) and 0.20 (source). A block keeps its own forward: for the time of one
call its layers, or its function for full recomputation, are replaced by one that runs them as
nanobatches, so that everything around them (final norm, sequence parallelism, random state) is
Megatron's own and happens once.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn
from torch.utils._pytree import tree_leaves

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.block import OverlapBlock, is_attached, replace_forward
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.overlap.generic import modules_of
from kareus_pp.overlap.groups import group_agreement, group_pool
from kareus_pp.overlap.run import Swap
from kareus_pp.overlap.swaps import Variable, random_tracker

_block_module: Any = importlib.import_module("megatron.core.transformer.transformer_block")

# Batch dimension of the arguments of a layer; other tensors are shared whole.
_DIMENSIONS = {
    "hidden_states": 1,
    "attention_mask": 0,
    "rotary_pos_emb": 1,
    "attention_bias": 0,
    "padding_mask": 0,
}


def attach(
    model: nn.Module | Sequence[nn.Module],
    levels: Sequence[int] = (),
    allow_untested: bool = False,
    timeout_s: float = 10.0,
) -> OverlapExecutor:
    """Attach to all transformer blocks of a rank's model chunks.

    A collective call: every rank of the job makes it, at the same place. Until a setting says
    otherwise all blocks run as before, but for the first training microbatch, which is observed.

    Args:
        model: The model chunks of this rank, with the wrappers (DDP, Float16Module) they have.
        levels: Numbers of SMs for which to make communicators; every one costs GPU memory.
        allow_untested: Overlap too where it should work but was never run: Transformer Engine
            layers and context parallelism.
        timeout_s: Longest wait for the other ranks of the group at the beginning of a step.

    Returns:
        The executor; its `close` undoes everything.

    Raises:
        OverlapError: There is no transformer block, one is attached already, or the ranks give
            different levels.
    """
    chunks = modules_of(model)
    blocks = [
        (f"chunk {number}, {name or 'block'}", module)
        for number, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerBlock)
    ]
    if not blocks:
        raise OverlapError(
            "the model has no Megatron TransformerBlock to overlap; attach the blocks of other "
            "models with kareus_pp.overlap.generic"
        )
    for name, block in blocks:
        if is_attached(block):
            raise OverlapError(
                f"{name} is attached already; close the executor that it follows first"
            )
    reducing = _reducing_groups(chunks)
    group = _tensor_parallel_group(blocks[0][1])
    agreement = group_agreement(group, timeout_s)
    executor = OverlapExecutor([group], _swaps(reducing), agreement, group_pool(group, levels))
    for name, block in blocks:
        refused = refusal(block, allow_untested)
        if not reducing and any(hasattr(p, "main_grad") for p in block.parameters()):
            # It must hear of every gradient only once, and cannot be told.
            refused = refused or "its gradients belong to a wrapper that was not attached with it"
        _attach_block(executor, block, name, refused)
    return executor


def _attach_block(
    executor: OverlapExecutor, block: TransformerBlock, name: str, refused: str
) -> None:
    original: Callable[..., Any] = block.forward
    overlapped = OverlapBlock(
        executor,
        block,
        name,
        output_dimension=1,
        hidden=("forward", "_checkpointed_forward"),
        refusal=refused,
        undo=lambda: undo(),
    )
    recomputes_fully = block.config.recompute_granularity == "full"
    replaced = _recompute_replaced if recomputes_fully else _layers_replaced
    names = _argument_names(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        def reason() -> str:
            return _reason_of_call(block, {**dict(zip(names, args, strict=False)), **kwargs})

        if not overlapped.decide(reason):
            return original(*args, **kwargs)
        with replaced(overlapped, block):
            return original(*args, **kwargs)

    undo = replace_forward(block, forward)


def _argument_names(block: TransformerBlock) -> tuple[str, ...]:
    code = type(block).forward.__code__
    return tuple(code.co_varnames[1 : code.co_argcount])


class _LayerStub(nn.Module):
    """Stands for all layers of a block during one call."""

    def __init__(self, run: Callable[[dict[str, Any]], torch.Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Run the layers; returns what the last one returns."""
        return self._run(kwargs), kwargs.get("context")


@contextlib.contextmanager
def _layers_replaced(overlapped: OverlapBlock, block: TransformerBlock) -> Iterator[None]:
    layers: Any = block._modules["layers"]

    def run_layers(nanobatch: int, **kwargs: Any) -> torch.Tensor:
        own: Any = layers if nanobatch == 0 else overlapped.shadow_of(layers)
        hidden: torch.Tensor = kwargs.pop("hidden_states")
        context = kwargs.pop("context", None)
        for layer in own:
            hidden, context = layer(hidden_states=hidden, context=context, **kwargs)
        return hidden

    def run(kwargs: dict[str, Any]) -> torch.Tensor:
        # The layers themselves may ask the block for its layers.
        block._modules["layers"] = layers
        return _execute(overlapped, run_layers, kwargs)

    block._modules["layers"] = nn.ModuleList([_LayerStub(run)])
    try:
        yield
    finally:
        block._modules["layers"] = layers


@contextlib.contextmanager
def _recompute_replaced(overlapped: OverlapBlock, block: TransformerBlock) -> Iterator[None]:
    own = getattr(type(block), "_checkpointed_forward", None)
    original: Callable[..., Any] = own or _block_module.checkpointed_forward

    def run_nanobatch(nanobatch: int, **kwargs: Any) -> torch.Tensor:
        target = block if nanobatch == 0 else overlapped.shadow_of(block)
        hidden: torch.Tensor = original(target, **kwargs)
        return hidden

    def run(_: Any = None, **kwargs: Any) -> torch.Tensor:
        restore()
        return _execute(overlapped, run_nanobatch, kwargs)

    def restore() -> None:
        if own is None:
            _block_module.checkpointed_forward = original
        else:
            block.__dict__.pop("_checkpointed_forward", None)

    if own is None:
        _block_module.checkpointed_forward = run
    else:
        block._checkpointed_forward = run
    try:
        yield
    finally:
        restore()


def _execute(
    overlapped: OverlapBlock, function: Callable[..., Any], kwargs: dict[str, Any]
) -> torch.Tensor:
    batch = kwargs["hidden_states"].size(1)

    def dimension_of(name: str, leaf: Any) -> int | None:
        dimension = _DIMENSIONS.get(name)
        if dimension is None or not isinstance(leaf, torch.Tensor):
            return None
        return dimension if leaf.dim() > dimension and leaf.size(dimension) == batch else None

    dimensions = [
        dimension_of(name, leaf) for name, value in kwargs.items() for leaf in tree_leaves(value)
    ]
    hidden: torch.Tensor = overlapped.execute(function, (), kwargs, dimensions, batch)
    return hidden


# Reasons to run sequentially, in words.


def refusal(block: TransformerBlock, allow_untested: bool = False) -> str:
    """Why a block must run sequentially whatever it is called with; empty where it need not.

    Args:
        block: The block.
        allow_untested: Count what should work but was never run as no reason.
    """
    config = block.config

    def has(name: str) -> bool:
        return bool(getattr(config, name, None))

    graphs = getattr(config, "cuda_graph_impl", "none") or "none"
    checks = (
        (_tensor_parallel_group(block).size() == 1, "tensor parallel size is 1"),
        (has("fp8"), "FP8 keeps scaling state across the microbatch"),
        (has("fp4"), "FP4 keeps scaling state across the microbatch"),
        (has("num_moe_experts"), "mixture of experts routes across the microbatch"),
        (has("cpu_offloading"), "CPU offloading counts layers of whole microbatches"),
        (
            has("fine_grained_activation_offloading"),
            "fine-grained activation offloading counts modules of whole microbatches",
        ),
        (
            graphs != "none" or has("enable_cuda_graph") or has("external_cuda_graph"),
            "CUDA graphs replay without Python",
        ),
        (has("tp_comm_overlap"), "user buffers communicate outside of torch.distributed"),
        (has("symmetric_ar_type"), "symmetric all-reduce bypasses torch.distributed"),
        (
            has("overlap_moe_expert_parallel_comm"),
            "overlap_moe_expert_parallel_comm schedules layers by itself",
        ),
        (
            has("distribute_saved_activations"),
            "distribute_saved_activations gathers inputs in the order of whole microbatches",
        ),
        (
            not _random_states_can_be_swapped(),
            "the random states are those of CUDA graphs or of Transformer Engine",
        ),
        (has("enable_mhc_connections"), "hyper-connections pass more than one hidden state"),
        (_is_sharded(block), "FSDP gathers parameters in the order of whole microbatches"),
        (
            not allow_untested and getattr(config, "context_parallel_size", 1) > 1,
            "context parallelism is not tested with overlap (allow_untested turns it on)",
        ),
        (
            not allow_untested and _has_transformer_engine(block),
            "Transformer Engine is not tested with overlap (allow_untested turns it on)",
        ),
    )
    return next((words for holds, words in checks if holds), "")


def _random_states_can_be_swapped() -> bool:
    tracker = megatron_random.get_cuda_rng_tracker()
    states = getattr(tracker, "states_", None)
    return states is not None and all(isinstance(s, torch.Tensor) for s in states.values())


def _is_sharded(block: TransformerBlock) -> bool:
    names = {base.__name__ for module in block.modules() for base in type(module).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel", "MegatronFSDP"}:
        return True
    return any(hasattr(parameter, "__fsdp_param__") for parameter in block.parameters())


def _has_transformer_engine(block: TransformerBlock) -> bool:
    return any(
        base.__module__.split(".")[0] == "transformer_engine"
        for module in block.modules()
        for base in type(module).__mro__
    )


def _reason_of_call(block: TransformerBlock, arguments: dict[str, Any]) -> str:
    """Why one call of a block must run sequentially; empty where it need not."""
    hidden = arguments.get("hidden_states") if block.pre_process else block.input_tensor
    if hasattr(hidden, "unwrap"):
        return "the hidden state is wrapped, as in inference"
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
        return "the hidden state is not one tensor of sequence, batch and hidden size"
    if hidden.size(1) < 2:
        return "the microbatch size is 1"
    for name, words in _UNWANTED.items():
        if arguments.get(name) is not None and arguments[name] != set():
            return words
    for name, value in arguments.items():
        if name != "hidden_states" and any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(value)
        ):
            return f"the input {name!r} needs a gradient, as only the hidden state may"
    return ""


_UNWANTED = {
    "context": "cross-attention's context is shared by the halves of a microbatch",
    "packed_seq_params": "packed sequences have no batch dimension",
    "inference_context": "this is inference",
    "inference_params": "this is inference",
    "sequence_len_offset": "this is inference",
    "rotary_pos_cos": "rotary embeddings as cosine and sine are for inference",
    "rotary_pos_sin": "rotary embeddings as cosine and sine are for inference",
    "rotary_pos_cos_sin": "rotary embeddings as cosine and sine are for inference",
    "extract_layer_indices": "extract_layer_indices asks for the inside of the block",
}


# What Megatron keeps in globals.


def _reducing_groups(chunks: Sequence[nn.Module]) -> list[Any]:
    """What Megatron's data parallelism reduces gradients by."""
    return [
        group
        for chunk in chunks
        for module in chunk.modules()
        for name in ("bucket_groups", "expert_parallel_bucket_groups")
        for group in getattr(module, name, None) or ()
    ]


def _swaps(reducing: Sequence[Any]) -> list[Swap]:
    swaps: list[Swap] = [
        _module_variable(parallel_state, "_GLOBAL_MEMORY_BUFFER", _second_memory_buffer()),
        _module_variable(megatron_random, "IS_CHECKPOINTING", lambda value: (value, value)),
        random_tracker(megatron_random.get_cuda_rng_tracker),
    ]
    if reducing:
        swaps.append(_last_microbatch(reducing))
    return swaps


def _module_variable(module: Any, name: str, begin: Callable[[Any], tuple[Any, Any]]) -> Variable:
    return Variable(lambda: getattr(module, name), lambda v: setattr(module, name, v), begin)


def _second_memory_buffer() -> Callable[[Any], tuple[Any, Any]]:
    """Sequence parallelism gathers into one global buffer: each nanobatch needs its own."""
    made: list[Any] = []

    def begin(buffer: Any) -> tuple[Any, Any]:
        if buffer is not None and not made:
            made.append(type(buffer)())
        return buffer, made[0] if buffer is not None else None

    return begin


def _last_microbatch(groups: Sequence[Any]) -> Variable:
    """A gradient is ready only when both nanobatches have added to it."""

    def put(values: list[bool]) -> None:
        for group, value in zip(groups, values, strict=True):
            group.is_last_microbatch = value

    return Variable(
        get=lambda: [group.is_last_microbatch for group in groups],
        put=put,
        begin=lambda values: ([False] * len(values), values),
        phases=("backward",),
    )


# Ranks and communicators.


def _tensor_parallel_group(block: TransformerBlock) -> dist.ProcessGroup:
    collection = getattr(block, "pg_collection", None)
    group: dist.ProcessGroup = (
        getattr(collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    )
    return group
