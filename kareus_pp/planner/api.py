"""The two questions a user asks: the plan for a target, and the frontier."""

from __future__ import annotations

import numpy as np

from kareus_pp.errors import PlanError
from kareus_pp.evaluate import evaluate
from kareus_pp.plan import Frontier, Plan, Settings
from kareus_pp.planner.engine import Engine, Solution
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import Problem, build_problem
from kareus_pp.planner.targets import solve_target
from kareus_pp.profile import Profile
from kareus_pp.schedule import Schedule
from kareus_pp.setting import DEFAULT_SETTING, Setting
from kareus_pp.target import Deadline, Target, format_target


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
    options = options or PlannerOptions()
    engine = Engine(build_problem(schedule, profile, options), options)
    solution = solve_target(engine, target, options.time_limit_s)
    return _as_plan(engine.problem, solution, format_target(target))


def frontier(
    schedule: Schedule,
    profile: Profile,
    *,
    points: int,
    options: PlannerOptions | None = None,
    longest_s: float | None = None,
) -> Frontier:
    """Plans from the shortest iteration to the longest useful one, none dominated.

    Args:
        schedule: The schedule, built or recorded.
        profile: Options of every class in it.
        points: Number of deadlines, evenly spaced; dominated plans are left out.
        options: Limits and prices; the time limit holds for each point.
        longest_s: Last deadline; None for the longest useful one.

    Raises:
        PlanError: Fewer than one point is asked for.
        ProfileError: The profile lacks something that the schedule needs.
    """
    if points < 1:
        raise PlanError(f"a frontier of {points} points was asked for; ask for at least 1")
    options = options or PlannerOptions()
    problem = build_problem(schedule, profile, options)
    engine = Engine(problem, options)
    last = engine.longest_useful_s
    if longest_s is not None:
        last = min(last, max(engine.shortest_s, longest_s - problem.overhead_s))
    plans = []
    for deadline in reversed(np.linspace(engine.shortest_s, last, points).tolist()):
        solution = engine.solve(deadline, options.time_limit_s)
        name = format_target(Deadline(deadline + problem.overhead_s))
        plans.append(_as_plan(problem, solution, name))
    return Frontier(tuple(_undominated(plans)))


def _undominated(plans: list[Plan]) -> list[Plan]:
    kept: list[Plan] = []
    for candidate in sorted(plans, key=lambda p: (p.time_s or 0.0, p.energy_j or 0.0)):
        if not kept or (candidate.energy_j or 0.0) < (kept[-1].energy_j or 0.0):
            kept.append(candidate)
    return kept


def _as_plan(problem: Problem, solution: Solution, target: str) -> Plan:
    settings = _settings(problem, solution)
    found = evaluate(problem.schedule, settings, problem.profile)
    bound = problem.energy_j(solution.bound_cost_j, found.time_s)
    return Plan(
        problem.schedule,
        settings,
        time_s=found.time_s,
        energy_j=found.energy_j,
        bound_j=bound,
        gap=max(0.0, found.energy_j - bound) / bound if bound > 0 else None,
        target=target,
        source=problem.profile.device.source,
    )


def _settings(problem: Problem, solution: Solution) -> Settings:
    graph, tables = problem.graph, problem.tables
    flat: list[Setting] = [DEFAULT_SETTING] * graph.size
    for node, cls, position in zip(
        graph.node.tolist(), graph.cls.tolist(), solution.choice.tolist(), strict=True
    ):
        if tables.clock[position] >= 0:
            flat[node] = problem.options[cls][tables.option[position]].setting
    rows, first = [], 0
    for row in problem.schedule.order:
        rows.append(tuple(flat[first : first + len(row)]))
        first += len(row)
    return tuple(rows)
