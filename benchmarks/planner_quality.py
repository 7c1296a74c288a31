"""Sections on quality and speed: gaps, held-out settings, frontiers against lowtime, scaling."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.planner_data import MICROBATCHES, deeper, measured_profiles
from benchmarks.planner_lowtime import lowtime_frontier, undominated
from kareus_pp.builders import build_1f1b
from kareus_pp.planner import Planner, PlannerOptions
from kareus_pp.planner import engine as engine_module
from kareus_pp.planner.engine import THOROUGH, Effort, Engine
from kareus_pp.planner.problem import build_problem
from kareus_pp.profile import Profile
from kareus_pp.target import Deadline

DEADLINES = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.25)


def _engine(profile: Profile, microbatches: int) -> Engine:
    options = PlannerOptions(smoothing="none")
    schedule = build_1f1b(profile.stages, microbatches)
    return Engine(build_problem(schedule, profile, options), options)


def gaps(seconds: float, microbatches: tuple[int, ...] = MICROBATCHES) -> dict[str, Any]:
    """Gap to the linear bound by profile, microbatches and deadline, at so many seconds a point."""
    rows, every = [], []
    for name, profile in measured_profiles().items():
        for count in microbatches:
            engine = _engine(profile, count)
            row: dict[str, Any] = {"profile": name, "microbatches": count, "seconds_most": 0.0}
            for factor in DEADLINES:
                began = time.perf_counter()
                effort = replace(THOROUGH, refine_s=seconds)
                solution = engine.solve(factor * engine.shortest_s, effort)
                took = time.perf_counter() - began
                row[f"+{(factor - 1) * 100:g}%"] = engine.gap(solution)
                row["seconds_most"] = max(row["seconds_most"], took)
                every.append(engine.gap(solution))
            rows.append(row)
    return {
        "seconds_per_point": seconds,
        "rows": rows,
        "gap_median": median(every),
        "gap_most": max(every),
    }


def held_out() -> dict[str, Any]:
    """Each profile with the search settings that are best on the others; 12 microbatches."""
    profiles = measured_profiles()
    settings = [(hot, tilts) for hot in (0.05, 0.13, 0.3) for tilts in (2, 3, 5)]
    usual = engine_module.HOT
    found: dict[str, dict[tuple[float, int], float]] = {}
    try:
        for name, profile in profiles.items():
            engine = _engine(profile, 12)
            found[name] = {}
            for hot, tilts in settings:
                engine_module.HOT = hot
                effort = Effort(tilts, 1000 // tilts)
                found[name][hot, tilts] = mean(
                    engine.gap(engine.solve(f * engine.shortest_s, effort)) for f in DEADLINES
                )
    finally:
        engine_module.HOT = usual
    rows = []
    for name, own in found.items():
        others = {s: mean(found[o][s] for o in found if o != name) for s in settings}
        chosen = min(others, key=lambda s: others[s])
        rows.append(
            {
                "profile": name,
                "chosen_on_others": f"hot {chosen[0]}, {chosen[1]} variants",
                "gap_mean": own[chosen],
                "gap_mean_best_settings": min(own.values()),
                "gap_mean_default_settings": own[usual, 5],
            }
        )
    return {"rows": rows}


def frontiers(points: int, microbatches: tuple[int, ...], peers: tuple[int, ...]) -> dict[str, Any]:
    """Whole frontiers of GPT-3 on A100; against lowtime where asked."""
    profile = measured_profiles()["gpt3-175b+a100_sxm"]
    rows = []
    for count in microbatches:
        schedule = build_1f1b(profile.stages, count)
        # Processor time, both sides being single-threaded: the ratio holds on a busy machine too.
        began, began_cpu = time.perf_counter(), time.process_time()
        planner = Planner(schedule, profile, PlannerOptions(smoothing="none"))
        plans = planner.sweep(points, planner.longest_useful_s)
        seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        row: dict[str, Any] = {
            "microbatches": count,
            "points": len(plans),
            "seconds": seconds,
            "cpu_seconds": cpu,
            "gap_mean": mean(p.gap or 0.0 for p in plans),
            "shortest_reached": plans[0].time_s == planner.shortest_s,
        }
        if count in peers:
            row |= _beside_lowtime(planner, profile, cpu)
        rows.append(row)
    return {"rows": rows}


def _beside_lowtime(planner: Planner, profile: Profile, cpu: float) -> dict[str, Any]:
    points, peer_cpu = lowtime_frontier(planner.problem.schedule, profile)
    best = undominated(points)
    savings = []
    for point in best:
        ours = planner.sweep(2, point.time_s)[-1]
        savings.append(1 - (ours.energy_j or 0.0) / point.energy_j)
    late = [p.time_s / p.predicted_s - 1 for p in points]
    return {
        "lowtime_cpu_seconds": peer_cpu,
        "lowtime_over_ours": peer_cpu / cpu,
        "lowtime_plans": len(points),
        "lowtime_undominated": len(best),
        "saving_least": min(savings),
        "saving_median": median(savings),
        "saving_most": max(savings),
        "lowtime_shortest_over_shortest": min(p.time_s for p in points) / planner.shortest_s,
        "lowtime_overruns_by_0.1%": mean(value > 1e-3 for value in late),
    }


def scaling(sizes: tuple[tuple[int, int], ...], seconds: float) -> dict[str, Any]:
    """One plan of very large pipelines, 5 % over the shortest; bounds by weak duality."""
    base = measured_profiles()["gpt3-175b+a100_sxm"]
    rows = []
    for stages, count in sizes:
        profile = deeper(base, stages, 0.03, seed=0)
        began = time.perf_counter()
        schedule = build_1f1b(stages, count)
        planner = Planner(schedule, profile, PlannerOptions(smoothing="none"))
        deadline = 1.05 * planner.shortest_s
        plan = planner.plan(Deadline(deadline), refine_s=max(0.1, seconds))
        took = time.perf_counter() - began
        rows.append(
            {
                "stages": stages,
                "microbatches": count,
                "instructions": len(schedule.instructions),
                "gap": plan.gap,
                "seconds": took,
                "time_over_deadline": (plan.time_s or 0.0) / deadline,
                "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            }
        )
    return {"rows": rows}


def relaxation_excess(microbatches: int = 256) -> float:
    """Relative difference of the reduced and the full relaxation, 8 stages, at +5 %."""
    from kareus_pp.planner.grouping import LargeEngine

    engine = _engine(measured_profiles()["gpt3-175b+a100_sxm"], microbatches)
    reduced = LargeEngine(engine.problem, engine.options)
    deadline = 1.05 * engine.shortest_s
    full = engine.bound(deadline).cost_j
    return float(np.abs(full - reduced.bound(deadline).cost_j) / full)
