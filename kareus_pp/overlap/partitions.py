"""Partitions: what a block computes between two collectives, and where a launch fits in.

A partition is the compute from one tensor-parallel collective to the next. While one nanobatch
executes it, the pending collective of the other one is launched at one of its launch slots: slot 0
is its beginning, the others are submodule boundaries, in the order in which they are reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kareus_pp.errors import OverlapError
from kareus_pp.setting import SEQUENTIAL, Launch, OverlapSetting

ENTRY = "entry"


class Slot(NamedTuple):
    """A launch slot of a partition.

    Attributes:
        number: Number within the partition, from 0.
        name: Submodule before which it lies, relative to the layer, with `f:` where the submodule
            is passed forwards and `b:` where backwards; `entry` for slot 0.
        operations: Operations from here to the next slot, as named by torch's dispatcher.
    """

    number: int
    name: str
    operations: tuple[str, ...]


@dataclass(frozen=True)
class Partition:
    """One partition kind of a block.

    Attributes:
        kind: Name that a setting's launches use: `attention`, `mlp`, `norm`, ...
        phase: `forward` or `backward`.
        slots: Launch slots in order.
        collective: Collective that ends it: `all-reduce`, `all-gather` or `reduce-scatter`.
        bytes: Bytes of the collective for a whole microbatch; each nanobatch sends its share.
        count: How many such partitions a microbatch has in this phase.
    """

    kind: str
    phase: str
    slots: tuple[Slot, ...]
    collective: str
    bytes: int
    count: int

    @property
    def operations(self) -> tuple[str, ...]:
        """All operations in order."""
        return tuple(name for slot in self.slots for name in slot.operations)


@dataclass
class Segment:
    """What was observed between two collectives, before it is named.

    Attributes:
        boundaries: Boundary events in order, each with the operations that follow it; the first is
            the entry.
        collective: Collective that ended it; empty after the last one.
        bytes: Its bytes.
    """

    boundaries: list[tuple[str, list[str]]]
    collective: str = ""
    bytes: int = 0

    @property
    def slots(self) -> list[tuple[str, list[str]]]:
        """Boundaries that differ: those with no operation before the next one fall away."""
        entry, *others = self.boundaries
        return [entry, *(b for b in others if b[1])]

    @property
    def operations(self) -> list[str]:
        """All operations in order."""
        return [name for _, names in self.boundaries for name in names]


@dataclass(frozen=True)
class Program:
    """The partitions that every nanobatch executes in one phase of one block, in order.

    Attributes:
        phase: `forward` or `backward`.
        partitions: The partition kinds.
        sequence: Kind of every partition in execution order.
        events: For every partition in execution order the boundary event of each slot.
    """

    phase: str
    partitions: tuple[Partition, ...]
    sequence: tuple[str, ...]
    events: tuple[dict[int, str], ...]

    def kind_at(self, position: int) -> str | None:
        """Kind of the partition at a position; None past the last collective."""
        return self.sequence[position] if position < len(self.sequence) else None

    def event_at(self, position: int, slot: int) -> str | None:
        """Boundary event of a slot of the partition at a position."""
        return self.events[position].get(slot)

    def partition(self, kind: str) -> Partition | None:
        """The partition kind of a name."""
        return next((p for p in self.partitions if p.kind == kind), None)

    def check(self, setting: OverlapSetting) -> None:
        """Check that every launch of a setting names a partition and slot of this program.

        Raises:
            OverlapError: It does not; the message names what there is.
        """
        for launch in setting.launches:
            partition = self.partition(launch.partition)
            if partition is None:
                raise OverlapError(
                    f"the overlap setting '{setting}' names the partition {launch.partition!r}, "
                    f"which the {self.phase} of this block does not have; it has "
                    f"{', '.join(p.kind for p in self.partitions) or 'none'}"
                )
            if launch.slot >= len(partition.slots):
                raise OverlapError(
                    f"the overlap setting '{setting}' names slot {launch.slot} of the partition "
                    f"{launch.partition!r}; its {self.phase} has slots 0 to "
                    f"{len(partition.slots) - 1} "
                    f"({', '.join(slot.name for slot in partition.slots)})"
                )


def build_program(phase: str, segments: Sequence[Segment]) -> Program:
    """Name the partitions of observed segments and number their slots.

    Segments are of one kind where they compute the same sort of thing, end with the same collective
    and pass the same submodule last, numbers in the modules' names apart: the layers of a block
    share their partitions.
    """
    complete = [segment for segment in segments if segment.collective]
    kinds = [_Kind.of(phase, segment) for segment in complete]
    members: dict[_Kind, list[Segment]] = {}
    for kind, segment in zip(kinds, complete, strict=True):
        members.setdefault(kind, []).append(segment)
    names = _unique_names(members)
    slots = {kind: _all_slots(group) for kind, group in members.items()}
    return Program(
        phase=phase,
        partitions=tuple(
            Partition(
                kind=names[kind],
                phase=phase,
                slots=slots[kind],
                collective=kind.collective,
                bytes=max(segment.bytes for segment in group),
                count=len(group),
            )
            for kind, group in members.items()
        ),
        sequence=tuple(names[kind] for kind in kinds),
        events=tuple(
            _slot_events(slots[kind], segment)
            for kind, segment in zip(kinds, complete, strict=True)
        ),
    )


def candidate_settings(
    partitions: Iterable[Partition], levels: Sequence[int] = (0,)
) -> tuple[OverlapSetting, ...]:
    """The settings to measure one against the other; the first is always not to split.

    Every one names one partition, one of its slots and a number of SMs: partitions overlap one
    after the other, so that their best choices compose. Measure each as a whole, the collective
    together with the compute it overlaps and at the clock it is to run at.

    Args:
        partitions: Partitions of one phase.
        levels: Numbers of SMs of the communicators.
    """
    return (
        SEQUENTIAL,
        *(
            OverlapSetting((Launch(partition.kind, slot.number, sms),))
            for partition in partitions
            for slot in partition.slots
            for sms in levels
        ),
    )


def relative_name(event: str) -> str:
    """The name of a boundary without its phase and without the layer it lies in.

    `f:layers.3.mlp.linear_fc1` becomes `mlp.linear_fc1`, and `f:layers.3` becomes `layers`.
    """
    parts = event.partition(":")[2].split(".")
    last_number = max((i for i, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[last_number + 1 :] or parts[:-1]) or "layer"


class _Kind(NamedTuple):
    """What makes two segments the same partition kind."""

    word: str
    collective: str
    last_boundary: str

    @classmethod
    def of(cls, phase: str, segment: Segment) -> _Kind:
        last = segment.slots[-1][0]
        word = _describe(segment.operations)
        if phase == "backward" and last.startswith("f:"):
            # Forward hooks that fire within a backward: activations are computed again.
            word = f"recompute-{word}"
        return cls(word, segment.collective, _slot_name(last))


_ATTENTION = ("_softmax", "attention", "attn")
_MATMUL = ("mm", "bmm", "baddbmm", "addmm", "matmul", "linear", "convolution")


def _describe(operations: Iterable[str]) -> str:
    """Name a partition after what it computes."""
    names = [name.split(".")[0] for name in operations if "log_softmax" not in name]
    if any(word in name for name in names for word in _ATTENTION):
        return "attention"
    if any(name.strip("_") in _MATMUL for name in names):
        return "mlp"
    if any("norm" in name for name in names):
        return "norm"
    return "pointwise"


def _unique_names(kinds: Iterable[_Kind]) -> dict[_Kind, str]:
    names: dict[_Kind, str] = {}
    used: Counter[str] = Counter()
    for kind in kinds:
        used[kind.word] += 1
        names[kind] = kind.word if used[kind.word] == 1 else f"{kind.word}-{used[kind.word]}"
    return names


def _slot_name(event: str) -> str:
    # The same module can be passed forwards (recompute) and backwards in one partition.
    return event if event == ENTRY else f"{event[0]}:{relative_name(event)}"


def _all_slots(segments: Sequence[Segment]) -> tuple[Slot, ...]:
    """The slots of the segment that has most; the first layer of a block may lack some."""
    fullest = max(segments, key=lambda segment: (len(segment.slots), len(segment.operations)))
    return tuple(
        Slot(number, _slot_name(event), tuple(operations))
        for number, (event, operations) in enumerate(fullest.slots)
    )


def _slot_events(slots: tuple[Slot, ...], segment: Segment) -> dict[int, str]:
    """The boundary of every slot; for one that the segment lacks, that of the next one it has."""
    events: dict[str, str] = {}
    for event, _ in segment.slots:
        events.setdefault(_slot_name(event), event)
    found: dict[int, str] = {}
    following: str | None = None
    for slot in reversed(slots):
        following = events.get(slot.name, following)
        if following is not None:
            found[slot.number] = following
    return found
