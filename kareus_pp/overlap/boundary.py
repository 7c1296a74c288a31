"""The autograd boundary: around a block that runs as nanobatches, one node of the graph.

Forward splits the inputs along the batch dimension into leaves of their own graphs, runs every
nanobatch with gradients enabled, and puts the outputs together. Backward runs the engine once per
nanobatch, each on its own thread; parameters accumulate directly, by the framework's own hooks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from kareus_pp.errors import OverlapError

Tasks = Sequence[Callable[[], Any]]


@dataclass
class BlockCall:
    """One call of a block, to be executed as one or two nanobatches.

    Attributes:
        function: Called with the number of the nanobatch, then as the block's own forward.
        leaves: Leaves of the tree of positional and keyword arguments; dropped after the forward.
        spec: The tree without its leaves.
        dimensions: Batch dimension of each leaf; None where all nanobatches share it whole.
        output_dimension: Batch dimension of the outputs.
        sizes: Batch size of every nanobatch.
        output_spec: Tree of the outputs, known after the forward.
        inputs: For every nanobatch the leaves whose gradient is wanted.
        edges: For every nanobatch where the backward starts.
        differentiable: Places of the outputs that have a gradient.
        wanted: Places of the arguments' leaves whose gradient is wanted.
        unjoinable: Why the outputs of two nanobatches could not be put together, in words; known
            after the forward of a single one.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    dimensions: list[int | None]
    output_dimension: int
    sizes: tuple[int, ...]
    output_spec: TreeSpec | None = None
    inputs: list[list[torch.Tensor]] = field(default_factory=list)
    edges: list[list[GradientEdge]] = field(default_factory=list)
    differentiable: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    unjoinable: str = ""

    def __post_init__(self) -> None:
        self.wanted = [
            place
            for place, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
            and leaf.requires_grad
            and self.dimensions[place] is not None
        ]

    def forward_tasks(self) -> Tasks:
        """One task for every nanobatch; each returns the flat outputs."""
        tasks, start = [], 0
        for nanobatch, size in enumerate(self.sizes):
            parts = [self._part(place, start, size) for place in range(len(self.leaves))]
            self.inputs.append([parts[place] for place in self.wanted])
            tasks.append(partial(self._run_forward, nanobatch, parts))
            start += size
        return tasks

    def _part(self, place: int, start: int, size: int) -> Any:
        leaf, dimension = self.leaves[place], self.dimensions[place]
        if not isinstance(leaf, torch.Tensor) or dimension is None:
            return leaf
        part = leaf.detach().narrow(dimension, start, size)
        if not leaf.requires_grad:
            return part
        # A leaf of its own: not a view, which frameworks refuse to free.
        return part.clone(memory_format=torch.contiguous_format).requires_grad_()

    def _run_forward(self, nanobatch: int, parts: list[Any]) -> list[Any]:
        args, kwargs = tree_unflatten(parts, self.spec)
        # The task outlives its run: it must not keep what the graph does not need.
        parts.clear()
        with torch.enable_grad():
            outputs = self.function(nanobatch, *args, **kwargs)
        flat: list[Any]
        flat, self.output_spec = tree_flatten(outputs)
        return flat

    def join(self, parts: list[list[Any]]) -> list[Any]:
        """The outputs of the whole microbatch, flat; keeps of the parts only their graphs.

        Raises:
            OverlapError: An output of two halves has no batch dimension to join along, or one
                holds tensors with a gradient where they cannot be seen.
        """
        self.differentiable = [
            i
            for i, value in enumerate(parts[0])
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        joined = [self._join_one(values) for values in zip(*parts, strict=True)]
        # An edge, not the tensor: what the output holds is freed unless the graph needs it.
        self.edges = [[get_gradient_edge(part[i]) for i in self.differentiable] for part in parts]
        self.leaves = []
        return joined

    def _join_one(self, values: tuple[Any, ...]) -> Any:
        value = values[0]
        if _holds_gradient(value):
            raise OverlapError(
                f"an output of type {type(value).__name__} holds tensors where torch's pytree "
                f"cannot see them; register the type with torch.utils._pytree, or do not "
                f"attach to this block"
            )
        reasons = map(self._reason_against, values, self.sizes)
        reason = next(filter(None, reasons), "")
        if reason and len(values) > 1:
            raise OverlapError(reason)
        # Observed, and whole: nothing needs to be joined now, nor ever will be.
        self.unjoinable = self.unjoinable or reason
        if not isinstance(value, torch.Tensor):
            return value
        if reason:
            return value.detach().clone()
        return torch.cat([value.detach() for value in values], self.output_dimension)

    def _reason_against(self, value: Any, size: int) -> str:
        if value is None or isinstance(value, (str, bool)):
            return ""  # The same for both halves, as far as can be told.
        if not isinstance(value, torch.Tensor):
            return f"an output of type {type(value).__name__} cannot be put together of two halves"
        dimension = self.output_dimension
        if value.dim() > dimension and value.size(dimension) == size:
            return ""
        return (
            f"an output of shape {tuple(value.shape)} has no batch dimension {dimension} of "
            f"size {size}"
        )

    def backward_tasks(self, gradients: Sequence[torch.Tensor]) -> Tasks:
        """One task for every nanobatch; each returns the gradients of its leaves."""
        if len(self.sizes) == 1:
            whole = [gradients[i].contiguous() for i in self.differentiable]
            return [partial(self._run_backward, 0, whole)]
        tasks, start = [], 0
        for nanobatch, size in enumerate(self.sizes):
            parts = [
                gradients[i].narrow(self.output_dimension, start, size).contiguous()
                for i in self.differentiable
            ]
            tasks.append(partial(self._run_backward, nanobatch, parts))
            start += size
        return tasks

    def _run_backward(
        self, nanobatch: int, gradients: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        torch.autograd.backward(self.edges[nanobatch], gradients)
        return [leaf.grad for leaf in self.inputs[nanobatch]]

    def join_gradients(self, parts: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """The gradients of the whole inputs whose gradient is wanted."""
        joined: list[torch.Tensor | None] = []
        for number, place in enumerate(self.wanted):
            grads = [part[number] for part in parts]
            if all(grad is None for grad in grads):
                joined.append(None)
                continue
            dimension = self.dimensions[place]
            assert dimension is not None
            joined.append(
                torch.cat(
                    [
                        torch.zeros_like(inputs[number]) if grad is None else grad
                        for inputs, grad in zip(self.inputs, grads, strict=True)
                    ],
                    dimension,
                )
            )
        return joined

    def release(self) -> None:
        """Forget inputs and graphs."""
        self.inputs, self.edges = [], []


def _holds_gradient(value: Any, depth: int = 3) -> bool:
    """Whether an object that is no tensor holds some with a gradient, which would be lost."""
    if depth == 0 or value is None or isinstance(value, (torch.Tensor, str, bool, type)):
        return False
    return any(
        part.requires_grad if isinstance(part, torch.Tensor) else _holds_gradient(part, depth - 1)
        for part in gc.get_referents(value)
        if not isinstance(part, (type, ModuleType, FunctionType))
    )


RunTasks = Callable[[Tasks], list[Any]]


def apply_boundary(call: BlockCall, run_forward: RunTasks, run_backward: RunTasks) -> Any:
    """Execute a call as nanobatches and return what the block returns.

    Args:
        call: The call.
        run_forward: Runs the tasks of the forward.
        run_backward: Runs the tasks of the backward, when it comes.
    """
    # The anchor requires grad even where no input does, so that the backward comes here.
    anchor = torch.zeros((), requires_grad=True)
    wanted = [call.leaves[place] for place in call.wanted]
    apply: Any = _Boundary.apply
    flat = apply(call, run_forward, run_backward, anchor, *wanted)
    assert call.output_spec is not None
    return tree_unflatten(list(flat), call.output_spec)


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: BlockCall, run_forward: RunTasks, run_backward: RunTasks, *_: Any
    ) -> tuple[Any, ...]:
        ctx.call, ctx.run_backward = call, run_backward
        outputs = call.join(run_forward(call.forward_tasks()))
        ctx.mark_non_differentiable(
            *(
                value
                for i, value in enumerate(outputs)
                if isinstance(value, torch.Tensor) and i not in call.differentiable
            )
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:  # type: ignore[override]
        call: BlockCall = ctx.call
        if not call.edges:
            raise RuntimeError(
                "a block that ran as nanobatches is differentiated a second time; its buffers "
                "were freed, as after every backward without retain_graph"
            )
        joined = call.join_gradients(ctx.run_backward(call.backward_tasks(gradients)))
        call.release()
        return (None, None, None, None, *joined)
