"""Iterations that must not be learned from: outliers in time, impossible values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kareus_pp.measure.runs import IterationRecord, PlanRun, Runs

MIN_ITERATIONS = 3
"""With fewer iterations of a plan, no one can be told to be the outlier."""
OUTLIER_SHARE = 0.03
"""An iteration is no outlier while its time is within this share of the plan's median."""
OUTLIER_SPREADS = 6.0
"""Nor while it is within this many robust standard deviations."""


def reject_outliers(runs: Runs) -> tuple[Runs, Mapping[str, int]]:
    """Mark what must not be used; returns the runs and how often each reason occurred.

    Every run is judged by its own iterations only.
    """
    checked = tuple(_check_run(run) for run in runs.runs)
    reasons: Counter[str] = Counter()
    for run in checked:
        for record in run.iterations:
            found = {record.rejected, *record.flags} - {""}
            reasons.update(reason.split(":")[0] for reason in found)
    return runs.with_runs(checked), dict(reasons)


def _check_run(run: PlanRun) -> PlanRun:
    records = [_check_values(record) for record in run.iterations]
    times = np.array([r.iter_time_s for r in records if not r.rejected])
    if len(times) < MIN_ITERATIONS:
        return replace(run, iterations=tuple(records))
    middle = float(np.median(times))
    spread = 1.4826 * float(np.median(np.abs(times - middle)))
    allowed = max(OUTLIER_SHARE * middle, OUTLIER_SPREADS * spread)
    return replace(
        run,
        iterations=tuple(
            replace(record, rejected="outlier in iteration time")
            if not record.rejected and abs(record.iter_time_s - middle) > allowed
            else record
            for record in records
        ),
    )


def _check_values(record: IterationRecord) -> IterationRecord:
    if record.rejected:
        return record
    if not (math.isfinite(record.iter_time_s) and record.iter_time_s > 0):
        return replace(record, rejected="iteration time is not positive")
    energies = [value for value in record.energy_j if value is not None]
    if any(not math.isfinite(value) or value <= 0 for value in energies):
        return replace(record, rejected="energy is not positive")
    return record
