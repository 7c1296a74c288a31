"""A bound that knows what clock switches cost, by column generation over whole stages.

A column is everything that one stage does in an iteration: a clock for each of its instructions,
with its switches. The linear program chooses a mixture of columns for each stage under the
dependencies and the deadline (Dantzig and Wolfe, 1960); its duals are a flow of prices through the
graph, at which dynamic programming finds the best column of every stage exactly. The sum of those
is a bound for any flow (weak duality); flows are smoothed half way to the best so far (Wentges,
1997), which converges in some dozens of rounds where the plain ones take hundreds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from kareus_pp.planner import switch_runs
from kareus_pp.planner.linear import add_variable, make_solver
from kareus_pp.planner.problem import FloatArray, IntArray, Problem

CLOSE = 2e-5
SMOOTH = 0.5


@dataclass(frozen=True)
class StageRows:
    """Stage rows without fixed instructions, as compiled functions take them.

    Attributes:
        row_ptr: Stage `s` has the nodes `row[row_ptr[s]:row_ptr[s + 1]]`, in order.
        row: Nodes stage by stage.
        held: Node whose clock every node finds, round the end of the iteration; -1 for fixed ones.
    """

    row_ptr: IntArray
    row: IntArray
    held: IntArray

    def nodes(self, stage: int) -> IntArray:
        """The nodes of a stage that have a clock to choose."""
        return self.row[self.row_ptr[stage] : self.row_ptr[stage + 1]]


class SwitchBound:
    """The program of one problem and deadline; needs HiGHS, which adds columns to a solved model.

    Dwell is left out, so the bound holds with it as well.

    Args:
        problem: The problem; its switch price counts.
        rows: Its stage rows.
        slot: Positions of the options of a class at a clock, shape `(classes, clocks, variants)`,
            -1 where there is none.
        most_switches: Most switches of a stage; None for no limit.
        choice: Positions in the wide tables of a plan that meets the deadline.
        deadline_s: End of the iteration, overhead left out.
    """

    def __init__(
        self,
        problem: Problem,
        rows: StageRows,
        slot: IntArray,
        most_switches: int | None,
        choice: IntArray,
        deadline_s: float,
    ) -> None:
        self.problem, self.rows, self.slot = problem, rows, slot
        self.deadline_s = deadline_s
        self._most = -1 if most_switches is None else most_switches
        graph, tables = problem.graph, problem.tables
        self._second = 1.0 / (float(problem.slowest_s.mean()) or 1.0)
        spread = float((tables.wide_cost.max() - tables.wide_cost.min()) or 1.0)
        self._joule = 1.0 / spread
        fixed = rows.held < 0
        first = tables.wide_ptr[:-1][graph.cls]
        self._fixed_s = np.where(fixed, tables.wide_time[first], 0.0)
        self._fixed_j = float(tables.wide_cost[first][fixed].sum())
        self._edges()
        self._load()
        for stage in range(len(rows.row_ptr) - 1):
            self._add(stage, choice[rows.nodes(stage)])

    def _edges(self) -> None:
        """Rows of the program: every dependency, the beginning of stages, and the end."""
        graph = self.problem.graph
        node: list[int] = []
        source: list[int] = []
        lag: list[float] = []
        self._own = np.full(graph.size, -1, np.int64)  # the row that a switch of the node delays
        for after in range(graph.size):
            low, high = int(graph.in_ptr[after]), int(graph.in_ptr[after + 1])
            if low == high or graph.previous[after] < 0:
                self._own[after] = len(node)
                node.append(after)
                source.append(-1)
                lag.append(0.0)
            for k in range(low, high):
                if graph.in_node[k] == graph.previous[after]:
                    self._own[after] = len(node)
                node.append(after)
                source.append(int(graph.in_node[k]))
                lag.append(float(graph.in_lag[k]))
        self._node, self._source = np.array(node, np.int64), np.array(source, np.int64)
        self._lag_s = np.array(lag)
        self._row_ptr = np.searchsorted(self._node, np.arange(graph.size + 1))
        self._last = np.flatnonzero(np.diff(graph.out_ptr) == 0)

    def _load(self) -> None:
        problem, second = self.problem, self._second
        model = pulp.LpProblem("stages", pulp.LpMinimize)
        end = add_variable(model, "end", 0, self.deadline_s * second * (1 + 1e-9))
        finish = [add_variable(model, f"y{i}", 0) for i in range(problem.graph.size)]
        model.setObjective(pulp.LpAffineExpression([(end, problem.static_w * self._unit)]))
        least = ((self._lag_s + self._fixed_s[self._node]) * second).tolist()
        for node, source, low in zip(
            self._node.tolist(), self._source.tolist(), least, strict=True
        ):
            terms = [(finish[node], 1.0)]
            if source >= 0:
                terms.append((finish[source], -1.0))
            model.addConstraint(pulp.LpAffineExpression(terms) >= low)
        for node in self._last.tolist():
            model.addConstraint(end - finish[node] >= 0)
        solver = make_solver("highs")
        solver.createAndConfigureSolver(model)
        solver.buildSolverModel(model)
        self._model = model
        self._highs: Any = model.solverModel
        self._highs.setOptionValue("presolve", "off")
        self._highs.setOptionValue("solver", "simplex")
        self._flows = self._highs.getNumRow()
        for _ in range(len(self.rows.row_ptr) - 1):
            self._highs.addRow(1.0, 1.0, 0, np.zeros(0, np.int32), np.zeros(0))

    @property
    def _unit(self) -> float:
        """Watts of the program."""
        return self._joule / self._second

    def _add(self, stage: int, choice: IntArray) -> None:
        """A column: what a stage does."""
        tables, switch = self.problem.tables, self.problem.switch
        nodes = self.rows.nodes(stage)
        if not len(nodes):
            choice = np.zeros(0, np.int64)
        clock = tables.wide_clock[choice]
        switches = clock != np.roll(clock, 1)
        cost = float(tables.wide_cost[choice].sum()) + switch.energy_j * int(switches.sum())
        taken = np.zeros(self._flows)
        for node, seconds in zip(nodes.tolist(), tables.wide_time[choice].tolist(), strict=True):
            taken[self._row_ptr[node] : self._row_ptr[node + 1]] = seconds
        taken[self._own[nodes[switches]]] += switch.delay_s
        index = np.flatnonzero(taken)
        self._highs.addCol(
            cost * self._joule,
            0.0,
            np.inf,
            len(index) + 1,
            np.append(index, self._flows + stage).astype(np.int32),
            np.append(-taken[index] * self._second, 1.0),
        )

    def solve(self, time_limit_s: float) -> float:
        """Energy in joules, overhead left out, below which no plan within the deadline can be."""
        began = time.perf_counter()
        best, centre = -np.inf, None
        while True:
            self._highs.run()
            status = self._highs.modelStatusToString(self._highs.getModelStatus())
            if status != "Optimal":
                return best
            mixture = self._highs.getInfo().objective_function_value / self._joule + self._fixed_j
            flow = np.array(self._highs.getSolution().row_dual)[: self._flows] / self._unit
            if centre is not None:
                flow = SMOOTH * centre + (1 - SMOOTH) * flow
            flow = np.clip(flow, 0.0, None)
            bound, columns = self._priced(flow)
            if bound > best:
                best, centre = bound, flow
            close = mixture - best <= CLOSE * abs(mixture)
            if close or time.perf_counter() - began > time_limit_s:
                return best
            for stage, choice in enumerate(columns):
                self._add(stage, choice)

    def _priced(self, flow: FloatArray) -> tuple[float, list[IntArray]]:
        """The bound of a flow of prices, in watts by row, and the best column of every stage."""
        problem, tables, graph = self.problem, self.problem.tables, self.problem.graph
        edges, ends = flow[: len(self._node)], flow[len(self._node) :]
        through = np.bincount(self._node, weights=edges, minlength=graph.size)
        inner = self._source >= 0
        leaves = np.bincount(self._source[inner], weights=edges[inner], minlength=graph.size)
        leaves[self._last] = leaves[self._last] + ends
        total = float(ends.sum())
        # More flow into a node than out of it would pay for finishing late, within the deadline.
        bound = -float(np.clip(through - leaves, 0.0, None).sum()) * self.deadline_s
        bound += min(0.0, problem.static_w - total) * self.deadline_s
        bound += float(edges @ self._lag_s) + float(through @ self._fixed_s) + self._fixed_j
        columns = []
        for stage in range(len(self.rows.row_ptr) - 1):
            nodes = self.rows.nodes(stage)
            if not len(nodes):
                columns.append(np.zeros(0, np.int64))
                continue
            options = self.slot[graph.cls[nodes]]
            values = tables.wide_cost[options] + (
                through[nodes, None, None] * tables.wide_time[options]
            )
            values[options < 0] = np.inf
            variant = values.argmin(axis=2)
            price = problem.switch.energy_j + problem.switch.delay_s * edges[self._own[nodes]]
            least, clocks = switch_runs.best_cycle(values.min(axis=2), price, self._most)
            bound += least
            at = np.arange(len(nodes))
            columns.append(options[at, clocks, variant[at, clocks]])
        return bound, columns
