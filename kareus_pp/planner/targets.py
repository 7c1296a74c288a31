"""Targets: each is answered at the deadline that it implies, found on the relaxation first.

Along the relaxation, energy falls and time rises strictly up to the longest useful iteration, and
average power falls with it. So a budget or a cap implies a shortest time; the integer plan needs
slightly more, and is sought from there by secants. Prices of time imply a deadline directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from kareus_pp.errors import TargetError
from kareus_pp.planner.engine import THOROUGH, Effort, Engine, Solution
from kareus_pp.planner.exact import ExactTargets
from kareus_pp.planner.integer import SMALL, binaries
from kareus_pp.planner.problem import Problem
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

_TRIES = 8


class AnyEngine(Protocol):
    """What targets need of an engine: `Engine` or `SwitchEngine`."""

    problem: Problem

    @property
    def shortest_s(self) -> float:
        """Shortest iteration."""

    @property
    def longest_useful_s(self) -> float:
        """Iteration of least energy."""

    def bound_energy_j(self, deadline_s: float) -> float:
        """Total energy of the relaxation at a deadline."""

    def solve(self, deadline_s: float, effort: Effort = ...) -> Solution:
        """The best plan found at a deadline."""


def solve_target(
    engine: AnyEngine, relaxation: Engine, target: Target, refine_s: float, cap_w: float | None
) -> Solution:
    """The plan for a target.

    Args:
        engine: Solves at deadlines.
        relaxation: The engine whose relaxation places a price on time.
        target: The target.
        refine_s: Seconds for the plan, beyond a first good one.
        cap_w: Most average power over all stages; None for no cap.

    Raises:
        TargetError: The target cannot be met; the message says what can.
    """
    small = engine is relaxation and binaries(engine.problem) <= SMALL
    exact = ExactTargets(relaxation, refine_s) if small and refine_s > 0 else None
    solution = exact.solve(target) if exact else None
    if solution is None:
        solution = _solve(engine, relaxation, target, refine_s)
    if cap_w is not None and _power_w(engine.problem, solution) > cap_w:
        capped = exact.solve(PowerCap(cap_w)) if exact else None
        return capped or _within_power(engine, relaxation, cap_w, refine_s)
    return solution


def _solve(engine: AnyEngine, relaxation: Engine, target: Target, refine_s: float) -> Solution:
    problem, effort = engine.problem, replace(THOROUGH, refine_s=refine_s)
    shortest = engine.shortest_s
    if isinstance(target, Fastest):
        return engine.solve(shortest, effort)
    if isinstance(target, Straggler):
        return engine.solve(max(shortest, target.time_s - problem.overhead_s), effort)
    if isinstance(target, LeastEnergy):
        return engine.solve(engine.longest_useful_s, effort)
    if isinstance(target, Deadline | Slowdown):
        wanted = (
            target.time_s
            if isinstance(target, Deadline)
            else (shortest + problem.overhead_s) * (1 + target.percent / 100)
        ) - problem.overhead_s
        if wanted <= shortest:
            return engine.solve(shortest, effort)
        return engine.solve(min(wanted, engine.longest_useful_s), effort)
    if isinstance(target, EnergyBudget):
        return _within_energy(engine, target.energy_j, refine_s)
    if isinstance(target, PowerCap):
        return _within_power(engine, relaxation, target.power_w, refine_s)
    if isinstance(target, Cost):
        if target.per_joule == 0:
            return engine.solve(shortest, effort)
        watts = problem.static_w + target.per_hour / 3600 / target.per_joule
        return engine.solve(max(shortest, relaxation.bound_at_price(watts).time_s), effort)
    assert isinstance(target, EnergyDelayProduct)
    return _least_product(engine, refine_s)


def _energy_j(problem: Problem, solution: Solution) -> float:
    return problem.energy_j(solution.cost_j, solution.time_s + problem.overhead_s)


def _power_w(problem: Problem, solution: Solution) -> float:
    return _energy_j(problem, solution) / (solution.time_s + problem.overhead_s or 1.0)


def _within_energy(engine: AnyEngine, budget_j: float, refine_s: float) -> Solution:
    problem = engine.problem
    found = _shortest_within(
        engine,
        engine.longest_useful_s,
        lambda deadline: engine.bound_energy_j(deadline) - budget_j,
        lambda solution: _energy_j(problem, solution) - budget_j,
        refine_s,
    )
    excess, solution = found
    if excess > 0:
        raise TargetError(
            f"the energy budget of {budget_j:g} J cannot be met: the least energy of an iteration "
            f"is {_energy_j(problem, solution):.6g} J; allow at least that"
        )
    return solution


def _within_power(engine: AnyEngine, relaxation: Engine, cap_w: float, refine_s: float) -> Solution:
    problem = engine.problem
    # Past the iteration of least energy, average power still falls.
    excess, solution = _shortest_within(
        engine,
        max(engine.shortest_s, relaxation.slowest_s),
        lambda deadline: engine.bound_energy_j(deadline) / (deadline + problem.overhead_s) - cap_w,
        lambda solution: _power_w(problem, solution) - cap_w,
        refine_s,
    )
    if excess > 0:
        raise TargetError(
            f"the power cap of {cap_w:g} W cannot be met: the least average power of an iteration "
            f"is {_power_w(problem, solution):.6g} W over all stages; allow at least that"
        )
    return solution


def _shortest_within(
    engine: AnyEngine,
    longest_s: float,
    bound_excess: Callable[[float], float],
    excess: Callable[[Solution], float],
    refine_s: float,
) -> tuple[float, Solution]:
    """The shortest plan found without excess, else the one of least excess; with its excess."""
    effort = replace(THOROUGH, refine_s=refine_s / _TRIES)
    low, high = engine.shortest_s, longest_s
    first = _crossing(bound_excess, low, high)
    best: tuple[float, Solution] | None = None
    deadline, failed = first, low
    for _ in range(_TRIES):
        solution = engine.solve(deadline, effort)
        over = excess(solution)
        if (
            best is None
            or (over <= 0 and (best[0] > 0 or solution.time_s < best[1].time_s))
            or (over < best[0] and best[0] > 0)
        ):
            best = (over, solution)
        if over <= 0:
            if deadline - failed <= 1e-4 * deadline:
                break
            deadline = (failed + deadline) / 2
        else:
            failed = deadline
            if best[0] <= 0:
                deadline = (failed + best[1].time_s) / 2
            elif deadline >= high:
                break
            else:
                # The relaxation tells how fast the excess falls with time.
                ahead = min(high, deadline * 1.005)
                slope = (bound_excess(deadline) - bound_excess(ahead)) / max(
                    ahead - deadline, 1e-12 * high
                )
                step = 1.1 * over / slope if slope > 0 else high - deadline
                deadline = min(high, deadline + max(step, 1e-4 * deadline))
    assert best is not None
    if best[0] > 0:
        solution = engine.solve(high, effort)
        best = min(best, (excess(solution), solution), key=lambda pair: pair[0])
    return best


def _crossing(bound_excess: Callable[[float], float], low: float, high: float) -> float:
    """First deadline at which the relaxation has no excess, by bisection."""
    if bound_excess(low) <= 0:
        return low
    if bound_excess(high) > 0:
        return high
    for _ in range(30):
        middle = (low + high) / 2
        if bound_excess(middle) <= 0:
            high = middle
        else:
            low = middle
        if high - low <= 1e-7 * high:
            break
    return high


def _least_product(engine: AnyEngine, refine_s: float) -> Solution:
    """Least product of time and energy: the relaxation's best deadline and its neighbours."""
    problem = engine.problem
    low, high = engine.shortest_s, engine.longest_useful_s

    def product(deadline: float) -> float:
        return engine.bound_energy_j(deadline) * (deadline + problem.overhead_s)

    for _ in range(4):
        # The product need not be convex along the relaxation: zoom in on a grid.
        grid = np.linspace(high, low, 9)
        values = [product(float(deadline)) for deadline in grid]
        best = int(np.argmin(values))
        low, high = float(grid[min(best + 1, 8)]), float(grid[max(best - 1, 0)])
    at = float(grid[best])
    effort = replace(THOROUGH, refine_s=refine_s / 3)
    nearby = {
        max(engine.shortest_s, min(at * by, engine.longest_useful_s)) for by in (1, 0.998, 1.002)
    }
    found = [engine.solve(deadline, effort) for deadline in sorted(nearby)]
    return min(found, key=lambda s: _energy_j(problem, s) * (s.time_s + problem.overhead_s))
