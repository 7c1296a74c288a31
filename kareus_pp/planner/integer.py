"""The integer program, through PuLP: the whole problem where it is small, else a window of it."""

from __future__ import annotations

from dataclasses import dataclass

import pulp

from kareus_pp.planner.linear import make_solver
from kareus_pp.planner.options import Solver
from kareus_pp.planner.problem import FloatArray, IntArray, Problem


@dataclass(frozen=True)
class WindowResult:
    """Outcome of an integer program.

    Attributes:
        choice: Positions of the options, or None where the program found nothing better.
        proven: True where no better choice exists.
    """

    choice: IntArray | None
    proven: bool


def optimise_window(
    problem: Problem,
    window: IntArray,
    start: FloatArray,
    choice: IntArray,
    deadline_s: float,
    solver: Solver,
    time_limit_s: float,
) -> WindowResult:
    """Re-optimise the instructions in a window exactly; all others keep start and option.

    Binary `x[i, o]` for each instruction and option, a start time for each instruction, a row for
    each dependency; minimises the sum of effective energies.

    Args:
        problem: The problem.
        window: Nodes to re-optimise.
        start: Feasible start times of all nodes, in seconds.
        choice: Positions of the present options of all nodes.
        deadline_s: End of the iteration, overhead left out.
        solver: Solver behind PuLP.
        time_limit_s: Time limit in seconds.
    """
    graph, tables = problem.graph, problem.tables
    inside = set(window.tolist())
    scale = 1.0 / (float(problem.slowest_s.mean()) or 1.0)
    model = pulp.LpProblem("window", pulp.LpMinimize)
    begin = {i: pulp.LpVariable(f"y{i}", 0, deadline_s * scale) for i in window.tolist()}
    pick: dict[int, dict[int, pulp.LpVariable]] = {}
    duration: dict[int, pulp.LpAffineExpression] = {}
    objective = []
    for i in window.tolist():
        shown = range(int(tables.ptr[graph.cls[i]]), int(tables.ptr[graph.cls[i] + 1]))
        pick[i] = {o: pulp.LpVariable(f"x{i}_{o}", cat="Binary") for o in shown}
        model.addConstraint(pulp.lpSum(pick[i].values()) == 1)
        duration[i] = pulp.LpAffineExpression(
            [(x, float(tables.time[o]) * scale) for o, x in pick[i].items()]
        )
        objective += [(x, float(tables.cost[o])) for o, x in pick[i].items()]
    model.setObjective(pulp.LpAffineExpression(objective))
    for i in window.tolist():
        release = 0.0
        for k in range(graph.in_ptr[i], graph.in_ptr[i + 1]):
            p, lag = int(graph.in_node[k]), float(graph.in_lag[k])
            if p in inside:
                model.addConstraint(begin[i] - begin[p] - duration[p] >= lag * scale)
            else:
                release = max(release, float(start[p] + tables.time[choice[p]]) + lag)
        begin[i].lowBound = release * scale
        due = deadline_s
        for k in range(graph.out_ptr[i], graph.out_ptr[i + 1]):
            s = int(graph.out_node[k])
            if s not in inside:
                due = min(due, float(start[s] - graph.out_lag[k]))
        # A hair of room, so that what fits exactly is not lost to rounding; checked below.
        model.addConstraint(begin[i] + duration[i] <= due * scale + 1e-9)
    engine = make_solver(solver, timeLimit=time_limit_s, gapRel=1e-7)
    status = model.solve(engine)
    if status != pulp.LpStatusOptimal:
        return WindowResult(None, proven=status == pulp.LpStatusInfeasible)
    found = choice.copy()
    for i, options in pick.items():
        found[i] = max(options, key=lambda o: options[o].varValue or 0.0)
    before, after = float(tables.cost[choice].sum()), float(tables.cost[found].sum())
    proven = model.sol_status == pulp.LpSolutionOptimal
    if after >= before - 1e-9 * abs(before):
        return WindowResult(None, proven)
    return WindowResult(found, proven)
