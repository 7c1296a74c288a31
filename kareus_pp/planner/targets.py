"""Targets: each is answered by the engine directly, at the deadline that it implies."""

from __future__ import annotations

from kareus_pp.errors import TargetError
from kareus_pp.planner.engine import Engine, Solution
from kareus_pp.target import (
    Deadline,
    Fastest,
    LeastEnergy,
    Slowdown,
    Straggler,
    Target,
)


def solve_target(engine: Engine, target: Target, time_limit_s: float) -> Solution:
    """The plan for a target.

    Raises:
        TargetError: The target cannot be met; the message says what can.
    """
    problem = engine.problem
    if isinstance(target, Fastest):
        return engine.solve(engine.shortest_s, time_limit_s)
    if isinstance(target, Straggler):
        return engine.solve(
            max(engine.shortest_s, target.time_s - problem.overhead_s), time_limit_s
        )
    if isinstance(target, LeastEnergy):
        return engine.solve(engine.longest_useful_s, time_limit_s)
    if isinstance(target, Deadline | Slowdown):
        wanted = (
            target.time_s
            if isinstance(target, Deadline)
            else (engine.shortest_s + problem.overhead_s) * (1 + target.percent / 100)
        ) - problem.overhead_s
        if wanted > engine.shortest_s:
            wanted = min(wanted, engine.longest_useful_s)
        return engine.solve(max(engine.shortest_s, wanted), time_limit_s)
    raise TargetError("not yet")
