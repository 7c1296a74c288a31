"""Hooks that tell the scheduler when a nanobatch reaches a submodule boundary.

Forward: before a submodule runs. Backward: before the gradient of its output goes into it. The
hooks sit on the original modules; a shadow shares them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from kareus_pp.overlap.scheduler import at_boundary, is_nanobatch_thread


class SlotHooks:
    """The hooks of one block.

    Args:
        block: The block; its submodules' names are the names of the boundaries.

    Attributes:
        installed: Whether the boundaries that matter are hooked; that may be none of them.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._handles: list[Any] = []
        self._events: frozenset[str] | None = None
        self.installed = False

    def install(self, events: frozenset[str] | None = None) -> None:
        """Hook the boundaries of some events, as `f:layers.0.mlp`; None: all.

        A module with hooks is slower to call, by more than the hook itself takes.
        """
        if self.installed and events == self._events:
            return
        self.remove()
        self._events, self.installed = events, True
        for name, module in self._block.named_modules():
            if not name:
                continue
            forward, backward = f"f:{name}", f"b:{name}"
            if events is None or forward in events:
                hook = partial(_before_forward, forward)
                self._handles.append(module.register_forward_pre_hook(hook))
            if events is None or backward in events:
                after = partial(_after_forward, backward)
                self._handles.append(module.register_forward_hook(after))

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.installed = False


def _before_forward(event: str, module: nn.Module, args: Any) -> None:
    at_boundary(event)


def _after_forward(event: str, module: nn.Module, args: Any, output: Any) -> None:
    if not is_nanobatch_thread() or not torch.is_grad_enabled():
        return
    node = _gradient_node(output)
    if node is not None:
        node.register_prehook(partial(_before_backward, at_boundary, event))


def _before_backward(report: Callable[[str], None], event: str, gradients: Any) -> None:
    report(event)


def _gradient_node(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.grad_fn
    if isinstance(output, (tuple, list)):
        for part in output:
            node = _gradient_node(part)
            if node is not None:
                return node
    return None
