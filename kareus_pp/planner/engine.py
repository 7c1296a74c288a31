"""The engine behind every target: the best integer plan at a deadline, and what bounds it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kareus_pp.planner import search
from kareus_pp.planner.linear import LinearProgram, LinearSolution
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import FloatArray, IntArray, Problem

# Relative changes of the slopes over the iteration: among equal vertices of the relaxation they
# prefer those that put slack early or late, which leaves fewer instructions between two options.
TILTS = (0.0, 0.05, -0.05, 0.1, -0.1)


@dataclass(frozen=True)
class Solution:
    """Options for all nodes at one deadline.

    Attributes:
        choice: Position in the option tables for every node.
        cost_j: Sum of effective energies in joules.
        time_s: End of the last instruction, overhead left out, in seconds.
        bound_cost_j: Sum of effective energies of the linear relaxation at the same deadline.
    """

    choice: IntArray
    cost_j: float
    time_s: float
    bound_cost_j: float


class Engine:
    """Solves one problem at one deadline after another; keeps the linear program warm.

    Times exclude the overhead of an iteration.

    Args:
        problem: The problem.
        options: Limits of the planner.
    """

    def __init__(self, problem: Problem, options: PlannerOptions) -> None:
        self.problem = problem
        self.options = options
        self._bounds: dict[float, LinearSolution] = {}

    @cached_property
    def program(self) -> LinearProgram:
        """The linear program."""
        return LinearProgram(self.problem, self.options.solver)

    def length_s(self, duration_s: FloatArray) -> float:
        """Length of the longest path."""
        graph = self.problem.graph
        start = search.earliest_starts(graph.in_ptr, graph.in_node, graph.in_lag, duration_s)
        return float((start + duration_s).max())

    @cached_property
    def shortest_s(self) -> float:
        """Shortest possible iteration."""
        return self.length_s(self.problem.fastest_s)

    @cached_property
    def slowest_s(self) -> float:
        """Iteration in which every instruction takes its least effective energy."""
        return self.length_s(self.problem.slowest_s)

    @cached_property
    def longest_useful_s(self) -> float:
        """Iteration of least total energy of the relaxation; a longer one saves nothing."""
        return self.bound_at_price(self.problem.static_w).time_s

    def bound_at_price(self, end_price_w: float) -> LinearSolution:
        """The relaxation where time has a price instead of a limit."""
        solution = self.program.solve(None, end_price_w)
        length = max(self.shortest_s, self.length_s(solution.duration_s))
        return LinearSolution(length, solution.cost_j, solution.start_s, solution.duration_s)

    def bound(self, deadline_s: float) -> LinearSolution:
        """The relaxation at a deadline."""
        if deadline_s not in self._bounds:
            self._bounds[deadline_s] = self.program.solve(deadline_s)
        return self._bounds[deadline_s]

    def solve(self, deadline_s: float, time_limit_s: float) -> Solution:
        """The best plan found at a deadline that is not below the shortest iteration."""
        began = time.perf_counter()
        if deadline_s >= self.slowest_s:
            choice = self.problem.tables.ptr[1:][self.problem.graph.cls] - 1
            return self._solution(choice, self._cost(choice))
        bound = self.bound(deadline_s)
        best = self._round(bound, deadline_s, bound.cost_j)
        earliest = search.earliest_starts(*self._incoming, self.problem.fastest_s)
        place = 2 * earliest / (earliest.max() or 1.0) - 1
        for tilt in TILTS[1:]:
            if time.perf_counter() - began > time_limit_s:
                break
            slope = self.program.slope * (1 + tilt * place[self.program.owner])
            tilted = self.program.solve(deadline_s, 0.0, slope)
            found = self._round(tilted, deadline_s, bound.cost_j)
            if found.cost_j < best.cost_j:
                best = found
        return best

    @property
    def _incoming(self) -> tuple[IntArray, IntArray, FloatArray]:
        graph = self.problem.graph
        return graph.in_ptr, graph.in_node, graph.in_lag

    @property
    def _outgoing(self) -> tuple[IntArray, IntArray, FloatArray]:
        graph = self.problem.graph
        return graph.out_ptr, graph.out_node, graph.out_lag

    def _cost(self, choice: IntArray) -> float:
        return float(self.problem.tables.cost[choice].sum())

    def _solution(self, choice: IntArray, bound_cost_j: float) -> Solution:
        duration = self.problem.tables.time[choice]
        return Solution(choice, self._cost(choice), self.length_s(duration), bound_cost_j)

    def _round(self, relaxed: LinearSolution, deadline_s: float, bound_cost_j: float) -> Solution:
        graph, tables = self.problem.graph, self.problem.tables
        slack = 1e-12 * deadline_s
        start = search.earliest_starts(*self._incoming, relaxed.duration_s)
        late = search.latest_starts(*self._outgoing, self.problem.fastest_s, deadline_s)
        start = np.minimum(start, late)
        lists = (graph.cls, tables.ptr, tables.time)
        choice = search.fit_options(start, deadline_s, slack, *self._outgoing, *lists)
        steps = (tables.ptr[1:] - tables.ptr[:-1]).clip(1)[graph.cls]
        spread = tables.cost[tables.ptr[:-1]] - tables.cost[tables.ptr[1:] - 1]
        step_j = float((spread[graph.cls] / steps).mean()) or 1.0
        search.anneal(
            start,
            choice,
            deadline_s,
            slack,
            0.1 * step_j,
            0.005 * step_j,
            500 * graph.size,
            3,
            self.options.seed,
            *self._incoming,
            *self._outgoing,
            *lists,
            tables.cost,
        )
        return self._solution(choice, bound_cost_j)
