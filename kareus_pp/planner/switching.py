"""The engine where clock switches have a price or a limit.

The relaxation knows nothing of switches, so it still bounds every plan. Its prices of time, per
instruction and per edge, say what a delay costs where; with them a stage's clocks are chosen by
dynamic programming over runs of equal clock, and the result is annealed on the exact longest path.
"""

from __future__ import annotations

import itertools
import time
from functools import cached_property

import numpy as np

from kareus_pp.errors import PlanError
from kareus_pp.planner import search, switch_runs, switch_search
from kareus_pp.planner.engine import COLD, GOOD_GAP, QUICK, THOROUGH, Effort, Solution
from kareus_pp.planner.grouping import make_engine
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import FloatArray, IntArray, Problem
from kareus_pp.planner.switch_bound import StageRows, SwitchBound

# Deadlines of the relaxation, relative to the one asked for, from which clocks are taken: what
# the switches will add is not known beforehand.
TIGHTER = (1.0, 0.995, 0.985, 0.97, 0.94)
# Prices of a switch in units of the mean energy between neighbouring options, on top of the real.
EXTRA_PRICES = (0.0, 1.0, 4.0, 16.0)
NEVER = 1e15
# Temperatures at the beginning, in the same units, in turn. To move a run past its neighbours costs
# many such steps before it gains.
HOT = (4.0, 10.0)
# Price of lateness in units of the relaxation's price of time, in turn: a low one leads through
# late plans, a high one back to the deadline.
LATE = (2.0, 4.0)
# What a proposal may take at most for each instruction, in seconds; to keep a time limit.
PROPOSAL_S = 2.5e-9


class SwitchEngine:
    """As `Engine`, with delay, energy, dwell and number of clock switches.

    Positions in its solutions are those of the wide tables.

    Args:
        problem: The problem.
        options: Limits of the planner.
    """

    def __init__(self, problem: Problem, options: PlannerOptions) -> None:
        self.problem = problem
        self.options = options
        self.free = make_engine(problem, options)

    @property
    def longest_useful_s(self) -> float:
        """Iteration of least total energy of the relaxation, or the shortest if that is longer."""
        return max(self.free.longest_useful_s, self.shortest_s)

    def bound_cost_j(self, deadline_s: float) -> float:
        """Least sum of effective energies of the relaxation at a deadline."""
        return self.free.bound_cost_j(deadline_s)

    def bound_energy_j(self, deadline_s: float) -> float:
        """Total energy of the relaxation at a deadline."""
        return self.free.bound_energy_j(deadline_s)

    def gap(self, solution: Solution) -> float:
        """The gap of a solution to its bound, relative to the bound on total energy."""
        return self.free.gap(solution)

    def switch_bound_j(self, deadline_s: float, time_limit_s: float) -> float:
        """Energy below which no plan within a deadline can be, switches counted.

        Args:
            deadline_s: End of the iteration; not below the shortest that was found.
            time_limit_s: Seconds after which the best bound so far is returned.
        """
        bound = SwitchBound(
            self.problem,
            self._rows,
            self._slots[0],
            self.options.max_switches,
            self._shortest[1],
            max(deadline_s, self.shortest_s),
        ).solve(time_limit_s)
        return bound + self.problem.static_w * self.problem.overhead_s

    @cached_property
    def shortest_s(self) -> float:
        """Shortest iteration found with the price and limits of switches."""
        return self._shortest[0]

    @cached_property
    def _shortest(self) -> tuple[float, IntArray]:
        problem, graph = self.problem, self.problem.graph
        # Here time is the cost: whatever it saves in energy, no second may be lost.
        steep = 1e3 * self._step_j / float(problem.slowest_s.mean() or 1.0)
        price = np.full(graph.size, steep)
        best: tuple[float, IntArray] | None = None
        for extra in (0.0, 0.1 * problem.switch.delay_s * steep, NEVER):
            choice = self._choose_runs(price, price, extra)
            if choice is None:
                continue
            effort = max(1, min(100, 60_000 // graph.size))
            _, end, found = self._annealed(choice, 0.0, effort, steep, self._step_j, 0)
            if np.isfinite(end) and (best is None or end < best[0]):
                best = (end, found)
        if best is None:
            raise PlanError(
                "no plan keeps the limits on clock switches: no clock is common to all "
                "instructions of a stage; allow more switches or a shorter dwell"
            )
        return best

    def solve(self, deadline_s: float, effort: Effort = THOROUGH) -> Solution:
        """The best plan found at a deadline that is not below the shortest iteration."""
        began = time.perf_counter()
        bound_cost = self.bound_cost_j(deadline_s)
        relaxed = self.free.bound(min(deadline_s, self.free.slowest_s))
        sources = np.diff(self.problem.graph.in_ptr) == 0
        marginal = float(relaxed.price_w[sources].sum()) + self.problem.static_w
        marginal += self._step_j / float(self.problem.slowest_s.mean() or 1.0)
        starts = self._starts(deadline_s, LATE[1] * marginal, effort)
        best_cost, best = np.inf, self._shortest[1]
        sweep_s = PROPOSAL_S * self.problem.graph.size**2
        usual = effort.proposals * max(1, 3000 // self.problem.graph.size)
        most = int((effort.refine_s or 10.0) / (sweep_s * (len(starts) + 1)))
        proposals, idle = max(1, min(usual, most)), 0
        for number in itertools.count():
            turn, place = divmod(number, len(starts) + 1)
            again = place == len(starts)
            if turn:
                left = effort.refine_s - (time.perf_counter() - began)
                small = self.gap(self._solution(best, bound_cost)) < GOOD_GAP
                if left <= 0 or idle > 3 * (len(starts) + 1) or small:
                    break
                proposals = max(1, min(proposals, int(left / sweep_s)))
            elif again:
                continue
            cost, _, found = self._annealed(
                best if again else starts[place],
                deadline_s,
                proposals,
                LATE[number % 2] * marginal,
                (1.0 if again else HOT[turn % 2]) * self._step_j,
                number,
            )
            idle += 1
            if cost < best_cost:
                idle = 0 if cost < best_cost * (1 - 1e-5) else idle
                best_cost, best = cost, found
            if again:
                proposals *= 2
        return self._solution(best, bound_cost)

    def _solution(self, choice: IntArray, bound_cost_j: float) -> Solution:
        return Solution(choice, self._cost_j(choice), self._end_s(choice), bound_cost_j, wide=True)

    def _starts(self, deadline_s: float, steep: float, effort: Effort) -> list[IntArray]:
        """The most promising choices to anneal from, the one of the shortest iteration last."""
        scored: list[tuple[float, IntArray]] = []

        def consider(choice: IntArray | None) -> None:
            if choice is not None:
                late = max(0.0, self._end_s(choice) - deadline_s)
                scored.append((self._cost_j(choice) + steep * late, choice))

        unlimited = self.options.max_switches is None and self.options.min_dwell_s == 0
        if unlimited and deadline_s >= self.free.shortest_s:
            for tighter in (1.0, 0.99):
                at = max(tighter * deadline_s, self.free.shortest_s)
                consider(self._widened(self.free.solve(at, QUICK).choice))
        for tighter in TIGHTER:
            at = max(tighter * deadline_s, self.free.shortest_s)
            if at >= self.free.slowest_s:
                at = self.free.slowest_s
            relaxed = self.free.bound(at)
            edge = np.minimum(relaxed.price_w, np.roll(relaxed.price_w, 1))
            for extra in EXTRA_PRICES:
                consider(self._choose_runs(relaxed.price_w, edge, extra * self._step_j))
        scored.sort(key=lambda pair: pair[0])
        kept = [choice for _, choice in scored[: max(2, effort.tilts - 1)]]
        return [*kept, self._shortest[1]]

    @cached_property
    def _step_j(self) -> float:
        return self.free.step_j

    @cached_property
    def _rows(self) -> StageRows:
        graph, tables = self.problem.graph, self.problem.tables
        movable = tables.wide_clock[tables.wide_ptr[:-1]][graph.cls] >= 0
        rows: list[int] = []
        ptr = [0]
        held = np.full(graph.size, -1, np.int64)
        for stage in range(self.problem.schedule.stages):
            first = np.flatnonzero((graph.stage == stage) & (graph.previous < 0))
            nodes = []
            node = int(first[0]) if len(first) else -1
            while node >= 0:
                if movable[node]:
                    nodes.append(node)
                node = int(graph.following[node])
            for before, node in zip(nodes[-1:] + nodes[:-1], nodes, strict=True):
                held[node] = before
            rows += nodes
            ptr.append(len(rows))
        row = np.array(rows, np.int64)
        return StageRows(np.array(ptr, np.int64), row, held)

    @cached_property
    def _slots(self) -> tuple[IntArray, IntArray]:
        """`slot` and `slot_clock` of `switch_search.anneal_runs`."""
        tables = self.problem.tables
        clocks, slot_clock = np.unique(tables.wide_clock, return_inverse=True)
        lists: dict[tuple[int, int], list[int]] = {}
        for cls in range(len(tables.wide_ptr) - 1):
            for position in range(tables.wide_ptr[cls], tables.wide_ptr[cls + 1]):
                lists.setdefault((cls, int(slot_clock[position])), []).append(position)
        variants = max(map(len, lists.values()))
        slot = np.full((len(tables.wide_ptr) - 1, len(clocks), variants), -1, np.int64)
        for (cls, clock), positions in lists.items():
            slot[cls, clock, : len(positions)] = positions
        return slot, slot_clock.astype(np.int64)

    @cached_property
    def _sinks(self) -> IntArray:
        return np.flatnonzero(np.diff(self.problem.graph.out_ptr) == 0)

    @cached_property
    def _tail_s(self) -> FloatArray:
        """Least time from the end of every node to the end of the iteration."""
        tables, graph = self.problem.tables, self.problem.graph
        fastest = np.minimum.reduceat(tables.wide_time, tables.wide_ptr[:-1])[graph.cls]
        return -(search.latest_starts(*graph.outgoing, fastest, 0.0) + fastest)

    def _cost_j(self, choice: IntArray) -> float:
        clock, held = self.problem.tables.wide_clock[choice], self._rows.held
        switches = int(np.count_nonzero((held >= 0) & (clock != clock[held])))
        cost = float(self.problem.tables.wide_cost[choice].sum())
        return cost + self.problem.switch.energy_j * switches

    def _widened(self, choice: IntArray) -> IntArray:
        """Positions in the wide tables of positions in the narrow ones."""
        tables = self.problem.tables
        wide = np.empty(len(tables.time), np.int64)
        for cls in range(len(tables.ptr) - 1):
            first, last = tables.wide_ptr[cls], tables.wide_ptr[cls + 1]
            at = {int(tables.wide_option[p]): p for p in range(first, last)}
            for position in range(tables.ptr[cls], tables.ptr[cls + 1]):
                wide[position] = at[int(tables.option[position])]
        return wide[choice]

    def _end_s(self, choice: IntArray) -> float:
        graph, tables = self.problem.graph, self.problem.tables
        end = switch_search.switched_starts(
            0,
            np.zeros(graph.size),
            choice,
            self.problem.switch.delay_s,
            tables.wide_clock,
            tables.wide_time,
            self._rows.held,
            graph.previous,
            *graph.incoming,
        )
        return float(end)

    def _choose_runs(
        self, price_w: FloatArray, edge_price_w: FloatArray, extra_j: float
    ) -> IntArray | None:
        """Clocks by dynamic programming, stage by stage; None where a stage has no solution.

        Args:
            price_w: Price of time on every node.
            edge_price_w: Price of a delay before every node.
            extra_j: Price of a switch on top of its energy and delay.
        """
        problem, tables = self.problem, self.problem.tables
        slot, _ = self._slots
        choice = tables.wide_ptr[:-1][problem.graph.cls].copy()
        most_runs = self.options.max_switches or 0
        for first, last in itertools.pairwise(self._rows.row_ptr.tolist()):
            nodes = self._rows.row[first:last]
            if not len(nodes):
                continue
            options = slot[problem.graph.cls[nodes]]
            values = (
                tables.wide_cost[options] + price_w[nodes, None, None] * (tables.wide_time[options])
            )
            values[options < 0] = np.inf
            variant = values.argmin(axis=2)
            values = values.min(axis=2)
            price = extra_j + problem.switch.energy_j + problem.switch.delay_s * edge_price_w[nodes]
            clocks = switch_runs.best_runs(values, price, most_runs)
            at = np.arange(len(nodes))
            if not np.isfinite(values[at, clocks]).all():
                return None
            choice[nodes] = options[at, clocks, variant[at, clocks]]
        return choice

    def _annealed(
        self,
        choice: IntArray,
        deadline_s: float,
        proposals: int,
        steep_w: float,
        hot_j: float,
        seed: int,
    ) -> tuple[float, float, IntArray]:
        graph, tables, rows = self.problem.graph, self.problem.tables, self._rows
        slot, slot_clock = self._slots
        result: tuple[float, float, IntArray] = switch_search.anneal_runs(
            choice.copy(),
            deadline_s,
            self.problem.switch.delay_s,
            self.problem.switch.energy_j,
            -1 if self.options.max_switches is None else self.options.max_switches,
            self.options.min_dwell_s,
            steep_w,
            hot_j,
            COLD * self._step_j,
            proposals * graph.size,
            self.options.seed + 7919 * seed,
            slot,
            slot_clock,
            rows.row_ptr,
            rows.row,
            rows.held,
            graph.previous,
            graph.stage,
            graph.in_ptr,
            graph.in_node,
            graph.in_lag,
            graph.out_ptr,
            graph.out_node,
            self._sinks,
            self._tail_s,
            graph.cls,
            tables.wide_ptr,
            tables.wide_time,
            tables.wide_cost,
            tables.wide_clock,
        )
        return result
