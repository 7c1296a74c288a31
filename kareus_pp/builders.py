"""Schedules built without a run, by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from kareus_pp.errors import ScheduleError
from kareus_pp.exchanges import interleaved_exchanges, waits_of
from kareus_pp.schedule import Instruction, Kind, Schedule, looped_model_order

P2p = Literal["asynchronous", "overlapped", "blocking"]
P2P_MODES: tuple[P2p, ...] = get_args(P2p)


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


def build_interleaved(
    stages: int,
    microbatches: int,
    chunks: int,
    group: int | None = None,
    p2p: P2p = "asynchronous",
) -> Schedule:
    """Looped interleaved 1F1B (Narayanan et al., 2021), in the order of Megatron-Core and torch.

    Args:
        stages: Number of stages (pipeline ranks).
        microbatches: Microbatches of an iteration.
        chunks: Model chunks on a stage.
        group: Microbatches that run through one chunk before the next chunk has its turn
            (Megatron's `--microbatch-group-size-per-virtual-pipeline-stage`). None: the number of
            stages, or, where that does not divide the microbatches, rounds of equal length as
            torch makes them.
        p2p: Whether stages wait for their neighbours where they send and receive. `asynchronous`:
            never, as in torch. `overlapped`: in warm-up and cool-down, as in Megatron-Core with
            `--overlap-p2p-communication`. `blocking`: always, as in Megatron-Core without it.

    Raises:
        ScheduleError: The microbatches cannot be grouped so that every stage can proceed.
    """
    group = _group(stages, microbatches, chunks, group)
    order, exchanges = [], []
    for stage in range(stages):
        forwards, backwards = _turns(stage, microbatches, chunks, group, Kind.BACKWARD)
        warmup = min((chunks - 1) * group + 2 * (stages - stage - 1), len(forwards))
        order.append(_one_forward_one_backward(warmup, forwards, backwards))
        chunk_of = [i.chunk for i in forwards]
        exchanges.append(
            interleaved_exchanges(stage, stages, chunk_of, warmup, p2p == "overlapped")
        )
    schedule = Schedule(tuple(order), looped_model_order(stages, chunks), name="interleaved")
    if p2p == "asynchronous" or stages == 1 or chunks == 1:
        return schedule
    if group < stages:
        raise ScheduleError(
            f"{microbatches} microbatches on {stages} stages with {chunks} chunks are too few for "
            f"Megatron-Core, whose p2p mode {p2p} is asked for; use at least {stages}"
        )
    return replace(schedule, waits=waits_of(schedule, exchanges))


def build_zb_h1(
    stages: int, microbatches: int, chunks: int = 1, group: int | None = None
) -> Schedule:
    """Zero-bubble H1 (Qi et al., 2024, section 2.3): 1F1B with the backward split in two.

    Stage `s` puts its weight-gradients off by `s` microbatches, so that every stage holds as many
    microbatches as the first stage of 1F1B does, and fills its cool-down with them. More chunks
    than one give the interleaved form that torch calls ZB1P.

    Args:
        stages: Number of stages (pipeline ranks).
        microbatches: Microbatches of an iteration.
        chunks: Model chunks on a stage.
        group: As for `build_interleaved`.

    Raises:
        ScheduleError: As for `build_interleaved`.
    """
    group = _group(stages, microbatches, chunks, group)
    order = []
    for stage in range(stages):
        warmup = (chunks - 1) * group + stages - stage - 1
        forwards, backwards = _turns(stage, microbatches, chunks, group, Kind.INPUT_GRADIENT)
        row = _one_forward_one_backward(warmup, forwards, backwards)
        order.append(_with_weight_gradients(row, delay=stage))
    return Schedule(tuple(order), looped_model_order(stages, chunks), name="zb-h1")


def _group(stages: int, microbatches: int, chunks: int, group: int | None) -> int:
    """Microbatches in a turn of one chunk; checked, and chosen where not given."""
    if chunks == 1:
        return microbatches
    if group is None:
        rounds = max(1, microbatches // stages)
        if microbatches % rounds:
            raise ScheduleError(
                f"{microbatches} microbatches on {stages} stages with {chunks} chunks cannot be "
                f"split into rounds of equal length of at least {stages}; use a multiple of "
                f"{stages} microbatches"
            )
        return microbatches // rounds
    rest = microbatches % group if group > 0 else 0
    if not stages <= group <= microbatches or 0 < rest < stages:
        raise ScheduleError(
            f"a group of {group} of {microbatches} microbatches on {stages} stages stalls the "
            f"pipeline; use {stages} to {microbatches}, with a rest of 0 or at least {stages}"
        )
    return group


def _turns(
    stage: int, microbatches: int, chunks: int, group: int, backward: Kind
) -> tuple[list[Instruction], list[Instruction]]:
    """All forwards of a stage in order, and all backwards, which take the chunks from the last."""
    places = [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]
    return (
        [Instruction(stage, Kind.FORWARD, microbatch, chunk) for microbatch, chunk in places],
        [Instruction(stage, backward, microbatch, chunks - 1 - c) for microbatch, c in places],
    )


def _one_forward_one_backward(
    warmup: int, forwards: list[Instruction], backwards: list[Instruction]
) -> tuple[Instruction, ...]:
    """`warmup` forwards, then forwards and backwards in turns, then the backwards left over."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    row = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards, strict=False):
        row += pair
    return (*row, *backwards[steady:])


def _with_weight_gradients(row: tuple[Instruction, ...], delay: int) -> tuple[Instruction, ...]:
    """The row with a weight-gradient after every input-gradient, `delay` of them later."""
    result: list[Instruction] = []
    waiting: deque[Instruction] = deque()
    for instruction in row:
        result.append(instruction)
        if instruction.kind is Kind.INPUT_GRADIENT:
            waiting.append(instruction._replace(kind=Kind.WEIGHT_GRADIENT))
            if len(waiting) > delay:
                result.append(waiting.popleft())
    return (*result, *waiting)


class _Builder(NamedTuple):
    build: Callable[..., Schedule]
    takes_chunks: bool = False
    takes_p2p: bool = False


_BUILDERS: dict[str, _Builder] = {
    "gpipe": _Builder(build_gpipe),
    "1f1b": _Builder(build_1f1b),
    "interleaved": _Builder(build_interleaved, takes_chunks=True, takes_p2p=True),
    "zb-h1": _Builder(build_zb_h1, takes_chunks=True),
}
SCHEDULE_NAMES = tuple(_BUILDERS)


def build_schedule(
    name: str, stages: int, microbatches: int, chunks: int = 1, p2p: str = "asynchronous"
) -> Schedule:
    """Build a schedule by its name, one of `SCHEDULE_NAMES`.

    Args:
        name: The name.
        stages: Number of stages (pipeline ranks).
        microbatches: Microbatches of an iteration.
        chunks: Model chunks on a stage.
        p2p: One of `P2P_MODES`, see `build_interleaved`.

    Raises:
        ScheduleError: The name or the mode is unknown, a number is below 1, or the schedule does
            not exist for these values.
    """
    if name not in _BUILDERS:
        raise ScheduleError(f"unknown schedule {name!r}; use one of {', '.join(SCHEDULE_NAMES)}")
    for what, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise ScheduleError(f"{what} is {number} and must be at least 1")
    if p2p not in P2P_MODES:
        raise ScheduleError(f"unknown p2p mode {p2p!r}; use one of {', '.join(P2P_MODES)}")
    builder = _BUILDERS[name]
    options: dict[str, int | str] = {}
    if builder.takes_chunks:
        options["chunks"] = chunks
    elif chunks > 1:
        chunked = " or ".join(n for n, other in _BUILDERS.items() if other.takes_chunks)
        raise ScheduleError(
            f"{name} has one chunk on a stage and {chunks} are asked for; use {chunked}"
        )
    if builder.takes_p2p:
        options["p2p"] = p2p
    elif p2p != "asynchronous":
        waiting = " or ".join(n for n, other in _BUILDERS.items() if other.takes_p2p)
        raise ScheduleError(
            f"{name} is planned without waits for messages (p2p mode asynchronous) and "
            f"{p2p} is asked for; use {waiting}, or leave the mode out"
        )
    return builder.build(stages, microbatches, **options)
