"""Runs: what the runtime records while it tries frequency plans, and what the learner reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kareus_pp.errors import ProfileError
from kareus_pp.plan import Settings
from kareus_pp.profile import Source
from kareus_pp.schedule import Schedule


@dataclass(frozen=True)
class IterationRecord:
    """One training iteration as all stages saw it.

    Attributes:
        iter_time_s: Wall-clock time of the iteration in seconds.
        duration_s: For each stage the duration of every instruction in the order of the schedule.
        energy_j: For each stage the energy of one GPU over the iteration; None where not read.
        energy_sd_j: Standard deviation of `energy_j` from the reading itself; None where unknown.
        temperature_c: For each stage the mean GPU temperature; None where not read.
        rejected: Why the iteration must not be used for learning; empty where it may.
        flags: For each stage why its readings must not be used (throttled, clock not held, ...);
            empty text where they may, empty tuple where nothing is flagged.
    """

    iter_time_s: float
    duration_s: tuple[tuple[float, ...], ...]
    energy_j: tuple[float | None, ...]
    energy_sd_j: tuple[float | None, ...] = ()
    temperature_c: tuple[float | None, ...] = ()
    rejected: str = ""
    flags: tuple[str, ...] = ()

    def flag_of(self, stage: int) -> str:
        """Why the readings of a stage must not be used; empty where they may."""
        return self.flags[stage] if self.flags else ""


@dataclass(frozen=True)
class PlanRun:
    """The iterations that were executed under one frequency plan; none where nothing is known."""

    settings: Settings
    iterations: tuple[IterationRecord, ...]
    name: str = ""


@dataclass(frozen=True)
class Runs:
    """All frequency plans tried on one schedule.

    Attributes:
        schedule: The schedule, the same for all runs.
        runs: One entry for each frequency plan.
        clocks_mhz: Supported SM clocks, ascending.
        blocking_power_w: Measured power of a waiting GPU for each stage; None where it is unknown
            and must be learned.
        source: Source of the energy readings.
        facts: Model, GPU, ... as text.
        scope: What the energy readings cover: `gpu` or `module`; empty where unknown.
    """

    schedule: Schedule
    runs: tuple[PlanRun, ...]
    clocks_mhz: tuple[int, ...] = ()
    blocking_power_w: tuple[float, ...] | None = None
    source: Source = Source.FILE
    facts: Mapping[str, str] = field(default_factory=dict)
    scope: str = ""

    @property
    def known_clocks_mhz(self) -> tuple[int, ...]:
        """Supported clocks or, where they were not recorded, those that occur; ascending."""
        if self.clocks_mhz:
            return tuple(sorted(set(self.clocks_mhz)))
        found = {
            setting.clock_mhz
            for run in self.runs
            for row in run.settings
            for setting in row
            if setting.clock_mhz is not None
        }
        return tuple(sorted(found))

    def with_runs(self, runs: tuple[PlanRun, ...]) -> Runs:
        """The same job with other runs."""
        return replace(self, runs=runs)


def validate_runs(runs: Runs) -> None:
    """Check that settings and records fit the schedule.

    Raises:
        ProfileError: Naming the run and the stage of the first fault.
    """
    stages = runs.schedule.stages
    if runs.blocking_power_w is not None and len(runs.blocking_power_w) != stages:
        raise ProfileError(
            f"the runs have {len(runs.blocking_power_w)} blocking powers and the schedule "
            f"{stages} stages; give one for each stage"
        )
    for number, run in enumerate(runs.runs):
        where = f"run {run.name or number}"
        if len(run.settings) != stages:
            raise ProfileError(
                f"{where}: settings for {len(run.settings)} stages and the schedule has {stages}"
            )
        for stage, order in enumerate(runs.schedule.order):
            if len(run.settings[stage]) != len(order):
                raise ProfileError(
                    f"{where}, stage {stage}: {len(run.settings[stage])} settings and the "
                    f"schedule has {len(order)} instructions"
                )
        for record in run.iterations:
            _validate_record(record, runs.schedule, where)


def _validate_record(record: IterationRecord, schedule: Schedule, where: str) -> None:
    per_stage = {
        "duration_s": record.duration_s,
        "energy_j": record.energy_j,
        "energy_sd_j": record.energy_sd_j,
        "temperature_c": record.temperature_c,
        "flags": record.flags,
    }
    for name, values in per_stage.items():
        may_be_absent = name in ("energy_sd_j", "temperature_c", "flags")
        if len(values) != schedule.stages and (values or not may_be_absent):
            raise ProfileError(
                f"{where}: {name} of {len(values)} stages and the schedule has {schedule.stages}"
            )
    for stage, order in enumerate(schedule.order):
        if len(record.duration_s[stage]) != len(order):
            raise ProfileError(
                f"{where}, stage {stage}: {len(record.duration_s[stage])} durations and the "
                f"schedule has {len(order)} instructions"
            )
