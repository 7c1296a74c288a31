"""Observation: a block runs once, whole, and what it does is written down.

Nothing is known about the block beforehand. Its submodule boundaries, the operations that torch
dispatches, and the collectives it waits for give its partitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kareus_pp.overlap.interception import Collective
from kareus_pp.overlap.partitions import ENTRY, Program, Segment, build_program

# Operations that compute nothing; a view is known by its schema.
_NO_COMPUTE = ("empty", "detach", "_unsafe_view", "alias", "lift_fresh", "_has_compatible")


class Recorder:
    """Writes down the boundaries, operations and collectives of one phase of one block."""

    def __init__(self) -> None:
        self._segments = [Segment([(ENTRY, [])])]

    def on_boundary(self, event: str) -> None:
        """A submodule boundary is reached."""
        self._segments[-1].boundaries.append((event, []))

    def on_operation(self, name: str) -> None:
        """An operation is dispatched."""
        self._segments[-1].boundaries[-1][1].append(name)

    def on_collective(self, collective: Collective) -> None:
        """A collective is needed; the next partition begins."""
        segment = self._segments[-1]
        segment.collective, segment.bytes = collective.word, collective.bytes
        self._segments.append(Segment([(ENTRY, [])]))

    def program(self, phase: str) -> Program:
        """The partitions of what was written down."""
        return build_program(phase, self._segments)

    @contextlib.contextmanager
    def operations(self) -> Iterator[None]:
        """Write down the operations of the calling thread."""
        with _Operations(self):
            yield


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            # The call carries objects that only the backend understands.
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        name = func.__name__
        if not func.is_view and not name.startswith(_NO_COMPUTE):
            self._recorder.on_operation(name)
        return func(*args, **(kwargs or {}))
