"""Count the work of a stage from its own modules, for the emulated device.

Two ways: `count_forward` from parameters and tokens, before anything ran; `WorkCounter` around one
real forward, from the operations that the framework ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.simulate.gpu_model import Work

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")


def count_forward(
    modules: Iterable[torch.nn.Module], tokens: int, sequence_length: int | None = None
) -> Work:
    """Count one forward of a stage from its parameters.

    A matrix of `n` elements costs `2 n tokens` flops (Kaplan et al., 2020), and its elements,
    inputs and outputs pass through memory once; an embedding or a norm costs only the bytes of its
    inputs and outputs; a module that names its number of heads attends, with
    `4 tokens sequence_length width` flops for scores and values. Functions without parameters are
    not seen.

    Args:
        modules: The modules of the stage, or of one chunk of it.
        tokens: Tokens of a microbatch: sequences times sequence length.
        sequence_length: Tokens of a sequence; without it attention scores are left out.
    """
    total = Work(0.0, 0.0)
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            if id(module) not in seen:
                seen.add(id(module))
                total += _parameters_work(module, tokens)
                if sequence_length is not None and _attends(module):
                    total += Work(4.0 * tokens * sequence_length * _width(module), 0.0)
    return total


def _parameters_work(module: torch.nn.Module, tokens: int) -> Work:
    flops = bytes_ = 0.0
    for name, parameter in module.named_parameters(recurse=False):
        size = parameter.element_size()
        if isinstance(module, torch.nn.Embedding):
            bytes_ += 2.0 * tokens * parameter.shape[-1] * size
        elif parameter.dim() >= 2 and (name == "weight" or name.endswith("_weight")):
            rows, elements = parameter.shape[0], parameter.numel()
            flops += 2.0 * elements * tokens
            bytes_ += size * (elements + tokens * (rows + elements / rows))
        elif name == "weight":
            bytes_ += 2.0 * tokens * parameter.numel() * size
    return Work(flops, bytes_)


def _attends(module: torch.nn.Module) -> bool:
    """True for the innermost module that names its number of heads."""
    return _names_heads(module) and not any(
        _names_heads(child) for child in module.modules() if child is not module
    )


def _names_heads(module: torch.nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), int) for name in _HEADS)


def _width(module: torch.nn.Module) -> int:
    return max((p.shape[-1] for p in module.parameters() if p.dim() >= 2), default=0)


def instruction_works(
    stage: int, forward: Work, *, chunk: int = 0, recompute: bool = False
) -> dict[InstructionClass, Work]:
    """The work of every kind of instruction of a stage and chunk, from that of its forward.

    A backward computes two gradients, each at the cost of a forward: the input-gradient and the
    weight-gradient; activation checkpointing adds a forward to the backward, or to the
    input-gradient where it is split.

    Args:
        stage: The stage.
        forward: Work of one forward.
        chunk: The model chunk.
        recompute: True with activation checkpointing.
    """
    again = 1.0 if recompute else 0.0
    factors = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: 2.0 + again,
        Kind.INPUT_GRADIENT: 1.0 + again,
        Kind.WEIGHT_GRADIENT: 1.0,
    }
    return {
        InstructionClass(stage, kind, chunk): factor * forward for kind, factor in factors.items()
    }


class WorkCounter:
    """Counts the work of what runs inside it, on this thread: `with WorkCounter() as counter: ...`.

    Flops are those of `torch.utils.flop_counter`, bytes those of the inputs and outputs of every
    operation that is not a view, as if none were fused.
    """

    def __init__(self) -> None:
        self._flops = FlopCounterMode(display=False)
        self._bytes = _ByteCounter()
        self._modes = ExitStack()

    def __enter__(self) -> WorkCounter:
        self._modes.enter_context(self._flops)
        self._modes.enter_context(self._bytes)
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.close()

    @property
    def work(self) -> Work:
        """The work counted so far."""
        return Work(float(self._flops.get_total_flops()), float(self._bytes.total))


class _ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = _tensors((args, kwargs or {}))
        outputs = _tensors(result)
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_view = not func._schema.is_mutable and any(
            tensor.untyped_storage().data_ptr() in storages for tensor in outputs
        )
        if not is_view:
            self.total += sum(tensor.nbytes for tensor in (*inputs, *outputs))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]
