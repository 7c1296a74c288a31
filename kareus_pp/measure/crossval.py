"""Cross-validation within the plans at hand: choices, error and width of the intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from kareus_pp.measure.model import JobModel
from kareus_pp.measure.replay import Replay
from kareus_pp.measure.table import Entry, Layout

MIN_PLANS = 5
"""With fewer plans nothing is left out: widths come from the models alone."""
MAX_FOLDS = 8
NORMAL_90 = 1.645
"""Half-width of a 90 % interval of a normal distribution in standard deviations."""
MEAN_TO_90 = 2.3
"""Half-width in mean absolute errors: covers 93 % of a normal, 90 % of a Laplace distribution."""
NORMAL_MEAN = 0.8
"""Mean absolute value of a standard normal variable."""
TRUST = 1.5
"""The predicted standard deviations count as much as this many left-out plans."""


@dataclass(frozen=True)
class CrossValidation:
    """How well plans were predicted that a fit did not see; relative errors.

    Attributes:
        time_error: Mean absolute error of the iteration time; None with too few plans.
        energy_error: The same of the total energy; None also where energy was not read.
        time_factor: Half-width of the 90 % interval in predicted standard deviations.
        energy_factor: The same of the energy.
    """

    time_error: float | None
    energy_error: float | None
    time_factor: float = NORMAL_90
    energy_factor: float = NORMAL_90


def cross_validate(
    entries: Sequence[Entry],
    layout: Layout,
    replay: Replay,
    blocking_power_w: Sequence[float] | None,
) -> CrossValidation:
    """Leave plans out in turn and predict them.

    The plans with the highest and the lowest clocks always stay in: what lies outside the range
    that was run is no measure of how well the models fill it. The intervals are scaled by the
    normalised errors of the left-out plans.
    """
    clocks = np.array([float(np.mean(entry.applied.mhz)) for entry in entries])
    ends = {int(np.argmax(clocks)), int(np.argmin(clocks))}
    inner = [number for number in range(len(entries)) if number not in ends]
    if len(entries) < MIN_PLANS:
        return CrossValidation(None, None)
    time_error, energy_error, time_ratio, energy_ratio = [], [], [], []
    folds = min(MAX_FOLDS, len(inner))
    for fold in range(folds):
        left_out = inner[fold::folds]
        rest = [entry for number, entry in enumerate(entries) if number not in left_out]
        model = JobModel(rest, layout, replay, blocking_power_w)
        found = model.predict([entries[number].applied for number in left_out])
        for place, number in enumerate(left_out):
            entry = entries[number]
            off_s = abs(float(found.time_s[place]) - entry.time_s)
            if math.isfinite(off_s):
                time_error.append(off_s / entry.time_s)
                time_ratio.append(off_s / found.time_sd_s[place])
            off_j = abs(float(found.total_j[place] - entry.energy_j.sum()))
            if math.isfinite(off_j):
                energy_error.append(off_j / entry.energy_j.sum())
                energy_ratio.append(off_j / found.energy_sd_j[place])
    return CrossValidation(
        _mean(time_error), _mean(energy_error), _factor(time_ratio), _factor(energy_ratio)
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _factor(ratios: Sequence[float]) -> float:
    """Half-width in predicted standard deviations, from errors in the same unit.

    A quantile of few errors is as wild as the largest of them; their mean is steadier.
    """
    mean = (sum(ratios) + TRUST * NORMAL_MEAN) / (len(ratios) + TRUST)
    few = float(stats.t.ppf(0.95, len(ratios) + TRUST)) / NORMAL_90
    return float(MEAN_TO_90 * mean * few)
