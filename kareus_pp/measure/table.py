"""Runs as arrays: what the models are fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kareus_pp.errors import ProfileError
from kareus_pp.measure.runs import PlanRun, Runs
from kareus_pp.plan import Settings
from kareus_pp.schedule import InstructionClass, Schedule
from kareus_pp.setting import OverlapSetting

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


class CostKey(NamedTuple):
    """What shares one cost curve over the clock: an instruction class at an overlap setting."""

    cls: InstructionClass
    overlap: OverlapSetting

    def __str__(self) -> str:
        return str(self.cls) if self.overlap.is_sequential else f"{self.cls}/{self.overlap}"


@dataclass(frozen=True)
class Applied:
    """A frequency plan as arrays over the instructions (by node number).

    Attributes:
        key: Index into `Layout.keys`; shape `(instructions,)`.
        mhz: Clock; default clocks count as the highest known; shape `(instructions,)`.
    """

    key: Ints
    mhz: Floats


@dataclass(frozen=True)
class Layout:
    """The schedule and the cost keys that plans on it refer to.

    Attributes:
        schedule: The schedule.
        keys: All cost keys that occur.
        stage: Stage of every instruction; shape `(instructions,)`.
        clocks_mhz: Known clocks, ascending.
    """

    schedule: Schedule
    keys: tuple[CostKey, ...]
    stage: Ints
    clocks_mhz: tuple[int, ...]

    @property
    def top_mhz(self) -> int:
        """The highest known clock, which default clocks stand for."""
        return self.clocks_mhz[-1]

    @cached_property
    def classes(self) -> tuple[InstructionClass, ...]:
        """Class of every instruction."""
        return tuple(map(self.schedule.class_of, self.schedule.instructions))

    def apply(self, settings: Settings) -> Applied:
        """Settings as arrays.

        Raises:
            ProfileError: An overlap setting was never run for an instruction class.
        """
        number = {key: index for index, key in enumerate(self.keys)}
        flat = [setting for row in settings for setting in row]
        keys = []
        for instruction, cls, setting in zip(
            self.schedule.instructions, self.classes, flat, strict=True
        ):
            found = number.get(CostKey(cls, setting.overlap))
            if found is None:
                raise ProfileError(
                    f"{instruction} at {setting}: this overlap setting was never run for the "
                    f"class {cls}; run it, or use one of "
                    f"{', '.join(str(key.overlap) for key in self.keys if key.cls == cls)}"
                )
            keys.append(found)
        mhz = [float(setting.clock_mhz or self.top_mhz) for setting in flat]
        return Applied(np.array(keys, dtype=np.intp), np.array(mhz))


@dataclass(frozen=True)
class Entry:
    """What was measured under one frequency plan, rejected iterations left out.

    Attributes:
        name: Name of the run.
        applied: The plan.
        duration_s: Mean duration of every instruction; NaN where nothing usable.
        durations_s: Durations one by one, equal iterations once (a file may hold medians over
            iterations only); shape `(iterations, instructions)`.
        time_s: Mean iteration time.
        time_se_s: Its standard error; NaN with fewer than three iterations.
        energy_j: Mean energy of each stage; NaN where not usable; shape `(stages,)`.
        energy_se_j: Its standard error, from the scatter or from the readings themselves,
            whichever is larger; 0 where unknown.
        temperature_c: Mean temperature of each stage; NaN where not read.
    """

    name: str
    applied: Applied
    duration_s: Floats
    durations_s: Floats
    time_s: float
    time_se_s: float
    energy_j: Floats
    energy_se_j: Floats
    temperature_c: Floats


def layout_of(runs: Runs) -> Layout:
    """The layout that all plans of the runs share; only settings are read.

    Raises:
        ProfileError: No clock is known.
    """
    clocks = runs.known_clocks_mhz
    if not clocks:
        raise ProfileError(
            "the runs name no clock; record the supported clocks, or run plans with locked clocks"
        )
    schedule = runs.schedule
    classes = [schedule.class_of(instruction) for instruction in schedule.instructions]
    keys = dict.fromkeys(
        CostKey(cls, overlap)
        for cls, overlap in dict.fromkeys(
            (cls, setting.overlap)
            for run in runs.runs
            for cls, setting in zip(classes, (s for row in run.settings for s in row), strict=True)
        )
    )
    return Layout(schedule, tuple(keys), np.array(schedule.stage_of, dtype=np.intp), clocks)


def entry_of(run: PlanRun, layout: Layout) -> Entry | None:
    """The usable measurements of a run; None where no iteration time is usable."""
    records = [record for record in run.iterations if not record.rejected]
    clean = [record for record in records if not any(record.flags)]
    if not clean:
        return None
    stages = range(layout.schedule.stages)
    flagged = [[bool(record.flag_of(stage)) for stage in stages] for record in records]
    durations = np.array([[value for row in r.duration_s for value in row] for r in records])
    durations[np.array(flagged)[:, layout.stage]] = np.nan
    time_s, time_se_s = _mean(np.array([[record.iter_time_s] for record in clean]))
    energy = _per_stage([record.energy_j for record in records], flagged)
    reading = _per_stage([record.energy_sd_j for record in records], flagged)
    energy_j, scatter = _mean(energy)
    count = np.maximum(np.sum(np.isfinite(energy), axis=0), 1)
    from_reading = np.sqrt(np.nansum(reading**2, axis=0)) / count
    return Entry(
        name=run.name,
        applied=layout.apply(run.settings),
        duration_s=_mean(durations)[0],
        durations_s=np.unique(durations, axis=0),
        time_s=float(time_s[0]),
        time_se_s=float(time_se_s[0]),
        energy_j=energy_j,
        energy_se_j=np.maximum(np.nan_to_num(scatter), from_reading),
        temperature_c=_mean(_per_stage([r.temperature_c for r in records], flagged))[0],
    )


def _per_stage(rows: Sequence[Sequence[float | None]], flagged: list[list[bool]]) -> Floats:
    """Values by iteration and stage; NaN where None or flagged."""
    return np.array(
        [
            [
                np.nan if bad or not row or row[stage] is None else row[stage]
                for stage, bad in enumerate(bads)
            ]
            for row, bads in zip(rows, flagged, strict=True)
        ],
        dtype=float,
    )


def _mean(values: Floats) -> tuple[Floats, Floats]:
    """Mean of every column and its standard error (NaN below three values), NaN left out."""
    count = np.sum(np.isfinite(values), axis=0)
    mean = np.full(values.shape[1], np.nan)
    error = np.full(values.shape[1], np.nan)
    some, enough = count > 0, count > 2
    mean[some] = np.nanmean(values[:, some], axis=0)
    error[enough] = np.nanstd(values[:, enough], axis=0, ddof=1) / np.sqrt(count[enough])
    return mean, error
