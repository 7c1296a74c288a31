"""The two questions a user asks: the plan for a target, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from kareus_pp.errors import PlanError
from kareus_pp.evaluate import FREE_SWITCHES, evaluate
from kareus_pp.plan import Frontier, Plan, Settings
from kareus_pp.planner.engine import QUICK, Engine, Solution
from kareus_pp.planner.grouping import make_engine
from kareus_pp.planner.linear import usable_solver
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import Problem, build_problem
from kareus_pp.planner.smoothing import smooth
from kareus_pp.planner.switching import SwitchEngine
from kareus_pp.planner.targets import solve_target
from kareus_pp.profile import Profile
from kareus_pp.schedule import Schedule
from kareus_pp.setting import DEFAULT_SETTING, Setting
from kareus_pp.target import Deadline, PowerCap, Target, format_target


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
    """Answers several questions about one schedule and profile; keeps the linear program warm.

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
        self.smoothed = smooth(profile, self.options.smoothing)
        # Options are chosen on the smoothed profile; figures are those of the profile given.
        smoothed = build_problem(schedule, self.smoothed.profile, self.options)
        self.problem = replace(smoothed, profile=profile)
        limited = self.options.max_switches is not None or self.options.min_dwell_s > 0
        self._engine: Engine | SwitchEngine
        if limited or self.problem.switch != FREE_SWITCHES:
            self._engine = SwitchEngine(self.problem, self.options)
            self._relaxation = self._engine.free
        else:
            self._engine = self._relaxation = make_engine(self.problem, self.options)

    @property
    def method(self) -> str:
        """How plans are made, in words."""
        name = "HiGHS" if self.options.solver == "highs" else "CBC"
        priced = isinstance(self._engine, SwitchEngine)
        search = "runs of equal clock, annealed" if priced else "rounded and annealed"
        return f"linear relaxation ({name}), {search}"

    @property
    def smoothing(self) -> str:
        """Treatment of noise on the profile."""
        return self.smoothed.name

    @property
    def shortest_s(self) -> float:
        """Shortest iteration in seconds, overhead included."""
        return self._engine.shortest_s + self.problem.overhead_s

    @property
    def least_energy_s(self) -> float:
        """Iteration of least total energy in seconds; a longer one only serves a straggler."""
        return self._engine.longest_useful_s + self.problem.overhead_s

    @property
    def longest_useful_s(self) -> float:
        """Iteration beyond which even the energy above the blocking power falls no more."""
        return max(self._engine.shortest_s, self._relaxation.slowest_s) + self.problem.overhead_s

    def plan(self, target: Target, refine_s: float | None = None) -> Plan:
        """The plan for a target, as `kareus_pp.planner.plan`."""
        limit = self.options.time_limit_s if refine_s is None else refine_s
        solution = solve_target(
            self._engine, self._relaxation, target, limit, self.options.power_cap_w
        )
        return self._as_plan(solution, format_target(target))

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
        deadline_s -= self.problem.overhead_s
        if isinstance(self._engine, SwitchEngine):
            return self._engine.switch_bound_j(deadline_s, time_limit_s)
        return self._engine.bound_energy_j(max(deadline_s, self._engine.shortest_s))

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
        first = self._engine.shortest_s
        cap_w = self.options.power_cap_w
        plans = []
        if cap_w is not None:
            plans.append(self.plan(PowerCap(cap_w), refine_s))
            assert plans[0].time_s is not None
            first = plans[0].time_s - self.problem.overhead_s
        last = max(first, longest_s - self.problem.overhead_s)
        effort = replace(QUICK, refine_s=refine_s)
        # Downwards from the longest: the first relaxation is trivial, the others are warm.
        for deadline in reversed(np.linspace(first, last, points).tolist()):
            solution = self._engine.solve(deadline, effort)
            name = format_target(Deadline(deadline + self.problem.overhead_s))
            plans.append(self._as_plan(solution, name))
        if cap_w is not None:
            plans = [p for p in plans if _power_w(p) <= cap_w]
        return tuple(sorted(plans, key=lambda p: (p.time_s or 0.0, p.energy_j or 0.0)))

    def _as_plan(self, solution: Solution, target: str) -> Plan:
        problem = self.problem
        settings = _settings(problem, solution)
        found = evaluate(problem.schedule, settings, problem.profile, problem.switch)
        cost = solution.bound_cost_j
        if self.smoothed.methods:
            cost = self._given.bound_cost_j(
                max(self._given.shortest_s, found.time_s - problem.overhead_s)
            )
        bound = problem.energy_j(cost, found.time_s)
        return Plan(
            problem.schedule,
            settings,
            time_s=found.time_s,
            energy_j=found.energy_j,
            bound_j=bound,
            gap=max(0.0, found.energy_j - bound) / bound if bound > 0 else None,
            target=target,
            source=problem.profile.device.source,
            switch_delay_s=problem.switch.delay_s,
            switch_energy_j=problem.switch.energy_j,
        )

    @cached_property
    def _given(self) -> Engine:
        """The engine of the profile as given, for bounds where planning is on a smoothed one."""
        problem = build_problem(self.problem.schedule, self.problem.profile, self.options)
        return make_engine(problem, self.options)


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


def _settings(problem: Problem, solution: Solution) -> Settings:
    graph, tables = problem.graph, problem.tables
    clock = tables.wide_clock if solution.wide else tables.clock
    option = tables.wide_option if solution.wide else tables.option
    flat: list[Setting] = [DEFAULT_SETTING] * graph.size
    for node, cls, position in zip(
        graph.node.tolist(), graph.cls.tolist(), solution.choice.tolist(), strict=True
    ):
        if clock[position] >= 0:
            flat[node] = problem.options[cls][option[position]].setting
    rows, first = [], 0
    for row in problem.schedule.order:
        rows.append(tuple(flat[first : first + len(row)]))
        first += len(row)
    return tuple(rows)
