"""Interception of collectives where Python hands them to c10d.

The class methods of `torch.distributed.ProcessGroup` are replaced, because its instances take no
attributes. Every framework that communicates through `torch.distributed` from Python passes here,
whatever layers it uses; collectives that C++ issues by itself do not.

Threads without a handler see the original methods, at the price of one attribute look-up.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

INTERCEPTED = (
    "allreduce",
    "all_gather_single",
    "_allgather_base",
    "reduce_scatter_single",
    "_reduce_scatter_base",
)
_WORDS = {
    "allreduce": "all-reduce",
    "all_gather_single": "all-gather",
    "_allgather_base": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
}


class Collective(NamedTuple):
    """One call of a collective, not yet made.

    Attributes:
        method: Name of the method of `ProcessGroup`.
        original: The method itself, unbound.
        group: The process group it was called on.
        args: Its arguments without the group; they keep the tensors alive.
        is_asynchronous: True where the caller asked for a handle to wait on; False where that is
            not known.
    """

    method: str
    original: Callable[..., Any]
    group: ProcessGroup
    args: tuple[Any, ...]
    is_asynchronous: bool

    @property
    def word(self) -> str:
        """What it is: `all-reduce`, `all-gather` or `reduce-scatter`."""
        return _WORDS[self.method]

    @property
    def is_asynchronous_gather(self) -> bool:
        """True for an all-gather that the caller overlaps by itself."""
        return self.is_asynchronous and self.word == "all-gather"

    @property
    def bytes(self) -> int:
        """Size in bytes of the largest tensor: what the collective reduces or gathers."""
        tensors = [t for a in self.args for t in (a if isinstance(a, list) else [a])]
        sizes = [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)]
        return max(sizes, default=0)

    def call(self, group: ProcessGroup) -> Any:
        """Make the call on a group of the same ranks and return its work handle."""
        options = self.args[-1] if self.args else None
        if options is not None and hasattr(options, "asyncOp"):
            # A synchronous call would run on the compute stream and overlap nothing.
            options.asyncOp = True
        # The peer that launches may be recording a graph, to which this does not belong.
        with torch.no_grad():
            return self.original(group, *self.args)


Handler = Callable[[Collective], Any]


class _ThreadState(threading.local):
    handler: Handler | None = None


_thread = _ThreadState()
_lock = threading.Lock()
_users = 0
_originals: dict[str, Any] = {}


def set_thread_handler(handler: Handler | None) -> None:
    """Hand every collective of the calling thread to a handler, or, with None, to c10d again."""
    _thread.handler = handler


def install() -> None:
    """Replace the methods; pairs with `uninstall` and may be nested."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for method in INTERCEPTED:
            original = ProcessGroup.__dict__.get(method)
            if original is not None:
                _originals[method] = original
                setattr(ProcessGroup, method, _intercepted(method))


def uninstall() -> None:
    """Undo one `install`; the last one puts the original methods back."""
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        for method, original in _originals.items():
            setattr(ProcessGroup, method, original)
        _originals.clear()


def _intercepted(method: str) -> Callable[..., Any]:
    original = getattr(ProcessGroup, method)

    @functools.wraps(original)
    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        handler = _thread.handler
        if handler is None or kwargs:
            return original(group, *args, **kwargs)
        asynchronous = bool(args) and getattr(args[-1], "asyncOp", False)
        return handler(Collective(method, original, group, args, asynchronous))

    return call
