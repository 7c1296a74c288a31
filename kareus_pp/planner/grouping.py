"""Very large schedules: a relaxation whose size does not grow with the number of microbatches.

The middle of every stage's program is cut loose from the other stages: of its dependencies only
the stage's own order is kept. Fewer constraints, so the least cost of what is left is a lower bound
for the whole. Within such a chain instructions of one class are interchangeable and their hulls
convex, so they take equal durations, and the chain is one node for each class, its costs and times
multiplied. The dual flow of this program, carried straight along the chains, is a feasible flow of
the full graph: weak duality gives the same bound, and is what is reported.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kareus_pp.planner import search
from kareus_pp.planner.engine import Engine
from kareus_pp.planner.linear import LinearSolution
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import FloatArray, Graph, IntArray, Problem, Tables, grouped

# Larger graphs are reduced.
LARGE = 3000


@dataclass(frozen=True)
class Reduction:
    """A reduced problem.

    Attributes:
        problem: Beginning and end of the graph in full, the middle of each stage as chains.
        member: For every node of the full graph its node in the reduced one.
        count: For every node of the reduced graph how many it stands for.
    """

    problem: Problem
    member: IntArray
    count: IntArray


def reduce(problem: Problem, most: int) -> Reduction:
    """Cut the middle of every stage loose, so that about `most` nodes are kept as they are."""
    graph = problem.graph
    keep = _kept(problem, most)
    member = np.full(graph.size, -1, np.int64)
    chain: dict[tuple[int, int], int] = {}
    # A chain comes where its first member was: after what precedes it, before what follows.
    order: list[tuple[int, int, int]] = []
    for node in range(graph.size):
        key = (int(graph.stage[node]), int(graph.cls[node]))
        if keep[node]:
            member[node] = len(order)
            order.append((node, key[0], key[1]))
        elif key in chain:
            member[node] = chain[key]
        else:
            chain[key] = member[node] = len(order)
            order.append((node, key[0], key[1]))
    count = np.bincount(member, minlength=len(order))
    edges: dict[tuple[int, int], float] = {}
    for node in range(graph.size):
        for k in range(graph.in_ptr[node], graph.in_ptr[node + 1]):
            source = int(graph.in_node[k])
            if keep[node] and keep[source]:
                edges[int(member[source]), int(member[node])] = float(graph.in_lag[k])
    # The chains of a stage follow one another, between what precedes and what follows them.
    for stage in range(problem.schedule.stages):
        chains = sorted(number for (own, _), number in chain.items() if own == stage)
        if not chains:
            continue
        inside = np.flatnonzero((graph.stage == stage) & ~keep)
        first, last = int(graph.previous[inside[0]]), int(graph.following[inside[-1]])
        row = [int(member[first])] if first >= 0 else []
        row += chains
        row += [int(member[last])] if last >= 0 else []
        edges.update(dict.fromkeys(itertools.pairwise(row), 0.0))
    before, after = (np.array(ends, np.int64) for ends in zip(*edges, strict=True))
    lags = np.array(list(edges.values()))
    size = len(order)
    in_ptr, by_after = grouped(after, size)
    out_ptr, by_before = grouped(before, size)
    tables, cls = _with_multiples(problem, order, count)
    none = np.full(size, -1, np.int64)
    reduced = Graph(
        np.array([node for node, _, _ in order], np.int64),
        np.array([stage for _, stage, _ in order], np.int64),
        cls,
        none,
        none,
        in_ptr,
        before[by_after],
        lags[by_after],
        out_ptr,
        after[by_before],
        lags[by_before],
    )
    return Reduction(replace(problem, graph=reduced, tables=tables), member, count)


def _kept(problem: Problem, most: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The first and the last nodes by time; ranges of every stage's program."""
    graph = problem.graph
    start = search.earliest_starts(*graph.incoming, problem.fastest_s)
    tail = search.earliest_starts(*graph.reversed.incoming, problem.fastest_s[::-1].copy())[::-1]
    rank = np.minimum(np.argsort(np.argsort(start)), np.argsort(np.argsort(tail)))
    keep = rank < most // 2
    # Whole ranges: what lies between two kept nodes of the same half is kept as well.
    for stage in range(problem.schedule.stages):
        nodes = np.flatnonzero(graph.stage == stage)
        loose = np.flatnonzero(~keep[nodes])
        if len(loose):
            keep[nodes] = True
            keep[nodes[loose[0] : loose[-1] + 1]] = False
    return keep


def _with_multiples(
    problem: Problem, order: list[tuple[int, int, int]], count: IntArray
) -> tuple[Tables, IntArray]:
    tables = problem.tables
    ptr, time, cost, hull = [tables.ptr], [tables.time], [tables.cost], [tables.hull]
    cls = np.empty(len(order), np.int64)
    known: dict[tuple[int, int], int] = {}
    end = int(tables.ptr[-1])
    for node, (_, _, own) in enumerate(order):
        many = int(count[node])
        if many == 1:
            cls[node] = own
            continue
        if (own, many) not in known:
            part = slice(int(tables.ptr[own]), int(tables.ptr[own + 1]))
            time.append(tables.time[part] * many)
            cost.append(tables.cost[part] * many)
            hull.append(tables.hull[part])
            end += part.stop - part.start
            ptr.append(np.array([end]))
            known[own, many] = len(tables.ptr) - 1 + len(known)
        cls[node] = known[own, many]
    widened = replace(
        tables,
        ptr=np.concatenate(ptr),
        time=np.concatenate(time),
        cost=np.concatenate(cost),
        hull=np.concatenate(hull),
    )
    return widened, cls


class LargeEngine(Engine):
    """As `Engine`, with the relaxation of the reduced problem."""

    @cached_property
    def reduction(self) -> Reduction:
        """The reduced problem."""
        stages = self.problem.schedule.stages
        return reduce(self.problem, max(2500, 2 * stages * stages))

    @property
    def relaxed_problem(self) -> Problem:
        """The reduced problem."""
        return self.reduction.problem

    def bound(self, deadline_s: float) -> LinearSolution:
        """The relaxation at a deadline; its cost is the bound by weak duality."""
        if deadline_s not in self._bounds:
            solution = self.program.solve(deadline_s)
            expanded = self._expanded(solution)
            cost = self._dual_bound(expanded.price_w, solution, deadline_s)
            self._bounds[deadline_s] = replace(expanded, cost_j=min(cost, solution.cost_j))
        return self._bounds[deadline_s]

    def bound_at_price(self, end_price_w: float) -> LinearSolution:
        """The relaxation where time has a price instead of a limit."""
        solution = self._expanded(self.program.solve(None, end_price_w))
        length = max(self.shortest_s, self.length_s(solution.duration_s))
        return replace(solution, time_s=length)

    def _expanded(self, solution: LinearSolution) -> LinearSolution:
        reduction = self.reduction
        member, many = reduction.member, reduction.count[reduction.member]
        duration = np.clip(
            solution.duration_s[member] / many, self.problem.fastest_s, self.problem.slowest_s
        )
        return LinearSolution(
            solution.time_s,
            solution.cost_j,
            search.earliest_starts(*self.problem.graph.incoming, duration),
            duration,
            solution.price_w[member],
            solution.row_price_w,
        )

    def _dual_bound(
        self, price_w: FloatArray, solution: LinearSolution, deadline_s: float
    ) -> float:
        """Weak duality: for any feasible flow, `sum min(c + flow t) + flow lags - flow D`."""
        graph, tables = self.problem.graph, self.problem.tables
        size = self.reduction.problem.graph.size
        flow = np.clip(solution.row_price_w, 0.0, None)
        least = 0.0
        for cls in range(len(tables.ptr) - 1):
            part = slice(int(tables.ptr[cls]), int(tables.ptr[cls + 1]))
            prices, number = np.unique(
                np.clip(price_w[graph.cls == cls], 0.0, None), return_counts=True
            )
            values = tables.cost[part][:, None] + tables.time[part][:, None] * prices
            least += float((values.min(axis=0) * number).sum())
        total = float(flow[self.program.row_node == size].sum())
        lags = float(flow @ self.program.row_lag_s)
        return least + lags - total * deadline_s

    def _varied(self, deadline_s: float, change: FloatArray) -> LinearSolution:
        """Durations of the full graph that meet the deadline, near the relaxation's."""
        reduced = self.reduction.problem
        slope = self.program.slope * (1 + change[self.program.owner])
        least = float(
            (
                search.earliest_starts(*reduced.graph.incoming, reduced.fastest_s)
                + reduced.fastest_s
            ).max()
        )
        aim = deadline_s
        for _ in range(3):
            found = self._expanded(self.program.solve(max(aim, least), 0.0, slope))
            over = self.length_s(found.duration_s) - deadline_s
            if over <= 1e-4 * deadline_s:
                break
            aim -= over
        fast = self.problem.fastest_s
        low, high = 0.0, 1.0
        while high - low > 1e-6 and self.length_s(found.duration_s) > deadline_s:
            middle = (low + high) / 2
            if self.length_s(fast + middle * (found.duration_s - fast)) > deadline_s:
                high = middle
            else:
                low = middle
        if high < 1.0 or low > 0.0:
            found = replace(found, duration_s=fast + low * (found.duration_s - fast))
        return found


def make_engine(problem: Problem, options: PlannerOptions) -> Engine:
    """The engine for problems of this size and shape."""
    if problem.graph.size <= LARGE:
        return Engine(problem, options)
    large = LargeEngine(problem, options)
    return large if _is_steady(problem, large.reduction) else Engine(problem, options)


def _is_steady(problem: Problem, reduction: Reduction) -> bool:
    """True where the two halves of what was cut loose hold the same classes, on every stage.

    In GPipe they do not: the middle holds the turn from forwards to backwards, and without the
    dependencies across it the bound is weak.
    """
    graph = problem.graph
    chained = reduction.count[reduction.member] > 1
    for stage in range(problem.schedule.stages):
        classes = graph.cls[(graph.stage == stage) & chained]
        half = len(classes) // 2
        first, second = (
            np.bincount(part, minlength=len(problem.options))
            for part in (classes[:half], classes[half:])
        )
        if np.abs(first - second).sum() > 0.25 * len(classes):
            return False
    return True
