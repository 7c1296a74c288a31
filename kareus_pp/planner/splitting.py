"""Which microbatches are split into nanobatches.

Forward and backward of a microbatch on a stage must both be split, or neither: a mixture runs, but
not at the cost that was measured. So a plan is made for a given set of split microbatches, within
which every choice is consistent; `kareus_pp.planner.joint` proposes sets. Not to split anything is
always among them (rule 28 of the field rules).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kareus_pp.plan import Plan
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import Place, place_of, usable_options
from kareus_pp.profile import Profile
from kareus_pp.schedule import InstructionClass, Kind, Schedule
from kareus_pp.target import (
    Cost,
    Deadline,
    EnergyBudget,
    EnergyDelayProduct,
    Fastest,
    PowerCap,
    Straggler,
    Target,
)

_SPLIT = (Kind.FORWARD, Kind.BACKWARD)
_TOLERANCE = 1 + 1e-9


def without_overlap(profile: Profile) -> Profile:
    """The profile without the options that overlap."""
    return replace(
        profile,
        options={
            cls: tuple(option for option in options if option.setting.overlap.is_sequential)
            for cls, options in profile.options.items()
        },
    )


def splittable(schedule: Schedule, profile: Profile, options: PlannerOptions) -> frozenset[Place]:
    """The microbatches whose forward and backward both have usable options that overlap.

    Args:
        schedule: The schedule.
        profile: Options of every class in it.
        options: Which clocks are allowed.

    Raises:
        ProfileError: The profile lacks a class of the schedule.
    """

    def can_be_split(cls: InstructionClass) -> bool:
        found = usable_options(cls, profile, options)
        return cls.kind in _SPLIT and any(not o.setting.overlap.is_sequential for o in found)

    able = {cls: can_be_split(cls) for cls in schedule.classes}
    kinds: dict[Place, set[Kind]] = {}
    whole: set[Place] = set()
    for instruction in schedule.instructions:
        if instruction.kind.is_fixed:
            continue
        place = place_of(instruction)
        kinds.setdefault(place, set()).add(instruction.kind)
        if not able[schedule.class_of(instruction)]:
            whole.add(place)
    return frozenset(place for place, has in kinds.items() if has == set(_SPLIT)) - whole


def best(plans: Sequence[Plan], target: Target, static_w: float) -> Plan:
    """The plan that serves a target best; the first of equals.

    Args:
        plans: Plans with figures, at least one.
        target: The target; no slowdown, whose reference is not known here.
        static_w: Blocking power of all stages together.
    """

    def rank(plan: Plan) -> tuple[float, ...]:
        assert plan.time_s is not None
        assert plan.energy_j is not None
        # Equal but for rounding is equal.
        time_s, energy_j = float(f"{plan.time_s:.9g}"), plan.energy_j
        if isinstance(target, Fastest | EnergyBudget | PowerCap):
            return time_s, energy_j
        if isinstance(target, EnergyDelayProduct):
            return time_s * energy_j, time_s
        if isinstance(target, Cost):
            return target.per_joule * energy_j + target.per_hour * time_s / 3600, time_s, energy_j
        if isinstance(target, Deadline | Straggler) and time_s > target.time_s * _TOLERANCE:
            return math.inf, time_s, energy_j
        if isinstance(target, Straggler):
            # All wait for the other pipeline, and draw the blocking power as long as that takes.
            return energy_j - static_w * time_s, time_s
        return energy_j, time_s

    return min(plans, key=rank)
