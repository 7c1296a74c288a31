"""The two questions a user asks: the plan for a target, and the frontier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kareus_pp.errors import PlanError
from kareus_pp.evaluate import FREE_SWITCHES, evaluate
from kareus_pp.plan import Frontier, Plan, Settings
from kareus_pp.planner.engine import QUICK, Engine, Solution
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import Problem, build_problem
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
    options = options or PlannerOptions()
    engine, relaxation = _engines(schedule, profile, options)
    solution = solve_target(engine, relaxation, target, options.time_limit_s, options.power_cap_w)
    return _as_plan(engine.problem, solution, format_target(target))


def frontier(
    schedule: Schedule,
    profile: Profile,
    *,
    points: int,
    options: PlannerOptions | None = None,
    longest_s: float | None = None,
    refine_s: float = 0.0,
) -> Frontier:
    """Plans from the shortest iteration to the longest useful one, none dominated.

    Args:
        schedule: The schedule, built or recorded.
        profile: Options of every class in it.
        points: Number of deadlines, evenly spaced; dominated plans are left out.
        options: Limits and prices.
        longest_s: Last deadline; None for the longest useful one.
        refine_s: Seconds to go on improving each point after a quick first plan.

    Raises:
        PlanError: Fewer than one point is asked for.
        ProfileError: The profile lacks something that the schedule needs.
    """
    if points < 1:
        raise PlanError(f"a frontier of {points} points was asked for; ask for at least 1")
    options = options or PlannerOptions()
    engine, relaxation = _engines(schedule, profile, options)
    problem = engine.problem
    last = engine.longest_useful_s
    if longest_s is not None:
        last = min(last, max(engine.shortest_s, longest_s - problem.overhead_s))
    effort = replace(QUICK, refine_s=refine_s)
    plans = []
    # Downwards from the longest: the first relaxation is trivial, the others are warm.
    for deadline in reversed(np.linspace(engine.shortest_s, last, points).tolist()):
        solution = engine.solve(deadline, effort)
        name = format_target(Deadline(deadline + problem.overhead_s))
        plans.append(_as_plan(problem, solution, name))
    if options.power_cap_w is not None:
        capped = solve_target(
            engine, relaxation, PowerCap(options.power_cap_w), refine_s, options.power_cap_w
        )
        plans = [p for p in plans if _power_w(p) <= options.power_cap_w]
        plans.append(_as_plan(problem, capped, format_target(PowerCap(options.power_cap_w))))
    return Frontier(tuple(_undominated(plans)))


def _power_w(plan: Plan) -> float:
    assert plan.energy_j is not None
    assert plan.time_s is not None
    return plan.energy_j / plan.time_s if plan.time_s > 0 else 0.0


def _engines(
    schedule: Schedule, profile: Profile, options: PlannerOptions
) -> tuple[Engine | SwitchEngine, Engine]:
    """The engine that these options need, and the one that holds its relaxation."""
    problem = build_problem(schedule, profile, options)
    limited = options.max_switches is not None or options.min_dwell_s > 0
    if limited or problem.switch != FREE_SWITCHES:
        engine = SwitchEngine(problem, options)
        return engine, engine.free
    free = Engine(problem, options)
    return free, free


def _undominated(plans: list[Plan]) -> list[Plan]:
    kept: list[Plan] = []
    for candidate in sorted(plans, key=lambda p: (p.time_s or 0.0, p.energy_j or 0.0)):
        if not kept or (candidate.energy_j or 0.0) < (kept[-1].energy_j or 0.0):
            kept.append(candidate)
    return kept


def _as_plan(problem: Problem, solution: Solution, target: str) -> Plan:
    settings = _settings(problem, solution)
    found = evaluate(problem.schedule, settings, problem.profile, problem.switch)
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
        switch_delay_s=problem.switch.delay_s,
        switch_energy_j=problem.switch.energy_j,
    )


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
