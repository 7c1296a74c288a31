"""Faults put into an emulated profile phase: what is rejected, and the error that remains.

The job is that of `benchmarks.learning_emulated`; a fault changes its samples and records before
they are read, as a real GPU would have. Its tables are printed by `benchmarks.learning`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.learning_emulated import (
    MICROBATCHES,
    STAGES,
    SampledJob,
    errors,
    job_config,
    usable_clocks,
    works,
)
from kareus_pp.builders import build_1f1b
from kareus_pp.config import ProfilingConfig
from kareus_pp.device.base import DEFAULT_CLOCK, Sample
from kareus_pp.measure import ExperimentDesign, IterationRecord, PlanRun, Runs, learn
from kareus_pp.plan import Settings
from kareus_pp.simulate.gpu_model import load_gpu_model

Samples = Sequence[Sequence[Sample]]
Fault = Callable[[list[list[Sample]], IterationRecord, float, float, int], IterationRecord]
SLOW = 1.15
CEILING_MHZ = 1200


def none(
    samples: list[list[Sample]], record: IterationRecord, start_s: float, end_s: float, turn: int
) -> IterationRecord:
    """No fault."""
    return record


def throttling(
    samples: list[list[Sample]], record: IterationRecord, start_s: float, end_s: float, turn: int
) -> IterationRecord:
    """In every fifth iteration stage 1 is too hot: it says so, and is slower."""
    if turn % 5 != 3:
        return record
    samples[1] = [
        replace(s, throttled=("thermal",)) if start_s <= s.at_s <= end_s else s for s in samples[1]
    ]
    slower = tuple(value * SLOW for value in record.duration_s[1])
    rows = (*record.duration_s[:1], slower, *record.duration_s[2:])
    return replace(record, duration_s=rows, iter_time_s=record.iter_time_s * SLOW)


def drift(
    samples: list[list[Sample]], record: IterationRecord, start_s: float, end_s: float, turn: int
) -> IterationRecord:
    """The room warms by 0.15 K/s; each kelvin leaks 0.5 W more."""
    for stage, row in enumerate(samples):
        samples[stage] = [
            replace(
                s,
                energy_j=(s.energy_j or 0.0) + 0.5 * 0.15 * s.at_s**2 / 2,
                temperature_c=(s.temperature_c or 0.0) + 0.15 * s.at_s,
            )
            for s in row
        ]
    return record


def reset(
    samples: list[list[Sample]], record: IterationRecord, start_s: float, end_s: float, turn: int
) -> IterationRecord:
    """The counter of stage 2 starts again in the middle of every seventh iteration."""
    if turn % 7 == 4:
        middle_s = (start_s + end_s) / 2
        level = max((s.energy_j or 0.0) for s in samples[2] if s.at_s <= middle_s)
        samples[2] = [
            replace(s, energy_j=(s.energy_j or 0.0) - level) if s.at_s > middle_s else s
            for s in samples[2]
        ]
    return record


def outlier(
    samples: list[list[Sample]], record: IterationRecord, start_s: float, end_s: float, turn: int
) -> IterationRecord:
    """Every sixth iteration takes a third longer, for no reason that a GPU shows."""
    return replace(record, iter_time_s=record.iter_time_s * 1.33) if turn % 6 == 1 else record


def never_reached(
    samples: list[list[Sample]], record: IterationRecord, start_s: float, end_s: float, turn: int
) -> IterationRecord:
    """Stage 0 stays below its clock in every other plan where a higher one is asked for."""
    if (turn // 3) % 2:
        return record

    def held(s: Sample) -> Sample:
        asked = s.requested_mhz not in (None, DEFAULT_CLOCK)
        if not asked or not start_s <= s.at_s <= end_s or (s.requested_mhz or 0) <= CEILING_MHZ:
            return s
        return replace(s, clock_mhz=CEILING_MHZ)

    changed = [held(s) for s in samples[0]]
    if changed != samples[0]:
        samples[0] = changed
        slower = tuple(value * 1.08 for value in record.duration_s[0])
        return replace(record, duration_s=(slower, *record.duration_s[1:]))
    return record


FAULTS: dict[str, Fault] = {
    "no fault": none,
    "throttling": throttling,
    "drifting temperature": drift,
    "counter reset": reset,
    "outlier iterations": outlier,
    "clock never reached": never_reached,
}


class FaultyJob(SampledJob):
    """An emulated job with a fault; `unchecked` counts energy without looking at the samples."""

    fault: Fault = staticmethod(none)
    unchecked: bool = False
    turn: int = 0

    def read(
        self, samples: Samples, record: IterationRecord, start_s: float, end_s: float
    ) -> IterationRecord:
        """Read the iteration through the fault."""
        copies = [[s for s in row if s.at_s >= start_s - 1.0] for row in samples]
        changed = self.fault(copies, record, start_s, end_s, self.turn)
        self.turn += 1
        checked = super().read(copies, changed, start_s, end_s)
        if not self.unchecked:
            return checked
        inside = [[s for s in row if start_s <= s.at_s <= end_s] for row in copies]
        energy = tuple(
            abs((row[-1].energy_j or 0.0) - (row[0].energy_j or 0.0)) or None for row in inside
        )
        return replace(
            checked, energy_j=energy, flags=(), temperature_c=(), energy_sd_j=(), rejected=""
        )


def inject(fault: Fault, unchecked: bool) -> tuple[Runs, dict[str, Any]]:
    """A profile phase with a fault, and how far the learned options are from the truth."""
    model = load_gpu_model("a100")
    schedule = build_1f1b(STAGES, MICROBATCHES)
    work = works(schedule, model)
    job = FaultyJob(schedule, work, model, job_config("a100", 0))
    job.fault, job.unchecked = fault, unchecked
    budget = ProfilingConfig(plans=12, iterations_per_plan=3)
    clocks = usable_clocks(model)
    runs = replace(job.pipeline.runs(()), clocks_mhz=clocks)
    # The same plans with every fault: those that a phase without faults would run.
    for number, settings in enumerate(_plans(clocks, budget)):
        run: PlanRun = job.run_plan(settings, budget.iterations_per_plan, str(number))
        runs = runs.with_runs((*runs.runs, run))
    learned = learn(runs)
    times, energies, _ = errors(learned, model, work)
    records = [record for run in runs.runs for record in run.iterations]
    rejected = dict(learned.report.rejected or {})
    outliers = rejected.get("outlier in iteration time", 0)
    kept = sum(not any(record.flags) for record in records) - outliers
    return runs, {
        "iterations": len(records),
        "kept": kept,
        "rejected": rejected,
        "time_mean": float(np.mean(times)),
        "time_worst": max(times),
        "energy_mean": float(np.mean(energies)),
        "energy_worst": max(energies),
    }


_MADE: list[Settings] = []


def _plans(clocks: tuple[int, ...], budget: ProfilingConfig) -> list[Settings]:
    if not _MADE:
        model = load_gpu_model("a100")
        schedule = build_1f1b(STAGES, MICROBATCHES)
        job = SampledJob(schedule, works(schedule, model), model, job_config("a100", 0))
        design = ExperimentDesign(schedule, clocks, budget)
        runs = replace(job.pipeline.runs(()), clocks_mhz=clocks)
        while (settings := design.next_plan(runs)) is not None:
            _MADE.append(settings)
            runs = runs.with_runs((*runs.runs, job.run_plan(settings, 3, "")))
    return _MADE


def inject_all() -> dict[str, dict[str, Any]]:
    """Every fault with the checks, and the energy error without them."""
    result = {}
    for name, fault in FAULTS.items():
        _, outcome = inject(fault, unchecked=False)
        _, naive = inject(fault, unchecked=True)
        result[name] = {**outcome, "energy_unchecked": naive["energy_mean"]}
    return result
