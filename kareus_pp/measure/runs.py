"""Runs: what the runtime records while it tries frequency plans, and what the learner reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """

    iter_time_s: float
    duration_s: tuple[tuple[float, ...], ...]
    energy_j: tuple[float | None, ...]
    energy_sd_j: tuple[float | None, ...] = ()
    temperature_c: tuple[float | None, ...] = ()
    rejected: str = ""


@dataclass(frozen=True)
class PlanRun:
    """The iterations that were executed under one frequency plan."""

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
    """

    schedule: Schedule
    runs: tuple[PlanRun, ...]
    clocks_mhz: tuple[int, ...] = ()
    blocking_power_w: tuple[float, ...] | None = None
    source: Source = Source.FILE
    facts: Mapping[str, str] = field(default_factory=dict)
