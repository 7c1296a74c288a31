"""One run of the nanobatches: what is executed how, and who takes part in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed import ProcessGroup

from kareus_pp.overlap.interception import Collective
from kareus_pp.overlap.partitions import Program
from kareus_pp.setting import OverlapSetting

FORWARD, BACKWARD = "forward", "backward"
"""The phases."""
Task = Callable[[], Any]


class Swap(Protocol):
    """State of the process that each nanobatch must see as its own."""

    def start(self, phase: str) -> None:
        """A forward or backward of two nanobatches begins; nanobatch 0 runs first."""
        ...

    def leave(self, nanobatch: int) -> None:
        """Keep the state of a nanobatch that stops running."""
        ...

    def enter(self, nanobatch: int) -> None:
        """Install the state of a nanobatch that goes on running."""
        ...

    def finish(self, phase: str) -> None:
        """Install the state with which the caller goes on."""
        ...


class Listener(Protocol):
    """Who is told what a nanobatch does, while a block is observed."""

    def on_boundary(self, event: str) -> None:
        """A submodule boundary is reached."""
        ...

    def on_collective(self, collective: Collective) -> None:
        """A collective is needed here."""
        ...


@dataclass(frozen=True)
class Run:
    """How the nanobatches of one forward or backward are executed.

    Attributes:
        phase: `forward` or `backward`.
        groups: Process groups whose collectives are deferred.
        program: The partitions in the order in which every nanobatch executes them.
        setting: Launch slots and SMs; sequential: one nanobatch after the other, no overlap.
        select: Gives the communicator of a group for a number of SMs.
        launches: Counts launches by (phase, partition kind, slot); slot -1 is the end of the
            partition, where a collective goes that no slot launched.
        listener: Told of boundaries and collectives; makes the run an observation.
    """

    phase: str
    groups: Collection[ProcessGroup]
    program: Program | None
    setting: OverlapSetting
    select: Callable[[ProcessGroup, int], ProcessGroup]
    launches: Counter[tuple[str, str, int]]
    listener: Listener | None = None

    @property
    def overlaps(self) -> bool:
        """True where nanobatches alternate."""
        return self.listener is None and not self.setting.is_sequential
