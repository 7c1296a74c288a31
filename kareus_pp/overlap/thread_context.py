"""What a nanobatch's thread must take over from the thread it works for.

Device, stream, autocast and torch-function modes are thread-local in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides


def gpu_in_use() -> bool:
    """True where this process has begun to use a GPU."""
    return torch.cuda.is_available() and bool(
        torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    )


@dataclass(frozen=True)
class ThreadContext:
    """The thread-local state of torch that decides what an operation does."""

    device: int | None
    stream: Any
    function_modes: tuple[Any, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def capture(cls) -> ThreadContext:
        """The state of the calling thread."""
        on_gpu = gpu_in_use()
        return cls(
            device=torch.cuda.current_device() if on_gpu else None,
            stream=torch.cuda.current_stream() if on_gpu else None,
            function_modes=tuple(overrides._get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in (("cpu", "cuda") if on_gpu else ("cpu",))
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Work in this state on the calling thread.

        The autograd engine's own device threads are turned off: a backward must run on the
        nanobatch's thread, or its collectives would come from a thread that both nanobatches share.
        """
        with contextlib.ExitStack() as stack:
            if self.device is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
                    )
            for mode in self.function_modes:
                # Not `with mode`: entering again may have effects of its own.
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(overrides._pop_mode)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield
