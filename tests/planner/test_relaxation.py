"""The linear bound against an independent plain linear program, and where it is reduced."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_matrix
from scipy.spatial import ConvexHull

from kareus_pp.builders import build_1f1b, build_gpipe
from kareus_pp.planner import Planner, PlannerOptions
from kareus_pp.planner.engine import Engine
from kareus_pp.planner.grouping import LargeEngine, make_engine, reduce
from kareus_pp.planner.linear import LinearProgram
from kareus_pp.planner.problem import build_problem
from kareus_pp.profile import Profile
from kareus_pp.profile_csv import load_any_profile
from kareus_pp.schedule import Schedule
from kareus_pp.target import Deadline
from tests.planner.test_switches import gpu

PLAIN = PlannerOptions(smoothing="none")


def plain_bound_j(schedule: Schedule, profile: Profile, time_s: float) -> float:
    """Least energy at an iteration time: start times and convex weights of all options."""
    nodes = schedule.instructions
    rows, cols, data, right = [], [], [], []
    cost: list[float] = [0.0] * len(nodes)
    first = []
    for node in nodes:
        first.append(len(cost))
        watts = profile.blocking_power_w[node.stage]
        cost += [o.energy_j - watts * o.time_s for o in profile.options[schedule.class_of(node)]]
    times = [[o.time_s for o in profile.options[schedule.class_of(n)]] for n in nodes]
    lines = [(e.before, e.after) for e in schedule.edges]
    lines += [(n, -1) for n in range(len(nodes))]
    for number, (before, after) in enumerate(lines):
        entries = [(before, 1.0), *((first[before] + k, t) for k, t in enumerate(times[before]))]
        if after >= 0:
            entries.append((after, -1.0))
        for col, value in entries:
            rows.append(number)
            cols.append(col)
            data.append(value)
        right.append(0.0 if after >= 0 else time_s)
    ones = [(n, first[n] + k) for n in range(len(nodes)) for k in range(len(times[n]))]
    result = linprog(
        cost,
        A_ub=coo_matrix((data, (rows, cols)), shape=(len(lines), len(cost))),
        b_ub=right,
        A_eq=coo_matrix(
            (np.ones(len(ones)), tuple(zip(*ones, strict=True))), shape=(len(nodes), len(cost))
        ),
        b_eq=np.ones(len(nodes)),
        method="highs",
    )
    return float(result.fun) + sum(profile.blocking_power_w) * time_s


@pytest.mark.parametrize("microbatches", [12, 24])
@pytest.mark.parametrize("name", ["gpt3-175b+a100_sxm", "bloom+a100_sxm", "gpt3-175b+a40"])
def test_gaps_hold_against_a_plain_linear_program(
    shared_data: Path, name: str, microbatches: int
) -> None:
    path = shared_data / "sosp24" / "stage_profile" / f"{name}.csv"
    profile = load_any_profile(path, [70.38 if "a40" in name else 83.64])
    schedule = build_1f1b(8, microbatches)
    planner = Planner(schedule, profile)
    for factor in (1.0, 1.05):
        deadline = factor * planner.shortest_s
        plan = planner.plan(Deadline(deadline), refine_s=0.5)
        assert (plan.time_s or 0.0) <= deadline * (1 + 1e-9)
        # The bound is reported at the plan's own time, which may be a hair before the deadline.
        idle = sum(profile.blocking_power_w) * (deadline - (plan.time_s or 0.0))
        bound = plain_bound_j(schedule, profile, deadline * (1 + 1e-9))
        assert math.isclose((plan.bound_j or 0.0) + idle, bound, rel_tol=1e-6)
        assert (plan.energy_j or 0.0) >= bound - idle - 1e-6 * bound
        # Prototypes reach 0.7 % at the very worst of these; broken searches reach several percent.
        assert (plan.gap or 1.0) < 0.01


@pytest.mark.parametrize("factor", [1.0, 1.03, 1.2])
def test_the_reduced_relaxation_bounds_the_full_one(factor: float) -> None:
    problem = build_problem(build_1f1b(4, 40), gpu(4), PLAIN)
    full, large = Engine(problem, PLAIN), LargeEngine(problem, PLAIN)
    large.reduction = reduce(problem, 120)
    assert large.reduction.problem.graph.size < 150 < problem.graph.size
    deadline = factor * full.shortest_s
    exact = full.bound(deadline).cost_j
    bound = large.bound(deadline).cost_j
    assert bound <= exact + 1e-6 * exact
    assert bound >= exact - 0.01 * full.bound_energy_j(deadline)
    solution = large.solve(deadline)
    assert solution.time_s <= deadline * (1 + 1e-9)
    assert solution.cost_j >= exact - 1e-6 * exact


def test_any_nonnegative_flow_bounds_from_below() -> None:
    problem = build_problem(build_1f1b(4, 40), gpu(4), PLAIN)
    large = LargeEngine(problem, PLAIN)
    large.reduction = reduce(problem, 120)
    deadline = 1.05 * large.shortest_s
    wrong = large.program.solve(1.02 * deadline)
    expanded = large._expanded(wrong)
    bound = large._dual_bound(expanded.price_w, wrong, deadline)
    assert bound <= Engine(problem, PLAIN).bound(deadline).cost_j + 1e-6


def test_cbc_and_highs_agree() -> None:
    problem = build_problem(build_1f1b(3, 4), gpu(3), PLAIN)
    deadline = 1.05 * Engine(problem, PLAIN).shortest_s
    first, second = (LinearProgram(problem, name).solve(deadline) for name in ("highs", "cbc"))
    assert math.isclose(first.cost_j, second.cost_j, rel_tol=1e-6)
    schedule = build_1f1b(2, 2)
    plans = [
        Planner(schedule, gpu(2), PlannerOptions(solver=name)).plan(Deadline(1.5))
        for name in ("highs", "cbc")
    ]
    assert math.isclose(plans[0].energy_j or 0.0, plans[1].energy_j or 1.0, rel_tol=1e-6)


def test_the_hull_is_the_lower_convex_hull() -> None:
    random = np.random.default_rng(0)
    from kareus_pp.planner.problem import lower_hull, pareto

    for _ in range(50):
        time = np.sort(random.random(20))
        cost = random.random(20)
        kept = pareto(cost)
        own = lower_hull(time[kept], cost[kept])
        points = np.stack([time[kept], cost[kept]], axis=1)
        if len(points) < 3:
            continue
        hull = ConvexHull(points)
        below = {
            int(v)
            for simplex, equation in zip(hull.simplices, hull.equations, strict=True)
            if equation[1] < 0
            for v in simplex
        }
        assert set(own.tolist()) == below


def test_only_schedules_with_a_steady_middle_are_reduced() -> None:
    steady = build_problem(build_1f1b(4, 500), gpu(4), PLAIN)
    assert isinstance(make_engine(steady, PLAIN), LargeEngine)
    turning = build_problem(build_gpipe(4, 500), gpu(4), PLAIN)
    assert not isinstance(make_engine(turning, PLAIN), LargeEngine)
    small = build_problem(build_1f1b(4, 40), gpu(4), PLAIN)
    assert not isinstance(make_engine(small, PLAIN), LargeEngine)
