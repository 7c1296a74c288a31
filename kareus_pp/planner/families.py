"""Plans among sequential and overlapped options.

Forward and backward of a microbatch must both be split, or neither: a mixture runs, but not at the
cost that was measured. So the options fall into families within which every choice is consistent,
each is planned for, and the better plan is taken. Not to split is always a family of its own
(rule 28 of the field rules).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kareus_pp.errors import TargetError
from kareus_pp.plan import Frontier, Plan
from kareus_pp.planner.api import Planner, undominated
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.profile import Option, Profile
from kareus_pp.schedule import InstructionClass, Kind, Schedule
from kareus_pp.target import (
    Cost,
    Deadline,
    EnergyBudget,
    EnergyDelayProduct,
    Fastest,
    PowerCap,
    Slowdown,
    Target,
    format_target,
)

_SPLIT = (Kind.FORWARD, Kind.BACKWARD)
_TOLERANCE = 1 + 1e-9


def families(profile: Profile) -> tuple[Profile, ...]:
    """Profiles with the options of one family each; the first is not to split.

    A chunk of a stage is split where all of its forwards and backwards have options for it.
    """
    sequential = _with(profile, lambda cls, option: option.setting.overlap.is_sequential)
    splits: dict[tuple[int, int], bool] = {}
    for cls, options in profile.options.items():
        if cls.kind in _SPLIT:
            has = any(not option.setting.overlap.is_sequential for option in options)
            place = (cls.stage, cls.chunk)
            splits[place] = splits.get(place, True) and has
    if not any(splits.values()):
        return (sequential,)

    def wanted(cls: InstructionClass, option: Option) -> bool:
        split = cls.kind in _SPLIT and splits[cls.stage, cls.chunk]
        return option.setting.overlap.is_sequential is not split

    return sequential, _with(profile, wanted)


def plan_among(
    schedule: Schedule, profile: Profile, target: Target, options: PlannerOptions, points: int
) -> tuple[Plan, Frontier]:
    """The best plan for a target over all families, and the frontier of all of them.

    Args:
        schedule: The schedule.
        profile: Options of every class in it.
        target: What to aim at; a slowdown is one against the shortest iteration of any family.
        options: Limits and prices.
        points: Points of each family's frontier.

    Raises:
        ProfileError: The profile lacks something that the schedule needs.
        TargetError: No family meets the target.
    """
    planners = [Planner(schedule, family, options) for family in families(profile)]
    asked = target
    if isinstance(target, Slowdown):
        shortest_s = min(planner.shortest_s for planner in planners)
        asked = Deadline(shortest_s * (1 + target.percent / 100))
    plans: list[Plan] = []
    fault: TargetError | None = None
    for planner in planners:
        try:
            plans.append(planner.plan(asked))
        except TargetError as error:
            fault = fault or error
    if not plans:
        assert fault is not None
        raise fault
    swept = [p for planner in planners for p in planner.sweep(points, planner.least_energy_s)]
    return replace(best(plans, asked), target=format_target(target)), undominated(swept)


def best(plans: Sequence[Plan], target: Target) -> Plan:
    """The plan that serves a target best; the first of equals."""

    def rank(plan: Plan) -> tuple[float, ...]:
        assert plan.time_s is not None
        assert plan.energy_j is not None
        time_s, energy_j = plan.time_s, plan.energy_j
        if isinstance(target, Fastest | EnergyBudget | PowerCap):
            return time_s, energy_j
        if isinstance(target, EnergyDelayProduct):
            return (time_s * energy_j,)
        if isinstance(target, Cost):
            return (target.per_joule * energy_j + target.per_hour * time_s / 3600,)
        if isinstance(target, Deadline) and time_s > target.time_s * _TOLERANCE:
            return math.inf, time_s
        return energy_j, time_s

    return min(plans, key=rank)


def _with(profile: Profile, wanted: Callable[[InstructionClass, Option], bool]) -> Profile:
    return replace(
        profile,
        options={
            cls: tuple(option for option in options if wanted(cls, option))
            for cls, options in profile.options.items()
        },
    )
