"""The integer program of a whole problem, through PuLP, for problems small enough to prove."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from kareus_pp.planner.linear import add_variable, make_solver
from kareus_pp.planner.options import Solver
from kareus_pp.planner.problem import IntArray, Problem

# A program of this many binaries is proven in well under a second.
SMALL = 400


@dataclass(frozen=True)
class Limit:
    """A row `cost_weight * (sum of effective energies) + time_weight * end <= most`."""

    cost_weight: float
    time_weight: float
    most: float


@dataclass(frozen=True)
class ExactResult:
    """Outcome of an integer program.

    Attributes:
        choice: Positions of the options, or None where no choice was found.
        proven: True where no better choice exists, or none at all.
    """

    choice: IntArray | None
    proven: bool


def binaries(problem: Problem) -> int:
    """Number of binary variables of the integer program."""
    sizes = problem.tables.ptr[1:] - problem.tables.ptr[:-1]
    return int(sizes[problem.graph.cls].sum())


def solve_exactly(
    problem: Problem,
    deadline_s: float,
    solver: Solver,
    time_limit_s: float,
    *,
    cost_weight: float = 1.0,
    time_weight: float = 0.0,
    limit: Limit | None = None,
) -> ExactResult:
    """Minimise a weighted sum of effective energies and iteration time.

    Binary `x[i, o]` for each instruction and option, a start time for each instruction, a row for
    each dependency.

    Args:
        problem: The problem.
        deadline_s: Latest end of the iteration, overhead left out.
        solver: Solver behind PuLP.
        time_limit_s: Time limit in seconds.
        cost_weight: Weight of the sum of effective energies.
        time_weight: Weight of the end of the iteration, in watts.
        limit: A further row.
    """
    graph, tables = problem.graph, problem.tables
    second = 1.0 / (float(problem.slowest_s.mean()) or 1.0)
    model = pulp.LpProblem("pipeline", pulp.LpMinimize)
    # A hair of room, so that what fits exactly is not lost to rounding.
    latest = deadline_s * second * (1 + 1e-10) + 1e-10
    end = add_variable(model, "end", 0, latest)
    begin = [add_variable(model, f"y{i}", 0, latest) for i in range(graph.size)]
    pick: list[dict[int, Any]] = []
    duration = []
    cost: list[tuple[Any, float]] = []
    for i, cls in enumerate(graph.cls.tolist()):
        positions = range(int(tables.ptr[cls]), int(tables.ptr[cls + 1]))
        own = {o: add_variable(model, f"x{i}_{o}", 0, 1, pulp.LpInteger) for o in positions}
        model.addConstraint(pulp.lpSum(own.values()) == 1)
        pick.append(own)
        duration.append(
            pulp.LpAffineExpression([(x, float(tables.time[o]) * second) for o, x in own.items()])
        )
        cost += [(x, float(tables.cost[o])) for o, x in own.items()]
    for i in range(graph.size):
        for k in range(graph.in_ptr[i], graph.in_ptr[i + 1]):
            p, lag = int(graph.in_node[k]), float(graph.in_lag[k]) * second
            model.addConstraint(begin[i] - begin[p] - duration[p] >= lag)
        if graph.out_ptr[i] == graph.out_ptr[i + 1]:
            model.addConstraint(end - begin[i] - duration[i] >= 0)
    # The solver's tolerances are absolute: in units of what the choice of one option may change.
    spread = tables.cost[tables.ptr[:-1]] - tables.cost[tables.ptr[1:] - 1]
    worth = cost_weight * float(spread[graph.cls].mean()) + time_weight / second
    joule = 1.0 / (worth or 1.0)
    model.setObjective(
        pulp.LpAffineExpression(
            [(x, cost_weight * c * joule) for x, c in cost] + [(end, time_weight / second * joule)]
        )
    )
    if limit is not None:
        size = abs(limit.most) + abs(limit.time_weight) * deadline_s
        size += abs(limit.cost_weight) * float(np.abs(tables.cost[tables.ptr[:-1]]).max())
        scale = 1.0 / (size or 1.0)
        row = [(x, limit.cost_weight * c * scale) for x, c in cost]
        row.append((end, limit.time_weight / second * scale))
        model.addConstraint(pulp.LpAffineExpression(row) <= limit.most * scale + 1e-10)
    status = model.solve(make_solver(solver, timeLimit=time_limit_s, gapRel=1e-9))
    if status != pulp.LpStatusOptimal:
        return ExactResult(None, proven=status == pulp.LpStatusInfeasible)
    choice = graph.cls.copy()
    for i, own in enumerate(pick):
        choice[i] = max(own, key=lambda o: own[o].varValue or 0.0)
    return ExactResult(choice, proven=model.sol_status == pulp.LpSolutionOptimal)
