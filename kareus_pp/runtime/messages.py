"""What ranks tell each other through the store, as JSON text."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from kareus_pp.errors import FormatError

OBSERVE, PROFILE, APPLY, STOPPED = "observe", "profile", "apply", "stopped"
DOWN_KEY = "down"
"""Key of the store under which a rank says that it stands down, and why."""


@dataclass(frozen=True)
class Stream:
    """What one rank executed in its observed steps, and on which device.

    Attributes:
        rank: Global rank.
        stage: Its stage.
        instructions: Text forms in execution order, separated by spaces.
        communicating: Text forms of those during which gradients or parameters were communicated.
        clocks_mhz: Supported clocks of its device.
        ceiling_mhz: Clock that its power limit left under load at default clocks; None where it
            was not limited. Clocks between it and the highest one cannot be held.
        device: Name of its device.
        source: Source of its energy readings.
        scope: Scope of its energy readings.
        exchanges: Text forms of its exchanges with other stages, separated by spaces.
        overlaps: Overlap settings that it can be asked to try, each a forward's and a backward's.
    """

    rank: int
    stage: int
    instructions: str
    communicating: str
    clocks_mhz: tuple[int, ...]
    ceiling_mhz: int | None
    device: str
    source: str
    scope: str
    exchanges: str = ""
    overlaps: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Assignment:
    """What all ranks do from a named step on, until a later assignment for the same key.

    Attributes:
        number: Position in the sequence of assignments, from 0.
        phase: `profile`, `apply` or `stopped`.
        key: Which steps it is for: number of microbatches and shape, see `step_key`.
        name: Name of the plan, as in events.
        first_step: First step that it holds for.
        settings: For each stage the text forms of the settings, separated by spaces.
        report_every: Ranks report the steps whose number this divides; 0 for none.
        time_s: Predicted iteration time; None where unknown.
        energy_j: Predicted energy of an iteration over all stages; None where unknown.
        reason: Why the ranks stand down; empty otherwise.
    """

    number: int
    phase: str
    key: str
    name: str
    first_step: int
    settings: tuple[str, ...]
    report_every: int = 1
    time_s: float | None = None
    energy_j: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Record:
    """One step as one rank saw it.

    Attributes:
        rank: Global rank.
        step: Number of the step.
        assignment: Number of the assignment it ran under, -1 for none.
        window_s: Wall-clock time from step begin to step end.
        duration_s: Duration of every instruction in execution order.
        energy_j: Energy of the rank's GPU over the step; None where not read.
        energy_sd_j: Its standard deviation; None where unknown.
        temperature_c: Mean GPU temperature; None where not read.
        rejected: Why the step must not be used for learning; empty where it may.
    """

    rank: int
    step: int
    assignment: int
    window_s: float
    duration_s: tuple[float, ...]
    energy_j: float | None = None
    energy_sd_j: float | None = None
    temperature_c: float | None = None
    rejected: str = ""


MessageT = TypeVar("MessageT", Stream, Assignment, Record)


def step_key(microbatches: int, shape: str) -> str:
    """The key by which plans are chosen at a step boundary."""
    return f"{microbatches}:{shape}"


def encode(message: Stream | Assignment | Record) -> str:
    """The text of a message."""
    return json.dumps(dataclasses.asdict(message))


def decode(kind: type[MessageT], text: str) -> MessageT:
    """Read the text of a message; raises `FormatError` where it is not one."""
    try:
        values: Any = json.loads(text)
        message: MessageT = TypeAdapter(kind).validate_python(values)
    except (ValueError, ValidationError) as error:
        raise FormatError(
            f"malformed {kind.__name__.lower()} message from a rank: {error}"
        ) from None
    return message
