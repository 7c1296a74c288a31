"""Runs as arrays: what the models are fitted to."""

from __future__ import annotations

from dataclasses import dataclass
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

    def apply(self, settings: Settings) -> Applied:
        """Settings as arrays.

        Raises:
            ProfileError: An overlap setting was never run for an instruction class.
        """
        number = {key: index for index, key in enumerate(self.keys)}
        keys = []
        mhz = []
        for order, row in zip(self.schedule.order, settings, strict=True):
            for instruction, setting in zip(order, row, strict=True):
                key = CostKey(self.schedule.class_of(instruction), setting.overlap)
                if key not in number:
                    raise ProfileError(
                        f"{instruction} at {setting}: this overlap setting was never run for the "
                        f"class {key.cls}; run it, or use one of "
                        f"{', '.join(str(k.overlap) for k in self.keys if k.cls == key.cls)}"
                    )
                keys.append(number[key])
                mhz.append(float(setting.clock_mhz or self.top_mhz))
        return Applied(np.array(keys, dtype=np.intp), np.array(mhz))


@dataclass(frozen=True)
class Entry:
    """What was measured under one frequency plan, rejected iterations left out.

    Attributes:
        name: Name of the run.
        applied: The plan.
        duration_s: Median duration of every instruction; NaN where nothing usable.
        iter_time_s: Iteration times; shape `(iterations,)`.
        energy_j: Energy of each stage and iteration; NaN where not usable; shape
            `(stages, iterations)`.
        energy_sd_j: Standard deviation from the readings themselves; NaN where unknown.
        temperature_c: Temperatures; NaN where not read.
    """

    name: str
    applied: Applied
    duration_s: Floats
    iter_time_s: Floats
    energy_j: Floats
    energy_sd_j: Floats
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
    keys = dict.fromkeys(
        CostKey(schedule.class_of(instruction), setting.overlap)
        for run in runs.runs
        for order, row in zip(schedule.order, run.settings, strict=True)
        for instruction, setting in zip(order, row, strict=True)
    )
    return Layout(schedule, tuple(keys), np.array(schedule.stage_of, dtype=np.intp), clocks)


def entry_of(run: PlanRun, layout: Layout) -> Entry | None:
    """The usable measurements of a run; None where there are none."""
    records = [record for record in run.iterations if not record.rejected]
    if not records:
        return None
    stages = layout.schedule.stages

    def per_stage(values: tuple[float | None, ...], flagged: list[bool]) -> list[float]:
        row = values or (None,) * stages
        return [
            np.nan if value is None or bad else float(value)
            for value, bad in zip(row, flagged, strict=True)
        ]

    durations = []
    energies = []
    deviations = []
    temperatures = []
    for record in records:
        flagged = [bool(record.flag_of(stage)) for stage in range(stages)]
        durations.append(
            [
                np.nan if bad else value
                for row, bad in zip(record.duration_s, flagged, strict=True)
                for value in row
            ]
        )
        energies.append(per_stage(record.energy_j, flagged))
        deviations.append(per_stage(record.energy_sd_j, flagged))
        temperatures.append(per_stage(record.temperature_c, [False] * stages))
    clean = [not any(record.flags) for record in records]
    times = np.array([record.iter_time_s for record in records])[clean]
    return Entry(
        name=run.name,
        applied=layout.apply(run.settings),
        duration_s=_median_of_columns(np.array(durations)),
        iter_time_s=times,
        energy_j=np.array(energies).T,
        energy_sd_j=np.array(deviations).T,
        temperature_c=np.array(temperatures).T,
    )


def _median_of_columns(values: Floats) -> Floats:
    result = np.full(values.shape[1], np.nan)
    some = ~np.all(np.isnan(values), axis=0)
    result[some] = np.nanmedian(values[:, some], axis=0)
    return result
