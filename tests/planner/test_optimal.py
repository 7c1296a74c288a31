"""The planner against brute force on small random problems, and what must always hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kareus_pp.errors import TargetError
from kareus_pp.evaluate import SwitchPrice, evaluate
from kareus_pp.plan import Plan, validate_plan
from kareus_pp.planner import PlannerOptions, plan
from kareus_pp.profile import Option, Profile
from kareus_pp.schedule import InstructionClass, Schedule
from kareus_pp.target import (
    Cost,
    Deadline,
    EnergyBudget,
    EnergyDelayProduct,
    Fastest,
    LeastEnergy,
    PowerCap,
    Slowdown,
)
from tests.planner.problems import all_points, least, problems

QUICK = PlannerOptions(time_limit_s=1.0)
few = settings(max_examples=60, deadline=None)


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6)


def check(result: Plan, profile: Profile, switch: SwitchPrice | None = None) -> None:
    """A plan is complete, simulates to what it claims, and is bounded."""
    validate_plan(result, profile)
    price = switch or SwitchPrice(result.switch_delay_s, result.switch_energy_j)
    found = evaluate(result.schedule, result.settings, profile, price)
    assert result.time_s == found.time_s
    assert result.energy_j == found.energy_j
    assert result.bound_j is not None
    assert result.bound_j <= found.energy_j + 1e-6 * max(1.0, abs(found.energy_j))


@few
@given(problems(), st.floats(0.0, 1.2))
def test_a_deadline_is_met_at_the_least_energy(
    problem: tuple[Schedule, Profile], share: float
) -> None:
    schedule, profile = problem
    points = list(all_points(schedule, profile))
    shortest = least(points, lambda p: p[0])
    deadline = shortest + share * (max(p[0] for p in points) - shortest)
    result = plan(schedule, profile, Deadline(deadline), QUICK)
    check(result, profile)
    assert result.time_s is not None
    assert result.time_s <= deadline * (1 + 1e-9)
    best = least([p for p in points if p[0] <= deadline * (1 + 1e-9)], lambda p: p[1])
    assert close(result.energy_j or 0.0, best)


@few
@given(problems())
def test_the_shortest_iteration_is_truly_reached(problem: tuple[Schedule, Profile]) -> None:
    schedule, profile = problem
    points = list(all_points(schedule, profile))
    shortest = least(points, lambda p: p[0])
    for target in (Fastest(), Slowdown(0.0), Deadline(0.5 * shortest + 1e-6)):
        result = plan(schedule, profile, target, QUICK)
        check(result, profile)
        assert close(result.time_s or 0.0, shortest)
        best = least([p for p in points if p[0] <= shortest * (1 + 1e-9)], lambda p: p[1])
        assert close(result.energy_j or 0.0, best)


def between(values: list[float], share: float) -> float:
    """A value strictly between two of those that occur, or above all of them."""
    ranked = sorted({round(v, 6) for v in values})
    place = min(int(share * len(ranked)), len(ranked) - 1)
    after = ranked[place + 1] if place + 1 < len(ranked) else ranked[place] + 1.0
    return (ranked[place] + after) / 2


@few
@given(problems(), st.floats(0.0, 1.0))
def test_the_shortest_iteration_within_a_budget(
    problem: tuple[Schedule, Profile], share: float
) -> None:
    schedule, profile = problem
    points = list(all_points(schedule, profile))
    budget = between([p[1] for p in points], share)
    result = plan(schedule, profile, EnergyBudget(budget), QUICK)
    check(result, profile)
    assert (result.energy_j or 0.0) <= budget * (1 + 1e-9)
    assert close(result.time_s or 0.0, least([p for p in points if p[1] <= budget], time))
    below = least(points, energy) - 0.1
    if below > 0:
        with pytest.raises(TargetError, match="least energy"):
            plan(schedule, profile, EnergyBudget(below), QUICK)


@few
@given(problems(), st.floats(0.0, 1.0))
def test_a_power_cap_is_met_or_refused(problem: tuple[Schedule, Profile], share: float) -> None:
    schedule, profile = problem
    profile = above_blocking_power(profile)
    # To go slower at no less effective energy, only to lower the average, is not a plan.
    points = list(all_points(schedule, without_dominated(profile)))
    powers = [p[1] / p[0] for p in points if p[0] > 0]
    assume(len(powers) == len(points))
    cap = between(powers, share)
    for target, options in (
        (PowerCap(cap), QUICK),
        (Fastest(), replace(QUICK, power_cap_w=cap)),
    ):
        result = plan(schedule, profile, target, options)
        check(result, profile)
        assert (result.energy_j or 0.0) <= cap * (result.time_s or 0.0) * (1 + 1e-9)
        shortest = least([p for p in points if p[1] <= cap * p[0]], time)
        assert (result.time_s or 0.0) >= shortest * (1 - 1e-9)
    below = min(powers) - 0.1
    if below > 0:
        with pytest.raises(TargetError, match="least average power"):
            plan(schedule, profile, PowerCap(below), QUICK)


@few
@given(problems())
def test_energy_product_and_cost_are_least(problem: tuple[Schedule, Profile]) -> None:
    schedule, profile = problem
    points = list(all_points(schedule, profile))
    for target, value in (
        (LeastEnergy(), energy),
        (EnergyDelayProduct(), product),
        (Cost(1.0, 3600.0), lambda p: p[1] + p[0]),
    ):
        result = plan(schedule, profile, target, QUICK)
        check(result, profile)
        found = value((result.time_s or 0.0, result.energy_j or 0.0, ()))
        assert close(found, least(points, value)), target


def time(point: tuple[float, float, object]) -> float:
    return point[0]


def energy(point: tuple[float, float, object]) -> float:
    return point[1]


def product(point: tuple[float, float, object]) -> float:
    return point[0] * point[1]


def above_blocking_power(profile: Profile) -> Profile:
    """The profile with energies on top of the blocking power, as those of real instructions."""
    return replace(
        profile,
        options={
            cls: tuple(
                replace(o, energy_j=o.energy_j + profile.blocking_power_w[cls.stage] * o.time_s)
                for o in own
            )
            for cls, own in profile.options.items()
        },
    )


def without_dominated(profile: Profile) -> Profile:
    def effective(cls: InstructionClass, option: Option) -> tuple[float, float]:
        watts = profile.blocking_power_w[cls.stage]
        return option.time_s, option.energy_j - watts * option.time_s

    options = {}
    for cls, own in profile.options.items():
        costs = [effective(cls, o) for o in own]
        options[cls] = tuple(
            o
            for k, (o, c) in enumerate(zip(own, costs, strict=True))
            if not any(
                d[0] <= c[0] and d[1] <= c[1] and (d != c or j < k)
                for j, d in enumerate(costs)
                if j != k
            )
        )
    return replace(profile, options=options)
