"""The runs file: JSON, plain or gzipped; see docs/runs-format.md.

Two forms are read. The short one lists clocks and durations of forwards and backwards by
microbatch, on the synchronous 1F1B schedule. The full one carries a schedule and lists settings and
durations in its order, for each iteration; it is what the runtime records.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt

from kareus_pp._files import validated, write_text
from kareus_pp.builders import build_1f1b
from kareus_pp.errors import FormatError
from kareus_pp.measure.runs import IterationRecord, PlanRun, Runs, validate_runs
from kareus_pp.profile import Source
from kareus_pp.schedule import Kind, Schedule
from kareus_pp.setting import Setting

FORMAT = "kareus-pp/runs"
FORMAT_VERSION = 1
_FACTS = ("model", "gpu", "microbatch_size")


def load_runs(path: str | os.PathLike[str]) -> Runs:
    """Read a runs file.

    Raises:
        FormatError: The file is absent, malformed or of a newer version.
        ProfileError: Settings or records do not fit the schedule.
    """
    name = os.fspath(path)
    try:
        content = Path(path).read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        body = json.loads(content.decode("utf-8"))
    except OSError as error:
        reason = error.strerror or "damaged gzip"
        raise FormatError(
            f"cannot read the runs file {name!r} ({reason}); name an existing runs file"
        ) from None
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise FormatError(
            f"{name!r} is not a runs file: it is not valid JSON ({error}); record it again"
        ) from None
    return runs_from_dict(body, name)


def save_runs(runs: Runs, path: str | os.PathLike[str]) -> None:
    """Write a runs file in the full form, atomically; gzipped where the name ends in `.gz`."""
    text = json.dumps(runs_to_dict(runs), allow_nan=False) + "\n"
    if os.fspath(path).endswith(".gz"):
        _write_bytes(Path(path), gzip.compress(text.encode("utf-8"), mtime=0))
    else:
        write_text(path, text)


def _write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def runs_to_dict(runs: Runs) -> dict[str, Any]:
    """The full JSON form; `runs_from_dict` reads it back."""
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "facts": dict(runs.facts),
        "source": runs.source.value,
        "scope": runs.scope,
        "clocks_mhz": list(runs.clocks_mhz),
        "blocking_power_w": None if runs.blocking_power_w is None else list(runs.blocking_power_w),
        "schedule": runs.schedule.to_dict(),
        "runs": [_run_to_dict(run, runs.schedule.stages) for run in runs.runs],
    }


def _run_to_dict(run: PlanRun, stages: int) -> dict[str, Any]:
    records = run.iterations

    def column(name: str, stage: int) -> list[Any]:
        rows = [getattr(record, name) for record in records]
        return [row[stage] if row else None for row in rows]

    return {
        "plan": run.name,
        "iter_time_s": [record.iter_time_s for record in records],
        "rejected": [record.rejected for record in records],
        "stages": [
            {
                "settings": [str(setting) for setting in run.settings[stage]],
                "duration_s": [list(record.duration_s[stage]) for record in records],
                "iter_energy_j": column("energy_j", stage),
                "iter_energy_sd_j": column("energy_sd_j", stage),
                "temperature_c": column("temperature_c", stage),
                "flags": [record.flag_of(stage) for record in records],
            }
            for stage in range(stages)
        ],
    }


def runs_from_dict(body: Any, origin: str = "runs") -> Runs:
    """Read and validate either JSON form; raises as `load_runs`."""
    if not isinstance(body, dict):
        raise FormatError(f"{origin!r} is not a runs file: it must hold an object with 'runs'")
    if body.get("format", FORMAT) != FORMAT:
        raise FormatError(
            f"{origin!r} is not a runs file: its format is {body.get('format')!r} and must be "
            f"{FORMAT!r}; record it with kareus-pp"
        )
    if body.get("version", FORMAT_VERSION) != FORMAT_VERSION:
        raise FormatError(
            f"{origin!r} has runs version {body.get('version')!r} and this kareus-pp reads "
            f"version {FORMAT_VERSION}; record it again with this version"
        )
    file = validated(_RunsFile, body, "runs file")
    if file.schedule is not None:
        schedule = Schedule.from_dict(file.schedule)
    elif file.stages and file.microbatches:
        schedule = build_1f1b(file.stages, file.microbatches)
    else:
        raise FormatError(
            f"{origin!r} names no schedule: give 'schedule', or 'stages' and 'microbatches' for "
            f"synchronous 1F1B"
        )
    blocking = file.blocking_power_w
    if isinstance(blocking, float):
        blocking = [blocking] * schedule.stages
    facts = {**file.facts, **{k: str(body[k]) for k in _FACTS if body.get(k) is not None}}
    runs = Runs(
        schedule=schedule,
        runs=tuple(
            _run_from_file(run, schedule, f"{origin}: run {run.plan if run.plan != '' else n}")
            for n, run in enumerate(file.runs)
        ),
        clocks_mhz=tuple(sorted(file.clocks_mhz)),
        blocking_power_w=None if blocking is None else tuple(blocking),
        source=file.source,
        facts=facts,
        scope=file.scope,
    )
    validate_runs(runs)
    return runs


def _run_from_file(run: _RunFile, schedule: Schedule, where: str) -> PlanRun:
    if len(run.stages) != schedule.stages:
        raise FormatError(
            f"{where}: {len(run.stages)} stages and the schedule has {schedule.stages}"
        )
    settings = tuple(
        _settings(run.stages[stage], schedule, stage, where) for stage in range(schedule.stages)
    )
    return PlanRun(settings, _records(run, schedule, where), str(run.plan))


def _settings(file: _StageFile, schedule: Schedule, stage: int, where: str) -> tuple[Setting, ...]:
    if file.settings is not None:
        return tuple(Setting.parse(text) for text in file.settings)
    clocks = _by_microbatch(
        file.forward_mhz, file.backward_mhz, schedule, stage, f"{where}, stage {stage}: clocks"
    )
    return tuple(Setting(None if clock is None else int(clock)) for clock in clocks)


def _records(run: _RunFile, schedule: Schedule, where: str) -> tuple[IterationRecord, ...]:
    """The iterations; none where a measurement is absent or empty."""
    count = len(run.iter_time_s or ())
    measured = [
        file.duration_s is not None or bool(file.forward_s and file.backward_s)
        for file in run.stages
    ]
    if not count or not all(measured):
        return ()
    durations = [
        _durations(file, schedule, stage, count, f"{where}, stage {stage}")
        for stage, file in enumerate(run.stages)
    ]
    columns: dict[str, list[list[Any]]] = {}
    for name in ("iter_energy_j", "iter_energy_sd_j", "temperature_c", "flags"):
        columns[name] = [
            _column(getattr(file, name), count, f"{where}, stage {stage}: {name}")
            for stage, file in enumerate(run.stages)
        ]
    rejected = _column(run.rejected, count, f"{where}: rejected")
    records = []
    for i, time_s in enumerate(run.iter_time_s or ()):
        flags = tuple(column[i] or "" for column in columns["flags"])
        record = IterationRecord(
            iter_time_s=math.nan if time_s is None else time_s,
            duration_s=tuple(stage[i] for stage in durations),
            energy_j=tuple(column[i] for column in columns["iter_energy_j"]),
            energy_sd_j=tuple(column[i] for column in columns["iter_energy_sd_j"]),
            temperature_c=tuple(column[i] for column in columns["temperature_c"]),
            rejected=rejected[i] or ("no iteration time" if time_s is None else ""),
            flags=flags if any(flags) else (),
        )
        records.append(record)
    return tuple(records)


def _durations(
    file: _StageFile, schedule: Schedule, stage: int, count: int, where: str
) -> list[tuple[float, ...]]:
    if file.duration_s is not None:
        if len(file.duration_s) != count:
            raise FormatError(
                f"{where}: durations of {len(file.duration_s)} iterations and iter_time_s has "
                f"{count}"
            )
        return [_finite(row) for row in file.duration_s]
    values = _by_microbatch(file.forward_s, file.backward_s, schedule, stage, f"{where}: durations")
    return [_finite(values)] * count


def _finite(values: list[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else float(value) for value in values)


def _by_microbatch(
    forward: list[Any] | None,
    backward: list[Any] | None,
    schedule: Schedule,
    stage: int,
    where: str,
) -> list[Any]:
    """Lists by microbatch in the order of the schedule."""
    found = []
    for instruction in schedule.order[stage]:
        if instruction.kind not in (Kind.FORWARD, Kind.BACKWARD) or instruction.chunk:
            raise FormatError(
                f"{where}: {instruction} has no place in lists by microbatch; give 'settings' and "
                f"'duration_s' in the order of the schedule"
            )
        values = forward if instruction.kind is Kind.FORWARD else backward
        if values is None or len(values) != schedule.microbatches:
            number = 0 if values is None else len(values)
            raise FormatError(
                f"{where}: {number} {instruction.kind.word}s and the schedule has "
                f"{schedule.microbatches} microbatches"
            )
        found.append(values[instruction.microbatch])
    return found


def _column(values: list[Any] | None, count: int, where: str) -> list[Any]:
    if not values:
        return [None] * count
    if len(values) != count:
        raise FormatError(f"{where} has {len(values)} values and iter_time_s has {count}")
    return values


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _StageFile(_Strict):
    settings: list[str] | None = None
    duration_s: list[list[NonNegativeFloat | None]] | None = None
    forward_mhz: list[PositiveInt | None] | None = None
    backward_mhz: list[PositiveInt | None] | None = None
    forward_s: list[NonNegativeFloat | None] | None = None
    backward_s: list[NonNegativeFloat | None] | None = None
    iter_energy_j: list[float | None] | None = None
    iter_energy_sd_j: list[NonNegativeFloat | None] | None = None
    temperature_c: list[float | None] | None = None
    flags: list[str | None] | None = None


class _RunFile(_Strict):
    plan: str | int = ""
    iter_time_s: list[NonNegativeFloat | None] | None = None
    rejected: list[str | None] | None = None
    stages: list[_StageFile]


class _RunsFile(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    runs: list[_RunFile]
    schedule: dict[str, Any] | None = None
    stages: PositiveInt | None = None
    microbatches: PositiveInt | None = None
    clocks_mhz: list[PositiveInt] = []
    blocking_power_w: NonNegativeFloat | list[NonNegativeFloat] | None = None
    source: Source = Source.FILE
    scope: str = ""
    facts: dict[str, str] = {}
