"""Instructions and schedules: what every stage of a pipeline executes, and in which order.

A schedule is data: for every stage (pipeline rank) the ordered instructions, and the order in which
activations pass through the model chunks. Dependencies follow from both and need not be stored.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from kareus_pp._files import read_document, write_document
from kareus_pp.errors import FormatError, ScheduleError

FORMAT_VERSION = 1


class Kind(str, enum.Enum):
    """What an instruction does; the value is its letter in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    LOAD = "L"
    OPTIMIZER = "O"

    @property
    def is_fixed(self) -> bool:
        """True for instructions whose cost no setting changes: data load, optimizer step."""
        return self in (Kind.LOAD, Kind.OPTIMIZER)

    @property
    def word(self) -> str:
        """The kind in words, as in messages and CSV files: `forward`, `input-gradient`."""
        return self.name.lower().replace("_", "-")


_INSTRUCTION = re.compile(r"(\d+)([FBIWLO])(\d+)(?:\.(\d+))?\Z")
_CLASS = re.compile(r"(\d+)([FBIWLO])(?:\.(\d+))?(\+comm)?(?:@(.+))?\Z")


class Instruction(NamedTuple):
    """One forward, backward, input-gradient or weight-gradient of one microbatch.

    Text form as torch's `_Action`, with the chunk after a dot where it is not 0: `2F0`, `2B0.1`.
    """

    stage: int
    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        return f"{text}.{self.chunk}" if self.chunk else text

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Read the text form.

        Raises:
            FormatError: The text is not an instruction.
        """
        match = _INSTRUCTION.match(text)
        if match is None:
            raise FormatError(
                f"{text!r} is not an instruction; write stage, kind (F, B, I, W, L or O), "
                f"microbatch and, after a dot, the chunk, as in '2F0' or '2B0.1'"
            )
        stage, kind, microbatch, chunk = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch), int(chunk or 0))


class InstructionClass(NamedTuple):
    """Instructions that cost the same.

    Text form: `2F`, `2B.1` (chunk 1), `2B+comm` (gradient or parameter communication rides along),
    `2F@4x1024` (shape).
    """

    stage: int
    kind: Kind
    chunk: int = 0
    communicates: bool = False
    shape: str = ""

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}"
        text += f".{self.chunk}" if self.chunk else ""
        text += "+comm" if self.communicates else ""
        return f"{text}@{self.shape}" if self.shape else text

    @classmethod
    def parse(cls, text: str) -> InstructionClass:
        """Read the text form.

        Raises:
            FormatError: The text is not an instruction class.
        """
        match = _CLASS.match(text)
        if match is None:
            raise FormatError(
                f"{text!r} is not an instruction class; write stage and kind, as in '2F', "
                f"'2B.1' or '2B+comm@4x1024'"
            )
        stage, kind, chunk, communicates, shape = match.groups()
        return cls(int(stage), Kind(kind), int(chunk or 0), bool(communicates), shape or "")


class Edge(NamedTuple):
    """`after` may start when `before` has ended, plus the p2p latency where they cross stages."""

    before: int
    after: int
    crosses_stages: bool


Wait = tuple[Instruction, Instruction]
"""The second starts only when the first, of another stage, has ended."""


@dataclass(frozen=True)
class Schedule:
    """The ordered instructions of every stage of one iteration.

    Attributes:
        order: For each stage its instructions in execution order.
        model_order: `(stage, chunk)` in the order in which activations pass through the model; its
            length is stages x chunks. Looped interleaving: chunk-major; V-shaped: there and back.
        name: How it came to be: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `recorded`, ...
        shape: Shape of a microbatch as text; profiles are keyed by it.
        communicating: Instructions during which gradients or parameters are communicated.
        waits: Dependencies between stages that carry no data: a stage that exchanges messages
            blockingly waits for its neighbours, see `kareus_pp.exchanges`.
    """

    order: tuple[tuple[Instruction, ...], ...]
    model_order: tuple[tuple[int, int], ...]
    name: str = "recorded"
    shape: str = ""
    communicating: frozenset[Instruction] = field(default=frozenset())
    waits: frozenset[Wait] = field(default=frozenset())

    @property
    def stages(self) -> int:
        """Number of stages (pipeline ranks)."""
        return len(self.order)

    @property
    def chunks(self) -> int:
        """Number of model chunks on a stage."""
        return max(1, len(self.model_order) // max(1, self.stages))

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches of an iteration."""
        return 1 + max((i.microbatch for i in self.instructions), default=-1)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions, stage by stage; their positions are the node numbers of `edges`."""
        return tuple(instruction for row in self.order for instruction in row)

    @cached_property
    def index(self) -> Mapping[Instruction, int]:
        """Node number of every instruction."""
        return {instruction: number for number, instruction in enumerate(self.instructions)}

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """Stage of every node."""
        return tuple(stage for stage, row in enumerate(self.order) for _ in row)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Program order of every stage, data dependencies between instructions, and waits.

        A forward waits for the forward of the preceding chunk in the model, a backward or
        input-gradient for that of the following chunk and for its own forward, a weight-gradient
        for its own input-gradient. Load and optimizer step are ordered by their stage alone.
        """
        found: dict[tuple[int, int], Edge] = {}
        for before, after in self._dependencies():
            a, b = self.index[before], self.index[after]
            found[a, b] = Edge(a, b, before.stage != after.stage)
        return tuple(found.values())

    def _dependencies(self) -> Iterable[tuple[Instruction, Instruction]]:
        for row in self.order:
            yield from pairwise(row)
        place = {where: position for position, where in enumerate(self.model_order)}
        for instruction in self.instructions:
            for producer in self._producers(
                instruction, place[instruction.stage, instruction.chunk]
            ):
                yield producer, instruction
        yield from sorted(self.waits)

    def _producers(self, instruction: Instruction, place: int) -> Iterable[Instruction]:
        def at(position: int, *kinds: Kind) -> Iterable[Instruction]:
            if 0 <= position < len(self.model_order):
                stage, chunk = self.model_order[position]
                for kind in kinds:
                    wanted = Instruction(stage, kind, instruction.microbatch, chunk)
                    if wanted in self.index:
                        yield wanted

        if instruction.kind is Kind.FORWARD:
            yield from at(place - 1, Kind.FORWARD)
        elif instruction.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            yield from at(place, Kind.FORWARD)
            yield from at(place + 1, Kind.BACKWARD, Kind.INPUT_GRADIENT)
        elif instruction.kind is Kind.WEIGHT_GRADIENT:
            yield from at(place, Kind.INPUT_GRADIENT)

    def class_of(self, instruction: Instruction) -> InstructionClass:
        """The instruction class that an instruction's cost is looked up by."""
        return InstructionClass(
            instruction.stage,
            instruction.kind,
            instruction.chunk,
            instruction in self.communicating,
            self.shape,
        )

    @cached_property
    def classes(self) -> tuple[InstructionClass, ...]:
        """The instruction classes that occur, in order of first appearance."""
        return tuple(dict.fromkeys(self.class_of(i) for i in self.instructions))

    @cached_property
    def signature(self) -> str:
        """A stable hash of order, model order and waits.

        How the schedule came to be does not count: a recorded and a built schedule of the same
        kind have the same signature.
        """
        parts = [" ".join(map(str, row)) for row in self.order]
        parts.append(" ".join(f"{stage}.{chunk}" for stage, chunk in self.model_order))
        if self.waits:
            parts.append(_wait_text(self.waits))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `from_dict` reads it back."""
        return {
            "name": self.name,
            "shape": self.shape,
            "model_order": [f"{stage}.{chunk}" for stage, chunk in self.model_order],
            "order": [" ".join(map(str, row)) for row in self.order],
            "communicating": " ".join(map(str, sorted(self.communicating))),
            **({"waits": _wait_text(self.waits)} if self.waits else {}),
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Schedule:
        """Read and validate the JSON form.

        Raises:
            FormatError: A part is missing or has the wrong type.
            ScheduleError: The schedule is inconsistent.
        """
        try:
            schedule = cls(
                order=tuple(
                    tuple(Instruction.parse(text) for text in row.split()) for row in body["order"]
                ),
                model_order=tuple(_parse_place(text) for text in body["model_order"]),
                name=str(body.get("name", "recorded")),
                shape=str(body.get("shape", "")),
                communicating=frozenset(
                    Instruction.parse(text) for text in body.get("communicating", "").split()
                ),
                waits=frozenset(_parse_wait(text) for text in body.get("waits", "").split()),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(
                f"the schedule has a missing or malformed part ({error}); it needs 'order' and "
                f"'model_order' as lists of text"
            ) from None
        validate_schedule(schedule)
        return schedule

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule to a file, atomically."""
        write_document(path, "schedule", FORMAT_VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a schedule file; raises as `from_dict`, and `FormatError` for the envelope."""
        return cls.from_dict(read_document(path, "schedule", FORMAT_VERSION))


def _parse_place(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None:
        raise FormatError(
            f"{text!r} is not a place in the model order; write stage and chunk, as in '2.0'"
        )
    return int(match[1]), int(match[2])


def _wait_text(waits: Iterable[Wait]) -> str:
    return " ".join(f"{before}>{after}" for before, after in sorted(waits))


def _parse_wait(text: str) -> Wait:
    before, arrow, after = text.partition(">")
    if not arrow:
        raise FormatError(f"{text!r} is not a wait; write two instructions, as in '1B0>0F3'")
    return Instruction.parse(before), Instruction.parse(after)


def looped_model_order(stages: int, chunks: int = 1) -> tuple[tuple[int, int], ...]:
    """Model order of plain and looped-interleaved pipelines: chunk by chunk through all stages."""
    return tuple((stage, chunk) for chunk in range(chunks) for stage in range(stages))


def validate_schedule(schedule: Schedule) -> None:
    """Check that a schedule is complete and can be executed.

    Raises:
        ScheduleError: Naming stage, step and microbatch of the first fault: an instruction of
            another stage or chunk, a duplicate, a backward before or without its forward, a
            weight-gradient without its input-gradient, a wait for an instruction that is not
            there, or a deadlock.
    """
    if not schedule.order or not schedule.instructions:
        raise ScheduleError("the schedule is empty; record at least one training step")
    places = set(schedule.model_order)
    seen: dict[Instruction, int] = {}
    for stage, row in enumerate(schedule.order):
        for step, instruction in enumerate(row):
            where = (
                f"stage {stage}, step {step}, microbatch {instruction.microbatch} ({instruction})"
            )
            if instruction.stage != stage:
                raise ScheduleError(f"{where}: belongs to stage {instruction.stage}")
            if (stage, instruction.chunk) not in places:
                raise ScheduleError(f"{where}: chunk {instruction.chunk} is not in the model order")
            if instruction in seen:
                raise ScheduleError(f"{where}: already executed at step {seen[instruction]}")
            needed = _NEEDS.get(instruction.kind)
            if needed is not None and instruction._replace(kind=needed) not in seen:
                raise ScheduleError(f"{where}: its {needed.word} has not been executed before it")
            seen[instruction] = step
    for wait in schedule.waits:
        missing = [instruction for instruction in wait if instruction not in seen]
        if missing or wait[0].stage == wait[1].stage:
            raise ScheduleError(
                f"the wait {wait[0]}>{wait[1]}: "
                + (f"{missing[0]} is not executed" if missing else "both are of the same stage")
            )
    topological_order(schedule)


_NEEDS = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.INPUT_GRADIENT: Kind.FORWARD,
    Kind.WEIGHT_GRADIENT: Kind.INPUT_GRADIENT,
}


def topological_order(schedule: Schedule) -> tuple[int, ...]:
    """Node numbers so that every instruction comes after those it depends on.

    Raises:
        ScheduleError: Stages wait for each other; names the first instruction that can never start.
    """
    count = len(schedule.instructions)
    waiting = [0] * count
    followers: list[list[int]] = [[] for _ in range(count)]
    for edge in schedule.edges:
        waiting[edge.after] += 1
        followers[edge.before].append(edge.after)
    ready = [node for node in range(count) if waiting[node] == 0]
    order: list[int] = []
    for node in ready:
        order.append(node)
        for follower in followers[node]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    if len(order) < count:
        stuck = next(node for node in range(count) if waiting[node])
        instruction = schedule.instructions[stuck]
        step = schedule.order[instruction.stage].index(instruction)
        raise ScheduleError(
            f"stage {instruction.stage}, step {step}, microbatch {instruction.microbatch} "
            f"({instruction}): can never start, the stages wait for each other"
        )
    return tuple(order)
