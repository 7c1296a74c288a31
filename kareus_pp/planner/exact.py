"""Targets on problems small enough for the integer program: each is solved to the optimum."""

from __future__ import annotations

import math

from kareus_pp.planner.engine import Engine, Solution
from kareus_pp.planner.integer import Limit, solve_exactly
from kareus_pp.target import (
    Cost,
    Deadline,
    EnergyBudget,
    EnergyDelayProduct,
    Fastest,
    LeastEnergy,
    PowerCap,
    Slowdown,
    Straggler,
    Target,
)

# Most programs for one energy-delay product.
_MOST_PRODUCTS = 60


class ExactTargets:
    """Answers targets by integer programs; None wherever a proof fails in the time allowed.

    Args:
        engine: The engine of the problem.
        time_limit_s: Time limit of one program in seconds.
    """

    def __init__(self, engine: Engine, time_limit_s: float) -> None:
        self.engine = engine
        self.problem = engine.problem
        self.time_limit_s = time_limit_s

    def solve(self, target: Target) -> Solution | None:
        """The plan for a target; None where it is not proven, or the target cannot be met."""
        problem, shortest = self.problem, self.engine.shortest_s
        watts, overhead = problem.static_w, problem.overhead_s
        if isinstance(target, Fastest):
            return self._least(shortest, watts)
        if isinstance(target, Straggler):
            return self._least(max(shortest, target.time_s - overhead), 0.0)
        if isinstance(target, LeastEnergy):
            return self._least(self.engine.slowest_s, watts)
        if isinstance(target, Deadline):
            return self._least(max(shortest, target.time_s - overhead), watts)
        if isinstance(target, Slowdown):
            whole = (shortest + overhead) * (1 + target.percent / 100)
            return self._least(max(shortest, whole - overhead), watts)
        if isinstance(target, Cost):
            if target.per_joule == 0:
                return self._least(shortest, watts)
            price = watts + target.per_hour / 3600 / target.per_joule
            return self._least(self.engine.slowest_s, price)
        if isinstance(target, EnergyBudget):
            return self._shortest(Limit(1.0, watts, target.energy_j - watts * overhead))
        if isinstance(target, PowerCap):
            over = watts - target.power_w
            return self._shortest(Limit(1.0, over, -over * overhead))
        assert isinstance(target, EnergyDelayProduct)
        return self._least_product()

    def _least(
        self, deadline_s: float, end_price_w: float, limit: Limit | None = None
    ) -> Solution | None:
        deadline_s = min(deadline_s, self.engine.slowest_s)
        result = solve_exactly(
            self.problem,
            deadline_s,
            self.engine.options.solver,
            self.time_limit_s,
            time_weight=end_price_w,
            limit=limit,
        )
        if result.choice is None or not result.proven:
            return None
        solution = self.engine.solution(result.choice, 0.0)
        if solution.time_s > deadline_s * (1 + 1e-9):
            return None
        bound = self.engine.bound_cost_j(max(deadline_s, solution.time_s))
        return self.engine.solution(result.choice, bound)

    def _shortest(self, limit: Limit) -> Solution | None:
        result = solve_exactly(
            self.problem,
            self.engine.slowest_s,
            self.engine.options.solver,
            self.time_limit_s,
            cost_weight=0.0,
            time_weight=1.0,
            limit=limit,
        )
        if result.choice is None or not result.proven:
            return None
        shortest = self.engine.solution(result.choice, 0.0)
        if not self._keeps(shortest, limit):
            return None  # the program kept a power cap by waiting at the end, which plans cannot
        cheaper = self._least(shortest.time_s, self.problem.static_w, limit)
        if cheaper is not None and self._keeps(cheaper, limit):
            return cheaper
        bound = self.engine.bound_cost_j(shortest.time_s)
        return self.engine.solution(result.choice, bound)

    def _keeps(self, solution: Solution, limit: Limit) -> bool:
        used = limit.cost_weight * solution.cost_j + limit.time_weight * solution.time_s
        size = abs(limit.most) + abs(limit.time_weight) * solution.time_s
        return used <= limit.most + 1e-9 * size

    def _least_product(self) -> Solution | None:
        """Branch and bound on time: no plan within `(low, high]` has less than `low * E(high)`."""
        overhead, watts = self.problem.overhead_s, self.problem.static_w
        best, best_value = None, math.inf
        open_ranges = [(self.engine.shortest_s, self.engine.slowest_s)]
        for _ in range(_MOST_PRODUCTS):
            if not open_ranges:
                return best
            low, high = open_ranges.pop()
            solution = self._least(high, watts)
            if solution is None:
                return None
            energy = self.problem.energy_j(solution.cost_j, solution.time_s + overhead)
            value = energy * (solution.time_s + overhead)
            if value < best_value:
                best, best_value = solution, value
            # Times between this plan's and `high` cost at least as much energy.
            # The solver's tolerance is about 1e-6.
            high = solution.time_s * (1 - 1e-5)
            if high > low and (low + overhead) * energy < best_value * (1 - 1e-9):
                middle = (low + high) / 2
                open_ranges += [(low, middle), (middle, high)]
        return None
