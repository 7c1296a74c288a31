"""Plans and frontiers: a setting for every instruction, with what it is predicted to cost."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from kareus_pp._files import read_document, validated, write_document
from kareus_pp.errors import FormatError, PlanError
from kareus_pp.profile import Profile, Source
from kareus_pp.schedule import Instruction, Kind, Schedule
from kareus_pp.setting import DEFAULT_SETTING, Setting

FORMAT_VERSION = 1
Settings = tuple[tuple[Setting, ...], ...]


@dataclass(frozen=True)
class Plan:
    """A setting for every instruction of one schedule.

    Attributes:
        schedule: The schedule that the settings belong to.
        settings: For each stage the settings in the order of `schedule.order`.
        time_s: Predicted iteration time in seconds; None for a plan made by hand.
        energy_j: Predicted energy of one iteration over all stages, one GPU each, in joules.
        bound_j: Proven lower bound on the energy of any plan that is as fast; None where unknown.
        gap: (energy - bound) / bound, as a fraction; None where unknown.
        target: Text form of the target that the plan was made for.
        source: Source of the energy readings behind the profile.
        switch_delay_s: Delay of a clock switch that `time_s` counts with, in seconds.
        switch_energy_j: Energy of a clock switch that `energy_j` counts with, in joules.
    """

    schedule: Schedule
    settings: Settings
    time_s: float | None = None
    energy_j: float | None = None
    bound_j: float | None = None
    gap: float | None = None
    target: str = ""
    source: Source = Source.FILE
    switch_delay_s: float = 0.0
    switch_energy_j: float = 0.0

    def setting(self, instruction: Instruction) -> Setting:
        """The setting of one instruction of the schedule."""
        step = self.schedule.index[instruction]
        for row in self.settings[: instruction.stage]:
            step -= len(row)
        return self.settings[instruction.stage][step]

    @property
    def switches(self) -> int:
        """Clock changes of one iteration over all stages, the one at its start included.

        Fixed instructions keep the clock they find.
        """
        return sum(count_switches(clocks) for clocks in self.clocks_mhz)

    @property
    def half_split(self) -> str:
        """What the plan splits by halves only, see `half_split`; empty where there is nothing."""
        pairs = (
            pair
            for order, row in zip(self.schedule.order, self.settings, strict=True)
            for pair in zip(order, row, strict=True)
        )
        return half_split({i: s for i, s in pairs if not s.overlap.is_sequential})

    @property
    def clocks_mhz(self) -> tuple[tuple[int | None, ...], ...]:
        """For each stage the clocks of its instructions, fixed instructions left out."""
        return tuple(
            tuple(
                setting.clock_mhz
                for instruction, setting in zip(order, row, strict=True)
                if not instruction.kind.is_fixed
            )
            for order, row in zip(self.schedule.order, self.settings, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `from_dict` reads it back."""
        return {"schedule": self.schedule.to_dict(), **self._point()}

    def _point(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s,
            "energy_j": self.energy_j,
            "bound_j": self.bound_j,
            "gap": self.gap,
            "target": self.target,
            "source": self.source.value,
            "switch_delay_s": self.switch_delay_s,
            "switch_energy_j": self.switch_energy_j,
            "settings": [
                [f"{i} {s}" for i, s in zip(order, row, strict=True)]
                for order, row in zip(self.schedule.order, self.settings, strict=True)
            ],
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Plan:
        """Read and validate the JSON form.

        Raises:
            FormatError: A value is missing or malformed.
            ScheduleError: The schedule is inconsistent.
            PlanError: Settings and schedule do not match.
        """
        schedule = Schedule.from_dict(body.get("schedule") or {})
        return cls._from_point(schedule, {k: v for k, v in body.items() if k != "schedule"})

    @classmethod
    def _from_point(cls, schedule: Schedule, body: Mapping[str, Any]) -> Plan:
        file = validated(_PointFile, body, "plan")
        settings = tuple(tuple(_parse_step(text) for text in row) for row in file.settings)
        plan = cls(
            schedule,
            tuple(tuple(setting for _, setting in row) for row in settings),
            file.time_s,
            file.energy_j,
            file.bound_j,
            file.gap,
            file.target,
            file.source,
            file.switch_delay_s,
            file.switch_energy_j,
        )
        validate_plan(plan)
        for stage, (order, row) in enumerate(zip(schedule.order, settings, strict=True)):
            for step, (instruction, (named, _)) in enumerate(zip(order, row, strict=True)):
                if instruction != named:
                    raise PlanError(
                        f"stage {stage}, step {step}, microbatch {instruction.microbatch}: "
                        f"the plan names {named} and the schedule has {instruction}"
                    )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically."""
        write_document(path, "plan", FORMAT_VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file; raises as `from_dict`, and `FormatError` for the envelope."""
        return cls.from_dict(read_document(path, "plan", FORMAT_VERSION))


def count_switches(clocks: Iterable[int | None]) -> int:
    """Clock changes of a repeated sequence of clocks; from its last to its first counts too."""
    row = tuple(clocks)
    return sum(before != after for before, after in zip(row[-1:] + row[:-1], row, strict=True))


def half_split(overlapped: Collection[Instruction]) -> str:
    """Say which forward overlaps without its backward, or the reverse; empty where none does.

    Args:
        overlapped: All instructions whose settings are not sequential.
    """
    for instruction in overlapped:
        other = Kind.BACKWARD if instruction.kind is Kind.FORWARD else Kind.FORWARD
        if instruction._replace(kind=other) not in overlapped:
            outcome = (
                "neither overlaps, and both take other times than planned"
                if other is Kind.FORWARD
                else "that runs in halves one after the other and takes longer than planned"
            )
            return (
                f"the plan splits {instruction} and not the {other.word} of that microbatch: "
                f"{outcome}"
            )
    return ""


def default_settings(schedule: Schedule) -> Settings:
    """Default clocks and sequential execution for every instruction."""
    return tuple(tuple(DEFAULT_SETTING for _ in row) for row in schedule.order)


def validate_plan(plan: Plan, profile: Profile | None = None) -> None:
    """Check that a plan has one setting for every instruction, each known to the profile if given.

    Raises:
        PlanError: Naming stage, step and microbatch of the first fault.
        ProfileError: The profile misses a class or a setting.
    """
    if len(plan.settings) != plan.schedule.stages:
        raise PlanError(
            f"the plan has {len(plan.settings)} stages and the schedule {plan.schedule.stages}"
        )
    for stage, (order, row) in enumerate(zip(plan.schedule.order, plan.settings, strict=True)):
        if len(order) != len(row):
            step = min(len(order), len(row))
            where = f", microbatch {order[step].microbatch}" if step < len(order) else ""
            raise PlanError(
                f"stage {stage}, step {step}{where}: the plan has {len(row)} settings and the "
                f"schedule {len(order)} instructions"
            )
        if profile is not None:
            for instruction, setting in zip(order, row, strict=True):
                profile.option(plan.schedule.class_of(instruction), setting)


@dataclass(frozen=True)
class Frontier:
    """Plans of one schedule in order of time, none dominated by another."""

    plans: tuple[Plan, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `from_dict` reads it back."""
        if not self.plans:
            return {"schedule": None, "points": []}
        return {
            "schedule": self.plans[0].schedule.to_dict(),
            "points": [plan._point() for plan in self.plans],
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Frontier:
        """Read and validate the JSON form; raises as `Plan.from_dict`."""
        points = body.get("points")
        if not isinstance(points, list) or not all(isinstance(p, dict) for p in points):
            raise FormatError("the frontier is malformed: 'points' must be a list of plans")
        if not points:
            return cls(())
        schedule = Schedule.from_dict(body.get("schedule") or {})
        frontier = cls(tuple(Plan._from_point(schedule, point) for point in points))
        validate_frontier(frontier)
        return frontier

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the frontier to a file, atomically."""
        write_document(path, "frontier", FORMAT_VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Frontier:
        """Read a frontier file; raises as `from_dict`, and `FormatError` for the envelope."""
        return cls.from_dict(read_document(path, "frontier", FORMAT_VERSION))


def validate_frontier(frontier: Frontier) -> None:
    """Check that times rise strictly and energies fall strictly.

    Raises:
        PlanError: Naming the first point that is out of order or dominated.
    """
    for number, (before, after) in enumerate(
        zip(frontier.plans, frontier.plans[1:], strict=False), start=1
    ):
        if None in (before.time_s, before.energy_j, after.time_s, after.energy_j):
            raise PlanError(f"frontier point {number}: it has no predicted time or energy")
        if not before.time_s < after.time_s:  # type: ignore[operator]
            raise PlanError(
                f"frontier point {number}: its time {after.time_s} s is not above {before.time_s} s"
            )
        if not before.energy_j > after.energy_j:  # type: ignore[operator]
            raise PlanError(
                f"frontier point {number}: it is dominated, its energy {after.energy_j} J is not "
                f"below {before.energy_j} J"
            )


def _parse_step(text: str) -> tuple[Instruction, Setting]:
    instruction, _, setting = text.partition(" ")
    return Instruction.parse(instruction), Setting.parse(setting)


class _PointFile(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    time_s: NonNegativeFloat | None = None
    energy_j: float | None = None
    bound_j: float | None = None
    gap: float | None = None
    target: str = ""
    source: Source = Source.FILE
    switch_delay_s: NonNegativeFloat = 0.0
    switch_energy_j: NonNegativeFloat = 0.0
    settings: list[list[str]]
