"""The linear relaxation: durations on the lower hull of the options, and what it proves.

Solved through PuLP. With HiGHS the model stays in the solver and is solved again from the last
basis when the deadline or the costs change; CBC starts anew each time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pulp

from kareus_pp.errors import ConfigError, PlanError
from kareus_pp.planner.options import Solver
from kareus_pp.planner.problem import FloatArray, Problem


@dataclass(frozen=True)
class LinearSolution:
    """A solution of the relaxation.

    Attributes:
        time_s: End of the last instruction, overhead left out, in seconds.
        cost_j: Sum of effective energies in joules.
        start_s: Start of every node.
        duration_s: Duration of every node.
        price_w: For every node the joules that one second less would save: the dual flow through
            it. Only what was solved at a deadline has meaningful prices.
        row_price_w: The dual flow through every row of the program.
    """

    time_s: float
    cost_j: float
    start_s: FloatArray
    duration_s: FloatArray
    price_w: FloatArray
    row_price_w: FloatArray


class LinearProgram:
    """The relaxation of one problem; variables are finish times, hull segments and the end.

    Inside, times and energies are in units of a typical duration and a typical energy, so that the
    solver's absolute tolerances mean the same for every profile.

    Args:
        problem: The problem.
        solver: Solver behind PuLP.
    """

    def __init__(self, problem: Problem, solver: Solver) -> None:
        graph, tables = problem.graph, problem.tables
        self._problem = problem
        self._second = 1.0 / (float(problem.slowest_s.mean()) or 1.0)
        spread = tables.cost[tables.ptr[:-1]] - tables.cost[tables.ptr[1:] - 1]
        self._joule = 1.0 / (float(spread[graph.cls].mean()) or 1.0)
        model = pulp.LpProblem("pipeline", pulp.LpMinimize)
        self.end = add_variable(model, "end", 0)
        finish = [add_variable(model, f"y{i}", 0) for i in range(graph.size)]
        segments: list[list[Any]] = []
        owner: list[int] = []
        slope: list[float] = []
        hulls = []
        for first, last in zip(tables.ptr[:-1], tables.ptr[1:], strict=True):
            at = first + np.flatnonzero(tables.hull[first:last])
            length = np.diff(tables.time[at])
            hulls.append(
                ((length * self._second).tolist(), (np.diff(tables.cost[at]) / length).tolist())
            )
        for node, cls in enumerate(graph.cls.tolist()):
            lengths, slopes = hulls[cls]
            own = [
                add_variable(model, f"x{node}_{k}", 0, length) for k, length in enumerate(lengths)
            ]
            segments.append(own)
            owner.extend([node] * len(own))
            slope.extend(slopes)
        flat = [variable for own in segments for variable in own]
        fastest = (problem.fastest_s * self._second).tolist()
        model.setObjective(
            pulp.LpAffineExpression([*zip(flat, slope, strict=True), (self.end, 1.0)])
        )
        row_node: list[int] = []
        row_lag: list[float] = []
        rows: list[Any] = []

        def add_row(row: Any, node: int, lag: float = 0.0) -> None:
            rows.append(row)
            row_node.append(node)
            row_lag.append(lag / self._second)
            model.addConstraint(row)

        for node in range(graph.size):
            grows = [(variable, -1.0) for variable in segments[node]]
            low, high = graph.in_ptr[node], graph.in_ptr[node + 1]
            for before, lag in zip(
                graph.in_node[low:high].tolist(),
                (graph.in_lag[low:high] * self._second).tolist(),
                strict=True,
            ):
                row = pulp.LpAffineExpression([(finish[node], 1.0), (finish[before], -1.0), *grows])
                add_row(row >= fastest[node] + lag, node, lag)
            if low == high:
                row = pulp.LpAffineExpression([(finish[node], 1.0), *grows])
                add_row(row >= fastest[node], node)
            if graph.out_ptr[node] == graph.out_ptr[node + 1]:
                add_row(self.end - finish[node] >= 0, graph.size)
        self.model = model
        self._rows = rows
        #: For every row the node it leads to; the number of nodes where it leads to the end.
        self.row_node = np.array(row_node, np.int64)
        #: For every row its latency in seconds.
        self.row_lag_s = np.array(row_lag)
        self._finish, self._flat = finish, flat
        self._owner = np.array(owner, np.int64)
        self.slope = np.array(slope)
        self._base_cost = float(tables.cost[tables.ptr[:-1]][graph.cls].sum())
        self._solver = make_solver(solver)
        self._warm = solver == "highs"
        if self._warm:
            self._load()

    def _load(self) -> None:
        self._solver.createAndConfigureSolver(self.model)
        self._solver.buildSolverModel(self.model)
        highs = self.model.solverModel
        highs.setOptionValue("presolve", "off")
        highs.setOptionValue("solver", "simplex")
        self._end_column = self.end.index
        self._finish_columns = np.array([v.index for v in self._finish], np.int32)
        self._flat_columns = np.array([v.index for v in self._flat], np.int32)

    @property
    def owner(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Node of every segment."""
        return self._owner

    def solve(
        self, deadline_s: float | None, end_price_w: float = 0.0, slope: FloatArray | None = None
    ) -> LinearSolution:
        """Minimise the sum of effective energies, plus a price on the end.

        Args:
            deadline_s: Exact end of the iteration, overhead left out; None leaves it free.
            end_price_w: Joules per second of the end.
            slope: Slopes of the segments, instead of the true ones.

        Raises:
            PlanError: The solver finds no solution.
        """
        unit = self._joule / self._second
        wanted = (self.slope if slope is None else slope) * unit
        deadline = None if deadline_s is None else deadline_s * self._second
        solve = self._solve_warm if self._warm else self._solve_anew
        *times, dual = solve(deadline, end_price_w * unit, wanted)
        finish, taken, end = (value / self._second for value in times)
        graph = self._problem.graph
        grown = np.bincount(self._owner, weights=taken, minlength=graph.size)
        duration = np.clip(
            self._problem.fastest_s + grown, self._problem.fastest_s, self._problem.slowest_s
        )
        return LinearSolution(
            float(end),
            self._base_cost + float(self.slope @ taken),
            finish - duration,
            duration,
            np.bincount(self.row_node, weights=dual, minlength=graph.size + 1)[:-1] / unit,
            dual / unit,
        )

    def _solve_warm(
        self, deadline: float | None, end_price: float, slope: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        highs = self.model.solverModel
        low, high = (0.0, np.inf) if deadline is None else (deadline, deadline)
        highs.changeColBounds(self._end_column, low, high)
        highs.changeColCost(self._end_column, end_price)
        if len(self._flat_columns):
            highs.changeColsCost(len(self._flat_columns), self._flat_columns, slope)
        highs.run()
        status = highs.modelStatusToString(highs.getModelStatus())
        if status != "Optimal":
            # A stale basis, or a deadline that rounding put a hair below the shortest iteration.
            highs.clearSolver()
            highs.changeColBounds(self._end_column, low, high * (1 + 1e-9))
            highs.run()
            status = highs.modelStatusToString(highs.getModelStatus())
        if status != "Optimal":
            raise PlanError(f"the linear program ended as {status!r}")
        solution = highs.getSolution()
        value = np.array(solution.col_value)
        return (
            value[self._finish_columns],
            value[self._flat_columns] if len(self._flat_columns) else np.zeros(0),
            value[self._end_column],
            np.array(solution.row_dual),
        )

    def _solve_anew(
        self, deadline: float | None, end_price: float, slope: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        self.end.lowBound, self.end.upBound = (
            (0.0, None) if deadline is None else (deadline, deadline)
        )
        self.model.setObjective(
            pulp.LpAffineExpression(
                [*zip(self._flat, slope.tolist(), strict=True), (self.end, end_price)]
            )
        )
        status = pulp.LpStatus[self.model.solve(self._solver)]
        if status != "Optimal":
            raise PlanError(f"the linear program ended as {status!r}")
        return (
            np.array([v.varValue for v in self._finish]),
            np.array([v.varValue or 0.0 for v in self._flat]),
            np.array(self.end.varValue or 0.0),
            np.array([row.pi or 0.0 for row in self._rows]),
        )


def add_variable(
    model: Any, name: str, low: float, high: float | None = None, category: str = "Continuous"
) -> Any:
    """A variable of a PuLP model, by the call that this version of PuLP wants."""
    if hasattr(model, "add_variable"):
        return model.add_variable(name, low, high, category)
    return pulp.LpVariable(name, low, high, category)


@lru_cache
def usable_solver(name: Solver) -> Solver:
    """The solver of that name, or CBC, which comes with PuLP, where HiGHS is not installed.

    Says so in the log, once in a process.
    """
    if name == "highs" and not pulp.HiGHS(msg=False).available():
        logging.getLogger(__name__).warning(
            "highspy is not installed: plans are made with CBC, which is slower; install highspy, "
            "or set the planner's solver to 'cbc' to silence this"
        )
        return "cbc"
    return name


def make_solver(name: Solver, **limits: Any) -> Any:
    """The PuLP solver of that name, silent and single-threaded.

    Raises:
        ConfigError: The solver is not installed.
    """
    # HiGHS keeps the number of threads of its first run in a process; another one is an error.
    solver = (
        pulp.HiGHS(msg=False, threads=1, **limits)
        if name == "highs"
        else pulp.PULP_CBC_CMD(msg=False, threads=1, **limits)
    )
    if not solver.available():
        other = "cbc" if name == "highs" else "highs"
        raise ConfigError(
            f"the solver {name!r} is not installed here; set the planner's solver to {other!r}"
            + (" or install highspy" if name == "highs" else "")
        )
    if name == "highs":
        _swallow_banner()
    return solver


@lru_cache(maxsize=1)
def _swallow_banner() -> None:
    """Let HiGHS print its banner, once in a process and past `output_flag`, to nowhere."""
    import highspy

    flush = ctypes.CDLL(None).fflush
    try:
        sys.stdout.flush()
        flush(None)
        saved = os.dup(1)
    except (OSError, ValueError, AttributeError):
        return  # no standard output to keep clean
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            highspy.Highs()  # type: ignore[no-untyped-call]
            flush(None)
    finally:
        os.dup2(saved, 1)
        os.close(saved)
