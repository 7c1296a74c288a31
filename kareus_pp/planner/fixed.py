"""Plans where it is settled which microbatches are split into nanobatches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

from kareus_pp.errors import PlanError
from kareus_pp.evaluate import FREE_SWITCHES, evaluate
from kareus_pp.plan import Plan, Settings
from kareus_pp.planner.engine import Effort, Engine, Solution
from kareus_pp.planner.grouping import make_engine
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import Place, Problem, build_problem
from kareus_pp.planner.smoothing import Smoothed
from kareus_pp.planner.switching import SwitchEngine
from kareus_pp.planner.targets import solve_target
from kareus_pp.profile import Profile
from kareus_pp.schedule import Schedule
from kareus_pp.setting import DEFAULT_SETTING, Setting
from kareus_pp.target import Deadline, Target, format_target


class FixedPlanner:
    """Plans for one set of split microbatches; keeps the linear program warm.

    Args:
        schedule: The schedule, built or recorded.
        profile: Options of every class in it; figures are taken from here.
        smoothed: The profile that options are chosen on.
        options: Limits and prices.
        split: The microbatches that are split; None: every instruction chooses for itself, which
            no plan may, but which bounds them all.

    Attributes:
        problem: The problem as arrays, with the profile given.

    Raises:
        ProfileError: The profile lacks something that the schedule needs.
    """

    def __init__(
        self,
        schedule: Schedule,
        profile: Profile,
        smoothed: Smoothed,
        options: PlannerOptions,
        split: Collection[Place] | None,
    ) -> None:
        self.options = options
        self._smoothed, self._split = smoothed, split
        # Options are chosen on the smoothed profile; figures are those of the profile given.
        problem = build_problem(schedule, smoothed.profile, options, split)
        self.problem = replace(problem, profile=profile)
        limited = options.max_switches is not None or options.min_dwell_s > 0
        self._engine: Engine | SwitchEngine
        if limited or self.problem.switch != FREE_SWITCHES:
            self._engine = SwitchEngine(self.problem, options)
            self.relaxation = self._engine.free
        else:
            self._engine = self.relaxation = make_engine(self.problem, options)

    @property
    def prices_switches(self) -> bool:
        """Whether clock switches have a price or a limit."""
        return isinstance(self._engine, SwitchEngine)

    @cached_property
    def is_feasible(self) -> bool:
        """Whether any plan keeps the limits on clock switches."""
        try:
            return self._engine.shortest_s >= 0
        except PlanError:
            return False

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
        return max(self._engine.shortest_s, self.relaxation.slowest_s) + self.problem.overhead_s

    def plan(self, target: Target, refine_s: float) -> Plan:
        """The plan for a target."""
        solution = solve_target(
            self._engine, self.relaxation, target, refine_s, self.options.power_cap_w
        )
        return self._as_plan(solution, format_target(target))

    def plan_at(self, deadline_s: float, effort: Effort) -> Plan:
        """The plan of least energy at a deadline, overhead included."""
        inside_s = max(self._engine.shortest_s, deadline_s - self.problem.overhead_s)
        return self._as_plan(
            self._engine.solve(inside_s, effort), format_target(Deadline(deadline_s))
        )

    def bound_j(self, time_s: float) -> float:
        """Total energy of the relaxation on the profile given, at a time with overhead."""
        engine = self._given if self._smoothed.methods else self.relaxation
        cost = engine.bound_cost_j(max(engine.shortest_s, time_s - self.problem.overhead_s))
        return self.problem.energy_j(cost, time_s)

    def switch_bound_j(self, deadline_s: float, time_limit_s: float) -> float:
        """As `bound_j`, clock switches counted."""
        inside_s = deadline_s - self.problem.overhead_s
        if isinstance(self._engine, SwitchEngine):
            return self._engine.switch_bound_j(inside_s, time_limit_s)
        return self._engine.bound_energy_j(max(inside_s, self._engine.shortest_s))

    def _as_plan(self, solution: Solution, target: str) -> Plan:
        problem = self.problem
        settings = _settings(problem, solution)
        found = evaluate(problem.schedule, settings, problem.profile, problem.switch)
        if self._smoothed.methods:
            bound = self.bound_j(found.time_s)
        else:
            bound = problem.energy_j(solution.bound_cost_j, found.time_s)
        return Plan(
            problem.schedule,
            settings,
            time_s=found.time_s,
            energy_j=found.energy_j,
            bound_j=bound,
            gap=relative_gap(found.energy_j, bound),
            target=target,
            source=problem.profile.device.source,
            switch_delay_s=problem.switch.delay_s,
            switch_energy_j=problem.switch.energy_j,
        )

    @cached_property
    def _given(self) -> Engine:
        """The engine of the profile as given, for bounds where planning is on a smoothed one."""
        problem = build_problem(
            self.problem.schedule, self.problem.profile, self.options, self._split
        )
        return make_engine(problem, self.options)


def relative_gap(energy_j: float, bound_j: float) -> float | None:
    """How far an energy is above its bound, relatively; None where that is not above 0."""
    return max(0.0, energy_j - bound_j) / bound_j if bound_j > 0 else None


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
