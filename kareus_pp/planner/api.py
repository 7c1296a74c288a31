"""The two questions a user asks: the plan for a target, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from kareus_pp.errors import PlanError, TargetError
from kareus_pp.plan import Frontier, Plan
from kareus_pp.planner.engine import QUICK
from kareus_pp.planner.fixed import FixedPlanner, relative_gap
from kareus_pp.planner.grouping import LARGE
from kareus_pp.planner.joint import Aim, JointRelaxation
from kareus_pp.planner.linear import usable_solver
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import Place, Problem
from kareus_pp.planner.smoothing import smooth
from kareus_pp.planner.splitting import best, splittable
from kareus_pp.profile import Profile
from kareus_pp.schedule import Schedule
from kareus_pp.target import (
    Deadline,
    LeastEnergy,
    PowerCap,
    Slowdown,
    Straggler,
    Target,
    format_target,
)

# Where microbatches can be split, the time limit is shared by so many plans, of which the best is
# taken.
PARTS = 8
# How often the microbatches to split are chosen anew, at the time of the best plan so far.
SPLIT_ROUNDS = 2
# At how many deadlines of a frontier the microbatches to split are chosen anew.
SPLIT_SAMPLES = 5


def plan(
    schedule: Schedule, profile: Profile, target: Target, options: PlannerOptions | None = None
) -> Plan:
    """The plan of least energy for a target.

    A deadline below the shortest iteration is answered with the shortest; compare `time_s`.

    Args:
        schedule: The schedule, built or recorded.
        profile: Options of every class in it.
        target: What to aim at.
        options: Limits and prices; None for the defaults.

    Raises:
        ProfileError: The profile lacks something that the schedule needs.
        TargetError: The target cannot be met; the message says what can.
    """
    return Planner(schedule, profile, options).plan(target)


def frontier(
    schedule: Schedule,
    profile: Profile,
    *,
    points: int,
    options: PlannerOptions | None = None,
    longest_s: float | None = None,
) -> Frontier:
    """Plans from the shortest iteration to the one of least energy, none dominated.

    Args:
        schedule: The schedule, built or recorded.
        profile: Options of every class in it.
        points: Number of deadlines, evenly spaced; dominated plans are left out.
        options: Limits and prices.
        longest_s: Last deadline; None for the iteration of least energy.

    Raises:
        PlanError: Fewer than one point is asked for.
        ProfileError: The profile lacks something that the schedule needs.
        TargetError: The power cap cannot be met.
    """
    planner = Planner(schedule, profile, options)
    last = planner.least_energy_s
    if longest_s is not None:
        last = min(last, longest_s)
    return undominated(planner.sweep(points, last))


class Planner:
    """Answers several questions about one schedule and profile; keeps the linear programs warm.

    Where the profile has options that overlap, forward and backward of a microbatch are both split
    or both whole. Plans are made with none split, with all, and with those that the joint
    relaxation proposes; the best is taken, and that relaxation bounds it. Very large schedules are
    split altogether or not at all.

    Args:
        schedule: The schedule, built or recorded.
        profile: Options of every class in it.
        options: Limits and prices; None for the defaults.

    Raises:
        ProfileError: The profile lacks something that the schedule needs.
    """

    def __init__(
        self, schedule: Schedule, profile: Profile, options: PlannerOptions | None = None
    ) -> None:
        self.options = options or PlannerOptions()
        self.options = replace(self.options, solver=usable_solver(self.options.solver))
        self._schedule, self._profile = schedule, profile
        self.smoothed = smooth(profile, self.options.smoothing)
        self._splittable = splittable(schedule, self.smoothed.profile, self.options)
        self._planners: dict[frozenset[Place], FixedPlanner] = {}
        self._free = self._made(None) if self._splittable else self._for(frozenset())

    def _made(self, split: frozenset[Place] | None) -> FixedPlanner:
        return FixedPlanner(self._schedule, self._profile, self.smoothed, self.options, split)

    def _for(self, split: frozenset[Place]) -> FixedPlanner:
        if split not in self._planners:
            self._planners[split] = self._made(split)
        return self._planners[split]

    @cached_property
    def _first(self) -> tuple[FixedPlanner, ...]:
        """The planners that every question is put to: those for the two ends of the frontier."""
        if not self._splittable:
            return (self._free,)
        none = self._for(frozenset())
        part_s = self.options.time_limit_s / PARTS
        asked = dict.fromkeys(
            [
                none,
                self._for(self._splittable),
                *self._proposed("shortest", part_s),
                *self._proposed("least energy", part_s),
            ]
        )
        return tuple(planner for planner in asked if planner.is_feasible) or (none,)

    def _proposed(self, aim: Aim, limit_s: float) -> list[FixedPlanner]:
        """Planners for the microbatches worth splitting."""
        if self._joint is None:
            return []
        planners = [self._for(split) for split in self._joint.splits(aim, limit_s)]
        return [planner for planner in planners if planner.is_feasible]

    @cached_property
    def _joint(self) -> JointRelaxation | None:
        return self._joint_of(self.smoothed.profile)

    @cached_property
    def _joint_given(self) -> JointRelaxation | None:
        """The relaxation of the profile as given, for bounds."""
        return self._joint_of(self._profile) if self.smoothed.methods else self._joint

    def _joint_of(self, profile: Profile) -> JointRelaxation | None:
        if len(self._schedule.instructions) > LARGE:
            return None
        return JointRelaxation(self._schedule, profile, self.options, self._splittable)

    @property
    def problem(self) -> Problem:
        """The problem as arrays; where microbatches can be split, with all options of both."""
        return self._free.problem

    @property
    def method(self) -> str:
        """How plans are made, in words."""
        name = "HiGHS" if self.options.solver == "highs" else "CBC"
        search = (
            "runs of equal clock, annealed"
            if self._free.prices_switches
            else "rounded and annealed"
        )
        return f"linear relaxation ({name}), {search}"

    @property
    def smoothing(self) -> str:
        """Treatment of noise on the profile."""
        return self.smoothed.name

    @cached_property
    def shortest_s(self) -> float:
        """Shortest iteration in seconds, overhead included."""
        return min(planner.shortest_s for planner in self._first)

    @cached_property
    def least_energy_s(self) -> float:
        """Iteration of least total energy in seconds; a longer one only serves a straggler."""
        times = [planner.least_energy_s for planner in self._first]
        if len(times) == 1:
            return times[0]
        energies = [p.bound_j(time_s) for p, time_s in zip(self._first, times, strict=True)]
        return min(zip(energies, times, strict=True))[1]

    @cached_property
    def longest_useful_s(self) -> float:
        """Iteration beyond which even the energy above the blocking power falls no more."""
        return max(planner.longest_useful_s for planner in self._first)

    def plan(self, target: Target, refine_s: float | None = None) -> Plan:
        """The plan for a target, as `kareus_pp.planner.plan`.

        Args:
            target: What to aim at.
            refine_s: Seconds to go on improving; None: the time limit of the options.
        """
        limit_s = self.options.time_limit_s if refine_s is None else refine_s
        if not self._splittable:
            return self._free.plan(target, limit_s)
        asked = self._resolved(target)
        part_s = limit_s / PARTS
        plans, fault = self._plans(self._first, asked, part_s)
        if not plans:
            assert fault is not None
            raise fault
        watts, tried = self.problem.static_w, set(self._first)
        for _ in range(SPLIT_ROUNDS):
            end_s = best(plans, asked, watts).time_s
            assert end_s is not None
            if isinstance(asked, Deadline | Straggler):
                end_s = max(end_s, min(asked.time_s, self.least_energy_s))
            further = [p for p in self._proposed(end_s, part_s) if p not in tried]
            if not further:
                break
            tried.update(further)
            plans += self._plans(further, asked, part_s)[0]
        return self._bounded(best(plans, asked, watts), format_target(target))

    def _resolved(self, target: Target) -> Target:
        """The target with times that some way of splitting can do."""
        if isinstance(target, Slowdown):
            target = Deadline(self.shortest_s * (1 + target.percent / 100))
        if isinstance(target, Deadline | Straggler):
            return replace(target, time_s=max(target.time_s, self.shortest_s))
        return target

    @staticmethod
    def _plans(
        planners: Sequence[FixedPlanner], target: Target, refine_s: float
    ) -> tuple[list[Plan], TargetError | None]:
        """The plans of those that meet a target, and the first complaint of one that does not."""
        plans, fault = [], None
        for planner in planners:
            try:
                plans.append(planner.plan(target, refine_s))
            except TargetError as error:
                fault = fault or error
        return plans, fault

    def _bounded(self, plan: Plan, target: str) -> Plan:
        """The plan with the bound on all ways of splitting."""
        assert plan.time_s is not None
        assert plan.energy_j is not None
        bound_j = self._free.bound_j(plan.time_s)
        if self._joint_given is not None:
            shares = self._joint_given.at(plan.time_s)
            if shares is not None:
                bound_j = max(bound_j, self.problem.energy_j(shares.cost_j, plan.time_s))
        gap = relative_gap(plan.energy_j, bound_j)
        return replace(plan, bound_j=bound_j, gap=gap, target=target)

    def switch_bound_j(self, deadline_s: float, time_limit_s: float = 10.0) -> float:
        """Energy below which no plan within a deadline can be, clock switches counted.

        Unlike `Plan.bound_j` it knows the price and the number of switches; it takes longer, and is
        the same where they are free.

        Args:
            deadline_s: Deadline in seconds, overhead included.
            time_limit_s: Seconds after which the best bound so far is returned.

        Raises:
            ConfigError: HiGHS is not installed.
        """
        return self._free.switch_bound_j(deadline_s, time_limit_s)

    def sweep(self, points: int, longest_s: float, refine_s: float = 0.0) -> tuple[Plan, ...]:
        """Plans at evenly spaced deadlines from the shortest iteration on, in order of time.

        Args:
            points: Number of deadlines.
            longest_s: Last deadline in seconds, overhead included.
            refine_s: Seconds to go on improving each plan after a quick first one.

        Raises:
            PlanError: Fewer than one point is asked for.
            TargetError: The power cap cannot be met.
        """
        if points < 1:
            raise PlanError(f"a frontier of {points} points was asked for; ask for at least 1")
        first_s, cap_w = self.shortest_s, self.options.power_cap_w
        plans = []
        if cap_w is not None:
            plans.append(self.plan(PowerCap(cap_w), refine_s))
            assert plans[0].time_s is not None
            first_s = plans[0].time_s
        last_s = max(first_s, longest_s)
        effort = replace(QUICK, refine_s=refine_s / (2 if self._splittable else 1))
        # Downwards from the longest: the first relaxation is trivial, the others are warm.
        for deadline_s in reversed(np.linspace(first_s, last_s, points).tolist()):
            planners = dict.fromkeys([*self._first, *self._sampled(deadline_s, first_s, last_s)])
            able = [p for p in planners if p.shortest_s <= deadline_s] or [self._shortest]
            found = [planner.plan_at(deadline_s, effort) for planner in able]
            chosen = best(found, LeastEnergy(), self.problem.static_w)
            if self._splittable:
                chosen = self._bounded(chosen, chosen.target)
            plans.append(chosen)
        if cap_w is not None:
            plans = [p for p in plans if _power_w(p) <= cap_w]
        return tuple(sorted(plans, key=lambda p: (p.time_s or 0.0, p.energy_j or 0.0)))

    def _sampled(self, time_s: float, first_s: float, last_s: float) -> list[FixedPlanner]:
        """Planners for what is worth splitting at the two nearest of a few times in a range."""
        if not self._splittable or self._joint is None:
            return []
        times = np.linspace(first_s, last_s, SPLIT_SAMPLES)
        nearest = sorted(times.tolist(), key=lambda at: abs(at - time_s))[:2]
        shares = [self._joint.at(at) for at in nearest]
        planners = [self._for(found.rounded(0.5)) for found in shares if found is not None]
        return [planner for planner in planners if planner.is_feasible]

    @property
    def _shortest(self) -> FixedPlanner:
        return min(self._first, key=lambda planner: planner.shortest_s)


def undominated(plans: Sequence[Plan]) -> Frontier:
    """The plans that no other beats in both time and energy."""
    kept: list[Plan] = []
    for candidate in sorted(plans, key=lambda p: (p.time_s or 0.0, p.energy_j or 0.0)):
        if not kept or (candidate.energy_j or 0.0) < (kept[-1].energy_j or 0.0):
            kept.append(candidate)
    return Frontier(tuple(kept))


def _power_w(plan: Plan) -> float:
    assert plan.energy_j is not None
    assert plan.time_s is not None
    return plan.energy_j / plan.time_s if plan.time_s > 0 else 0.0
