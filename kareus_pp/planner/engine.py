"""The engine behind every target: the best integer plan at a deadline, and what bounds it."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kareus_pp.planner import pushing, rounding, search
from kareus_pp.planner.linear import LinearProgram, LinearSolution
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import FloatArray, Graph, IntArray, Problem

# Relative changes of the slopes over the iteration: among equal vertices of the relaxation they
# prefer those that put slack early or late, which leaves fewer instructions between two options.
TILTS = (0.0, 0.05, -0.05, 0.1, -0.1)
# Preferences for longer options in the sweeps that round the relaxation.
KEENNESS = (1.0, 0.97, 0.9)
# The same in waves, drawn at random while time is left: amplitude, radians over half the iteration.
WAVE_HEIGHT = (0.03, 0.3)
WAVE_NUMBER = (1.0, 30.0)
# Temperatures in units of the mean energy between neighbouring options.
HOT, COLD = 0.13, 0.004
GOOD_GAP = 1e-4
# Refining: one turn in so many starts from the best plan, and so many without gain end it.
WAVES, MOST_IDLE = 4, 40
# What a proposal of each sort may take at most, in seconds; to keep a time limit.
PROPOSAL_S = 3e-6


@dataclass(frozen=True)
class Effort:
    """How much work goes into one deadline before time counts.

    Attributes:
        tilts: How many variants of the relaxation are rounded.
        proposals: Annealing proposals for each instruction and variant.
        refine_s: Seconds to go on improving after that.
    """

    tilts: int
    proposals: int
    refine_s: float = 0.0


QUICK = Effort(tilts=2, proposals=25)
THOROUGH = Effort(tilts=5, proposals=200)


@dataclass(frozen=True)
class Solution:
    """Options for all nodes at one deadline.

    Attributes:
        choice: Position in the option tables for every node.
        cost_j: Sum of effective energies in joules.
        time_s: End of the last instruction, overhead left out, in seconds.
        bound_cost_j: Sum of effective energies of the linear relaxation at the same deadline.
        wide: True where `choice` holds positions in the wide tables.
    """

    choice: IntArray
    cost_j: float
    time_s: float
    bound_cost_j: float
    wide: bool = False


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

    @property
    def relaxed_problem(self) -> Problem:
        """The problem whose relaxation is solved."""
        return self.problem

    @cached_property
    def program(self) -> LinearProgram:
        """The linear program."""
        return LinearProgram(self.relaxed_problem, self.options.solver)

    def length_s(self, duration_s: FloatArray) -> float:
        """Length of the longest path."""
        start = search.earliest_starts(*self.problem.graph.incoming, duration_s)
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
        return replace(solution, time_s=length)

    def bound(self, deadline_s: float) -> LinearSolution:
        """The relaxation at a deadline."""
        if deadline_s not in self._bounds:
            self._bounds[deadline_s] = self.program.solve(deadline_s)
        return self._bounds[deadline_s]

    def bound_cost_j(self, deadline_s: float) -> float:
        """Least sum of effective energies of the relaxation at a deadline."""
        if deadline_s >= self.slowest_s:
            return self.cost_j(self._slowest_choice)
        return self.bound(deadline_s).cost_j

    def bound_energy_j(self, deadline_s: float) -> float:
        """Total energy of the relaxation at a deadline."""
        return self.problem.energy_j(
            self.bound_cost_j(deadline_s), deadline_s + self.problem.overhead_s
        )

    @property
    def _slowest_choice(self) -> IntArray:
        return self.problem.tables.ptr[1:][self.problem.graph.cls] - 1

    def cost_j(self, choice: IntArray) -> float:
        """Sum of effective energies of a choice."""
        return float(self.problem.tables.cost[choice].sum())

    def solution(self, choice: IntArray, bound_cost_j: float) -> Solution:
        """A choice with its figures."""
        length = self.length_s(self.problem.tables.time[choice])
        return Solution(choice, self.cost_j(choice), length, bound_cost_j)

    def gap(self, solution: Solution) -> float:
        """The gap of a solution to its bound, relative to the bound on total energy."""
        whole = self.problem.energy_j(
            solution.bound_cost_j, solution.time_s + self.problem.overhead_s
        )
        excess = max(0.0, solution.cost_j - solution.bound_cost_j)
        return excess / whole if whole > 0 else 0.0

    @cached_property
    def step_j(self) -> float:
        """Mean energy between neighbouring options, the unit of temperatures."""
        graph, tables = self.problem.graph, self.problem.tables
        steps = (tables.ptr[1:] - tables.ptr[:-1] - 1).clip(1)[graph.cls]
        spread = tables.cost[tables.ptr[:-1]] - tables.cost[tables.ptr[1:] - 1]
        return float((spread[graph.cls] / steps).mean()) or 1.0

    def solve(self, deadline_s: float, effort: Effort = THOROUGH) -> Solution:
        """The best plan found at a deadline that is not below the shortest iteration."""
        if deadline_s >= self.slowest_s:
            choice = self._slowest_choice
            return self.solution(choice, self.cost_j(choice))
        began = time.perf_counter()
        limit, proposals = float("inf"), effort.proposals
        if effort.refine_s > 0:
            limit = effort.refine_s
            most = int(limit / (effort.tilts * self.problem.graph.size * PROPOSAL_S))
            proposals = max(5, min(proposals, most))
        bound = self.bound(deadline_s)
        best: IntArray | None = None
        for tilt in TILTS[: effort.tilts]:
            if best is not None and time.perf_counter() - began > limit:
                break
            rounded = self._rounded(self._varied(deadline_s, tilt * self._place), deadline_s)
            choice = self._annealed(*rounded, deadline_s, proposals, HOT, 0)
            if best is None or self.cost_j(choice) < self.cost_j(best):
                best = choice
            if self.gap(self.solution(best, bound.cost_j)) < GOOD_GAP:
                break
        assert best is not None
        left = effort.refine_s - (time.perf_counter() - began)
        if left > 0:
            best = self._refined(best, bound, deadline_s, left)
        return self.solution(best, bound.cost_j)

    @cached_property
    def _place(self) -> FloatArray:
        """When each relaxed node can start at the earliest, from -1 to 1 over the iteration."""
        problem = self.relaxed_problem
        earliest = search.earliest_starts(*problem.graph.incoming, problem.fastest_s)
        return 2 * earliest / (earliest.max() or 1.0) - 1

    def _varied(self, deadline_s: float, change: FloatArray) -> LinearSolution:
        """The relaxation with the slope of every relaxed node changed by so much, relatively."""
        if not change.any():
            return self.bound(deadline_s)
        slope = self.program.slope * (1 + change[self.program.owner])
        return self.program.solve(deadline_s, 0.0, slope)

    def _slack_s(self, deadline_s: float) -> float:
        return 1e-12 * deadline_s

    def _rounded(self, relaxed: LinearSolution, deadline_s: float) -> tuple[FloatArray, IntArray]:
        """Start times and options from the relaxation: the best of a few roundings."""
        graph, tables = self.problem.graph, self.problem.tables
        slack = self._slack_s(deadline_s)
        lists = (tables.ptr, tables.time)
        start = search.earliest_starts(*graph.incoming, relaxed.duration_s)
        start = np.minimum(
            start, search.latest_starts(*graph.outgoing, self.problem.fastest_s, deadline_s)
        )
        choice = search.fit_options(start, deadline_s, slack, *graph.outgoing, graph.cls, *lists)
        best = (self.cost_j(choice), start, choice)
        for turned in (False, True):
            side = graph.reversed if turned else graph
            order = slice(None, None, -1) if turned else slice(None)
            duration = relaxed.duration_s[order].copy()
            latest = search.latest_starts(*side.outgoing, duration, deadline_s) + duration
            price = relaxed.price_w[order].copy()
            for keen in KEENNESS:
                start, choice = rounding.sweep(
                    latest, price, keen, slack, *side.incoming, side.cls, *lists, tables.cost
                )
                cost = self.cost_j(choice)
                length = float((start + tables.time[choice]).max())
                if cost < best[0] and length <= deadline_s + slack:
                    if turned:
                        start, choice = self._turned(start, choice, side, deadline_s)
                    best = (cost, start, choice)
        return best[1], best[2]

    def _turned(
        self, start: FloatArray, choice: IntArray, side: Graph, deadline_s: float
    ) -> tuple[FloatArray, IntArray]:
        return (
            pushing.reverse_starts(start, deadline_s, *side.outgoing),
            choice[::-1].copy(),
        )

    def _annealed(
        self,
        start: FloatArray,
        choice: IntArray,
        deadline_s: float,
        proposals: int,
        hot: float,
        seed: int,
    ) -> IntArray:
        """Anneal by single moves and pushes, forwards and backwards in turn."""
        graph, tables = self.problem.graph, self.problem.tables
        slack = self._slack_s(deadline_s)
        table = (tables.ptr, tables.time, tables.cost)
        best, turns = choice, 4
        start = start.copy()
        count = proposals * graph.size // turns
        ratio = (COLD / hot) ** (1 / turns)
        for turn in range(turns):
            side = graph.reversed if turn % 2 else graph
            lists = (*side.incoming, *side.outgoing, side.cls, *table)
            high, low = (hot * self.step_j * ratio ** (turn + k) for k in (0, 1))
            number = self.options.seed + 7919 * seed + turn
            choice = search.fit_options(
                start, deadline_s, slack, *side.outgoing, side.cls, tables.ptr, tables.time
            )
            search.anneal(start, choice, deadline_s, slack, high, low, count, 3, number, *lists)
            pushing.push(
                start, choice, deadline_s, slack, high, low, count, 0.3, 40, number, *lists
            )
            start, choice = self._turned(start, choice, side, deadline_s)
        return choice if self.cost_j(choice) < self.cost_j(best) else best

    def _refined(
        self, best: IntArray, bound: LinearSolution, deadline_s: float, seconds: float
    ) -> IntArray:
        """Go on until time is up, the gap is small or nothing is gained any more.

        Annealing from other roundings, which other slopes of the relaxation give, finds what
        annealing from the best plan cannot reach; the two take turns.
        """
        began = time.perf_counter()
        random = np.random.default_rng(self.options.seed)
        graph, tables = self.problem.graph, self.problem.tables
        proposals, idle, wave_s = 400, 0, 0.0
        for number in itertools.count(1):
            left = began + seconds - time.perf_counter()
            small = self.gap(self.solution(best, bound.cost_j)) < GOOD_GAP
            if left <= 0 or small or idle > MOST_IDLE:
                break
            if number % WAVES == 0 or left < 2 * wave_s:
                begin = search.earliest_starts(*graph.incoming, tables.time[best])
                state, hot, wanted = (begin, best), 0.06, proposals
                proposals *= 2
            else:
                height, waves = random.uniform(*WAVE_HEIGHT), random.uniform(*WAVE_NUMBER)
                wave = np.sin(waves * self._place + random.uniform(0, 2 * np.pi))
                began_wave = time.perf_counter()
                state = self._rounded(self._varied(deadline_s, height * wave), deadline_s)
                wave_s = max(wave_s, time.perf_counter() - began_wave)
                hot, wanted = HOT, THOROUGH.proposals
            most = max(50, int(left / (graph.size * PROPOSAL_S)))
            found = self._annealed(*state, deadline_s, min(wanted, most), hot, number)
            idle += 1
            if self.cost_j(found) < self.cost_j(best):
                gained = self.cost_j(best) - self.cost_j(found)
                idle = 0 if gained > 2e-5 * abs(bound.cost_j) else idle
                best = found
        return best
