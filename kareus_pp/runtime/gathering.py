"""What the leader reads from the store: schedules from streams, iterations from records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from kareus_pp.errors import ScheduleError
from kareus_pp.exchanges import Exchange, waits_of
from kareus_pp.measure.runs import IterationRecord
from kareus_pp.profile import Profile, Source
from kareus_pp.runtime.messages import Assignment, Record, Stream, decode
from kareus_pp.runtime.store import Store
from kareus_pp.runtime.topology import Topology
from kareus_pp.schedule import Instruction, Schedule, validate_schedule


@dataclass(frozen=True)
class Gathered:
    """A schedule as all ranks observed it, and the devices it ran on.

    Attributes:
        schedule: The schedule.
        clocks_mhz: Clocks that all devices support, ascending.
        device: Names of the devices.
        source: Source of their energy readings.
        scope: Scope of their energy readings.
        warning: Why the schedule lacks the waits of blocking exchanges; empty where it has them.
        overlaps: For every stage the overlap settings to try; none where its copies differ.
    """

    schedule: Schedule
    clocks_mhz: tuple[int, ...]
    device: str
    source: Source
    scope: str
    warning: str = ""
    overlaps: tuple[tuple[tuple[str, str], ...], ...] = ()


def gather_schedule(store: Store, topology: Topology, key: str) -> Gathered | None:
    """Build the schedule from the streams of all ranks; None while one is missing.

    Raises:
        ScheduleError: Copies of a stage executed different instructions, energy sources differ, or
            the schedule is inconsistent.
    """
    streams = []
    for rank in range(topology.world_size):
        text = store.get(f"stream/{key}/{rank}")
        if text is None:
            return None
        streams.append(decode(Stream, text))
    by_stage: dict[int, Stream] = {}
    for stream in streams:
        first = by_stage.setdefault(stream.stage, stream)
        if first.instructions != stream.instructions:
            raise ScheduleError(
                f"stage {stream.stage}: ranks {first.rank} and {stream.rank} hold the same "
                f"stage and executed different instructions; kareus-pp needs them equal"
            )
        if stream.source != streams[0].source:
            raise ScheduleError(
                f"rank {stream.rank} reads energy from {stream.source} and rank 0 from "
                f"{streams[0].source}; sources must not be mixed, use one kind of device"
            )
    if len(by_stage) != topology.stages:
        raise ScheduleError(
            f"{len(by_stage)} of {topology.stages} stages reported; every rank needs kareus-pp"
        )
    rows = [by_stage[stage] for stage in range(topology.stages)]
    schedule = Schedule(
        order=tuple(_parse(row.instructions) for row in rows),
        model_order=topology.model_order,
        name="recorded",
        shape=key.partition(":")[2],
        communicating=frozenset(i for row in rows for i in _parse(row.communicating)),
    )
    validate_schedule(schedule)
    schedule, warning = _with_waits(schedule, rows)
    return Gathered(
        schedule=schedule,
        clocks_mhz=_usable_clocks(streams),
        device=", ".join(sorted({stream.device for stream in streams})),
        source=Source(streams[0].source),
        scope=streams[0].scope,
        warning=warning,
        overlaps=tuple(
            row.overlaps
            if all(s.overlaps == row.overlaps for s in streams if s.stage == row.stage)
            else ()
            for row in rows
        ),
    )


def _with_waits(schedule: Schedule, rows: list[Stream]) -> tuple[Schedule, str]:
    """The schedule with the waits of blocking exchanges, or why they are not known."""
    exchanges = [[Exchange.parse(text) for text in row.exchanges.split()] for row in rows]
    try:
        return replace(schedule, waits=waits_of(schedule, exchanges)), ""
    except ScheduleError as error:
        return schedule, f"how stages wait for each other's messages is not known ({error})"


def _usable_clocks(streams: list[Stream]) -> tuple[int, ...]:
    """Clocks that every device supports and can hold under load, and the highest one.

    The highest one stands for default clocks: as fast as the power limit lets the GPU run.
    """
    common = set(streams[0].clocks_mhz).intersection(*(s.clocks_mhz for s in streams[1:]))
    top = max(common, default=0)
    ceiling = min((s.ceiling_mhz for s in streams if s.ceiling_mhz is not None), default=top)
    return tuple(mhz for mhz in sorted(common) if mhz <= ceiling or mhz == top)


def profile_misfit(profile: Profile, gathered: Gathered, fingerprint: Mapping[str, str]) -> str:
    """Why a profile is not one of this job, as the end of a sentence; empty where it is."""
    for name in sorted(profile.fingerprint.keys() & fingerprint.keys()):
        taken, here = profile.fingerprint[name], fingerprint[name]
        if taken != here:
            return f"was taken with {name} = {taken} and this job has {here}"
    missing = [str(c) for c in gathered.schedule.classes if c not in profile.options]
    if missing or profile.stages != gathered.schedule.stages:
        return (
            f"does not cover this job: it has {profile.stages} stages and no options for "
            f"{', '.join(missing[:4]) or 'some'}"
        )
    source = profile.device.source
    if source is not gathered.source:
        return f"has energies from {source.value} and this job reads {gathered.source.value}"
    return ""


def described(schedule: Schedule) -> str:
    """A schedule in the words of a message."""
    waits = f", {len(schedule.waits)} waits for messages" if schedule.waits else ""
    return (
        f"signature {schedule.signature} ({schedule.stages} stages, "
        f"{schedule.microbatches} microbatches{waits})"
    )


def gather_records(
    store: Store, topology: Topology, step: int, assignment: Assignment, schedule: Schedule
) -> IterationRecord | None:
    """One iteration from the records of all ranks; None while one is missing.

    Copies of a stage are averaged: energies are of one GPU.
    """
    records: list[list[Record]] = [[] for _ in range(topology.stages)]
    for rank in range(topology.world_size):
        text = store.get(f"record/{rank}/{step}")
        if text is None:
            return None
        records[_stage_of(rank, store, assignment.key)].append(decode(Record, text))
    for rank in range(topology.world_size):
        store.delete(f"record/{rank}/{step}")
    every = [record for row in records for record in row]
    rejected = next((record.rejected for record in every if record.rejected), "")
    if any(record.assignment != assignment.number for record in every):
        rejected = "not all ranks followed the assignment in this step"
    durations = []
    for row, order in zip(records, schedule.order, strict=True):
        if any(len(record.duration_s) != len(order) for record in row):
            rejected = rejected or "a rank executed other instructions than observed"
            durations.append((0.0,) * len(order))
        else:
            columns = zip(*(record.duration_s for record in row), strict=True)
            durations.append(tuple(fmean(column) for column in columns))
    return IterationRecord(
        iter_time_s=max(record.window_s for record in every),
        duration_s=tuple(durations),
        energy_j=tuple(_mean([record.energy_j for record in row]) for row in records),
        energy_sd_j=tuple(_mean([record.energy_sd_j for record in row]) for row in records),
        temperature_c=tuple(_mean([record.temperature_c for record in row]) for row in records),
        rejected=rejected,
    )


def _stage_of(rank: int, store: Store, key: str) -> int:
    text = store.get(f"stream/{key}/{rank}")
    assert text is not None, "records come after streams"
    return decode(Stream, text).stage


def _mean(values: list[float | None]) -> float | None:
    """The mean of the values; None where one is missing."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _parse(text: str) -> tuple[Instruction, ...]:
    return tuple(Instruction.parse(part) for part in text.split())
