"""A recording stand-in for the session of one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from kareus_pp.exchanges import Exchange
from kareus_pp.schedule import Instruction, Kind


class Recorder:
    """Has the session's calls and notes them."""

    observes = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[list[str]] = []
        self.exchanges: list[str] = []
        self.topology: Any = None
        self.fingerprint: dict[str, str] = {}
        self._stage = 0
        self._open: str | None = None

    @contextlib.contextmanager
    def hooked(self, adapter: Any, config: Any = None) -> Iterator[Recorder]:
        """Attach an adapter of process-wide hooks, with this recorder for its session."""
        with mock.patch.object(adapter, "start_session", self.start):
            adapter.attach(config or {})
            try:
                yield self
            finally:
                adapter.detach()

    def start(self, config: Any, topology: Any, fingerprint: Any, *_: Any, **__: Any) -> Recorder:
        """Stands in for `start_session`."""
        self.fingerprint = dict(fingerprint)
        self.topology = {
            name: getattr(topology, name)
            for name in ("stage", "stages", "model_order", "replica", "replicas", "rank")
        }
        self._stage = topology.stage
        return self

    def stream(self, step: int = 0) -> list[str]:
        """The instructions of a step, in order."""
        return [text.removesuffix("+comm") for text in self.steps[step]]

    def step_begin(self, microbatches: int, shape: str = "") -> None:
        self.calls.append(f"step_begin {microbatches} {shape}".strip())
        self.steps.append([])
        self.exchanges = []

    def instruction_begin(
        self, kind: Kind, microbatch: int, chunk: int = 0, communicates: bool = False
    ) -> None:
        assert self._open is None, f"{self._open} has not ended"
        self._open = str(Instruction(self._stage, kind, microbatch, chunk))
        self.steps[-1].append(self._open + ("+comm" if communicates else ""))

    def instruction_end(self) -> None:
        assert self._open is not None
        self._open = None

    def exchange(self, messages: str, blocking: bool = True) -> None:
        self.exchanges.append(str(Exchange(len(self.steps[-1]), messages, blocking)))

    def step_end(self) -> None:
        assert self._open is None
        self.calls.append("step_end")

    def step_abort(self) -> None:
        self._open = None
        self.calls.append("step_abort")

    def suspend(self, reason: str) -> None:
        self.calls.append(f"suspend {reason}")

    def resume(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        self.calls.append("close")
