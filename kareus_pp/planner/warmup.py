"""Compilation of the inner loops ahead of time, so that it can be told apart from solving."""

from __future__ import annotations

import time
from dataclasses import replace

from kareus_pp.builders import build_1f1b
from kareus_pp.planner.api import Planner
from kareus_pp.planner.options import PlannerOptions, Solver
from kareus_pp.profile import Option, Profile
from kareus_pp.setting import OverlapSetting, Setting
from kareus_pp.target import Deadline


def compile_loops(solver: Solver = "highs", overlaps: bool = False) -> float:
    """Plan a tiny pipeline once, with and without a price on switches; returns the seconds taken.

    Args:
        solver: Solver behind PuLP.
        overlaps: Compile what chooses the microbatches to split, too.

    Where numba can cache, only the first process of all compiles, in about 10 to 20 s; the others
    load the machine code in about a second.
    """
    began = time.perf_counter()
    schedule = build_1f1b(2, 2)
    options = tuple(
        Option(Setting(clock), 1e3 / clock, 1e-3 * clock) for clock in range(900, 1500, 50)
    )
    if overlaps:
        split = OverlapSetting.parse("mlp@0:0")
        options += tuple(
            replace(o, setting=o.setting._replace(overlap=split), time_s=0.9 * o.time_s)
            for o in options
        )
    profile = Profile(dict.fromkeys(schedule.classes, options), (0.1, 0.1))
    for delay in (0.0, 1e-3):
        settings = PlannerOptions(solver=solver, time_limit_s=0.01, switch_delay_s=delay)
        planner = Planner(schedule, profile, settings)
        planner.plan(Deadline(1.1 * planner.shortest_s))
    return time.perf_counter() - began
