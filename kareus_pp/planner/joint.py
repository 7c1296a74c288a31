"""The relaxation in which a microbatch is split by a share, the same in forward and backward.

For every instruction weights on the vertices of the hulls of its whole and of its split options; of
every microbatch on a stage the weights on split options sum to its share, in the forward as in the
backward. No plan that splits consistently needs less than its optimum. Where shares must be 0 or 1
it says which microbatches are worth splitting; rounded shares nearly do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pulp

from kareus_pp.planner.linear import add_variable, make_solver
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import Place, Problem, build_problem, place_of
from kareus_pp.profile import Profile
from kareus_pp.schedule import Schedule

Aim = float | Literal["shortest", "least energy"]
# Shares from which on a microbatch is split, one way of rounding each.
ROUNDINGS = (0.5, 0.05, 0.95)
# Shares of up to so many microbatches are also sought as whole numbers.
MOST_WHOLE = 200
# A time is met with this tolerance, relatively: it comes from a plan, through other sums.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Shares:
    """A solution.

    Attributes:
        cost_j: Sum of effective energies in joules; only at an iteration time.
        share: How much of each microbatch is split, from 0 to 1.
    """

    cost_j: float
    share: dict[Place, float]

    def rounded(self, threshold: float) -> frozenset[Place]:
        """The microbatches whose share is at least a threshold."""
        return frozenset(place for place, share in self.share.items() if share >= threshold)


class JointRelaxation:
    """The relaxation of one schedule and profile; with HiGHS solved again from the last basis.

    Args:
        schedule: The schedule.
        profile: Options of every class in it.
        options: Which clocks are allowed, and the solver.
        places: The microbatches that can be split.
    """

    def __init__(
        self,
        schedule: Schedule,
        profile: Profile,
        options: PlannerOptions,
        places: Collection[Place],
    ) -> None:
        self._whole = build_problem(schedule, profile, options, frozenset())
        self._split = build_problem(schedule, profile, options, frozenset(places))
        self._solver = options.solver
        self._places = sorted(places)
        tables, graph = self._whole.tables, self._whole.graph
        # In units of a typical duration and energy: the solver's tolerances are absolute.
        self._second = 1.0 / (float(self._whole.slowest_s.mean()) or 1.0)
        spread = tables.cost[tables.ptr[:-1]] - tables.cost[tables.ptr[1:] - 1]
        self._joule = 1.0 / (float(spread[graph.cls].mean()) or 1.0)
        order = [schedule.instructions[node] for node in graph.node.tolist()]
        self._place = [None if i.kind.is_fixed else place_of(i) for i in order]
        self._known: dict[float, Shares | None] = {}

    def at(self, time_s: float) -> Shares | None:
        """Least effective energy at an iteration time; None where there is no such iteration.

        Args:
            time_s: Iteration time, overhead included.
        """
        if time_s not in self._known:
            self._known[time_s] = self._relaxed.solve(self._latest(time_s))
        return self._known[time_s]

    def splits(self, aim: Aim, limit_s: float) -> list[frozenset[Place]]:
        """Sets of microbatches that are worth splitting, the most promising first.

        Args:
            aim: Iteration time, overhead included, or what to look for at any time.
            limit_s: Seconds to look for shares of 0 or 1, which is done where there are few.
        """
        found: dict[frozenset[Place], None] = {}
        latest = self._latest(aim) if isinstance(aim, float) else None
        if len(self._places) <= MOST_WHOLE and limit_s > 0:
            exact = self._program(aim, whole=True, timeLimit=limit_s).solve(latest)
            if exact is not None:
                found[exact.rounded(0.5)] = None
        relaxed = self.at(aim) if isinstance(aim, float) else self._program(aim).solve(None)
        if relaxed is not None:
            found.update(dict.fromkeys(relaxed.rounded(at) for at in ROUNDINGS))
        return list(found)

    def _latest(self, time_s: float) -> float:
        return (time_s * (1 + _TOLERANCE) - self._whole.overhead_s) * self._second

    @cached_property
    def _relaxed(self) -> _Program:
        return self._program(0.0)

    def _program(self, aim: Aim, whole: bool = False, **limits: float) -> _Program:
        model = pulp.LpProblem("joint", pulp.LpMinimize)
        end = add_variable(model, "end", 0)
        category = pulp.LpInteger if whole else pulp.LpContinuous
        share = {
            place: add_variable(model, f"share{n}", 0, 1, category)
            for n, place in enumerate(self._places)
        }
        duration, cost = self._weights(model, share)
        _add_dependencies(model, self._whole, duration, end, self._second)
        if aim == "shortest":
            cost = [(end, 1.0)]
        elif aim == "least energy":
            # Time costs the blocking power.
            cost.append((end, self._whole.static_w * self._joule / self._second))
        model.setObjective(pulp.LpAffineExpression(cost))
        return _Program(model, end, share, make_solver(self._solver, **limits), self._joule)

    def _weights(
        self, model: Any, share: dict[Place, Any]
    ) -> tuple[list[list[tuple[Any, float]]], list[tuple[Any, float]]]:
        """Terms of every node's duration, and of the objective."""
        durations: list[list[tuple[Any, float]]] = []
        cost: list[tuple[Any, float]] = []
        for node, place in enumerate(self._place):
            own: list[tuple[Any, float]] = []
            split = share.get(place) if place is not None else None
            for name, problem in (("w", self._whole), ("s", self._split)):
                if name == "s" and split is None:
                    continue
                tables, cls = problem.tables, problem.graph.cls[node]
                first = int(tables.ptr[cls])
                at = first + np.flatnonzero(tables.hull[first : tables.ptr[cls + 1]])
                weights = [add_variable(model, f"{name}{node}_{k}", 0) for k in range(len(at))]
                total = [(weight, 1.0) for weight in weights]
                if name == "s":
                    total.append((split, -1.0))
                elif split is not None:
                    total.append((split, 1.0))
                model.addConstraint(pulp.LpAffineExpression(total) == (1 if name == "w" else 0))
                own += zip(weights, (tables.time[at] * self._second).tolist(), strict=True)
                cost += zip(weights, (tables.cost[at] * self._joule).tolist(), strict=True)
            durations.append(own)
        return durations, cost


class _Program:
    """One linear or integer program, for one iteration time after another."""

    def __init__(
        self, model: Any, end: Any, share: dict[Place, Any], solver: Any, joule: float
    ) -> None:
        self._model, self._end, self._share = model, end, share
        self._solver, self._joule = solver, joule
        self._loaded = False

    def solve(self, latest: float | None) -> Shares | None:
        """Solve for the latest end, in the program's units; None leaves it free."""
        if self._loaded:
            return self._again(np.inf if latest is None else latest)
        self._end.upBound = latest
        status = self._model.solve(self._solver)
        self._loaded = hasattr(self._model, "solverModel")
        if status != pulp.LpStatusOptimal:
            return None
        value = float(pulp.value(self._model.objective))
        return self._shares(value, [v.varValue or 0.0 for v in self._share.values()])

    def _again(self, latest: float) -> Shares | None:
        """Solve from the last basis, which is nearly optimal for another end."""
        highs = self._model.solverModel
        highs.changeColBounds(self._end.index, 0.0, latest)
        highs.run()
        if highs.modelStatusToString(highs.getModelStatus()) != "Optimal":
            return None
        value = highs.getSolution().col_value
        return self._shares(
            float(highs.getObjectiveValue()), [value[v.index] for v in self._share.values()]
        )

    def _shares(self, objective: float, values: Sequence[float]) -> Shares:
        return Shares(objective / self._joule, dict(zip(self._share, values, strict=True)))


def _add_dependencies(
    model: Any,
    problem: Problem,
    duration: list[list[tuple[Any, float]]],
    end: Any,
    second: float,
) -> None:
    graph = problem.graph
    finish = [add_variable(model, f"y{node}", 0) for node in range(graph.size)]
    for node in range(graph.size):
        takes = [(weight, -value) for weight, value in duration[node]]
        low, high = int(graph.in_ptr[node]), int(graph.in_ptr[node + 1])
        for k in range(low, high):
            row = [(finish[node], 1.0), (finish[graph.in_node[k]], -1.0), *takes]
            lag = float(graph.in_lag[k]) * second
            model.addConstraint(pulp.LpAffineExpression(row) >= lag)
        if low == high:
            model.addConstraint(pulp.LpAffineExpression([(finish[node], 1.0), *takes]) >= 0)
        if graph.out_ptr[node] == graph.out_ptr[node + 1]:
            model.addConstraint(end - finish[node] >= 0)
