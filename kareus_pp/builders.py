"""Schedules built without a run, by name."""

from __future__ import annotations

from collections.abc import Callable

from kareus_pp.errors import ScheduleError
from kareus_pp.schedule import Instruction, Kind, Schedule, looped_model_order


def build_gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe (Huang et al., 2019): all forwards, then all backwards, in microbatch order."""
    order = tuple(
        tuple(
            Instruction(stage, kind, microbatch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for microbatch in range(microbatches)
        )
        for stage in range(stages)
    )
    return Schedule(order, looped_model_order(stages), name="gpipe")


def build_1f1b(stages: int, microbatches: int) -> Schedule:
    """Synchronous 1F1B (PipeDream-Flush, Narayanan et al., 2021): warm-up, then in turns."""
    order = []
    for stage in range(stages):
        warmup = min(stages - stage - 1, microbatches)
        row = [Instruction(stage, Kind.FORWARD, m) for m in range(warmup)]
        for m in range(microbatches - warmup):
            row.append(Instruction(stage, Kind.FORWARD, warmup + m))
            row.append(Instruction(stage, Kind.BACKWARD, m))
        row += [
            Instruction(stage, Kind.BACKWARD, m) for m in range(microbatches - warmup, microbatches)
        ]
        order.append(tuple(row))
    return Schedule(tuple(order), looped_model_order(stages), name="1f1b")


_BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda stages, microbatches, chunks: build_gpipe(stages, microbatches),
    "1f1b": lambda stages, microbatches, chunks: build_1f1b(stages, microbatches),
}
SCHEDULE_NAMES = tuple(_BUILDERS)


def build_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Build a schedule by its name, one of `SCHEDULE_NAMES`.

    Raises:
        ScheduleError: The name is unknown, or a number is below 1.
    """
    if name not in _BUILDERS:
        raise ScheduleError(f"unknown schedule {name!r}; use one of {', '.join(SCHEDULE_NAMES)}")
    for what, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise ScheduleError(f"{what} is {number} and must be at least 1")
    return _BUILDERS[name](stages, microbatches, chunks)
