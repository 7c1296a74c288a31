"""Learning from a part of the recorded plans and predicting the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kareus_pp.errors import ProfileError
from kareus_pp.measure.learn import Learned, Prediction, learn
from kareus_pp.measure.reject import reject_outliers
from kareus_pp.measure.runs import Runs
from kareus_pp.measure.table import entry_of, layout_of


@dataclass(frozen=True)
class Comparison:
    """One left-out plan: predicted and measured.

    Attributes:
        name: Name of the run.
        predicted: Prediction with 90 % half-widths.
        time_s: Measured mean iteration time without rejected iterations; None where not measured.
        time_se_s: Its standard error; None with fewer than three iterations.
        energy_j: Measured mean energy of all stages; None where not measured.
        energy_se_j: Its standard error; None as above.
    """

    name: str
    predicted: Prediction
    time_s: float | None
    time_se_s: float | None
    energy_j: float | None
    energy_se_j: float | None

    @property
    def time_error(self) -> float | None:
        """Relative error of the predicted time."""
        return _relative(self.predicted.time_s, self.time_s)

    @property
    def energy_error(self) -> float | None:
        """Relative error of the predicted energy."""
        return _relative(self.predicted.energy_j, self.energy_j)


@dataclass(frozen=True)
class Holdout:
    """What was learned from the training plans, and how it predicts the others.

    Attributes:
        learned: Learned from the training plans alone.
        train: Numbers of the training plans.
        test: The others, with what was measured.
    """

    learned: Learned
    train: tuple[int, ...]
    test: tuple[Comparison, ...]


def count_of(train: float, total: int) -> int:
    """Number of training plans: `train` itself, or a share of the total where it is below 1.

    Raises:
        ProfileError: No plan, or none but training plans, would remain.
    """
    share = 0 < train < 1
    if not share and (train != int(train) or train < 1):
        raise ProfileError(
            f"train is {train:g} and must be a number of plans, or a share between 0 and 1"
        )
    count = round(train * total) if share else int(train)
    if not 1 <= count < total:
        raise ProfileError(
            f"train {train:g} means {count} of {total} plans; at least one must train and at "
            f"least one must be left out"
        )
    return count


def choose_by_chance(runs: Runs, count: int, seed: int, anchor: bool = True) -> tuple[int, ...]:
    """Training plans by chance; only clocks are read.

    Args:
        runs: The recorded plans.
        count: Number of training plans.
        seed: Of the choice.
        anchor: Always train on the plan with the highest clocks, which every profile phase runs
            first; without it, what lies above the training plans' clocks is extrapolated.
    """
    order = [int(number) for number in np.random.default_rng(seed).permutation(len(runs.runs))]
    if anchor:
        first = highest_plan(runs)
        order.remove(first)
        order.insert(0, first)
    return tuple(sorted(order[:count]))


def highest_plan(runs: Runs) -> int:
    """The first plan with the highest mean clock."""
    top = max(runs.known_clocks_mhz, default=0)
    means = [
        np.mean([setting.clock_mhz or top for row in run.settings for setting in row])
        for run in runs.runs
    ]
    return int(np.argmax(means))


def hold_out(runs: Runs, train: Sequence[int]) -> Holdout:
    """Learn from the plans `train` and compare the prediction of the others.

    Of a left-out plan the models see its settings and nothing else.
    """
    chosen = set(train)
    clocks = runs.known_clocks_mhz
    left_out = [number for number in range(len(runs.runs)) if number not in chosen]
    training = Runs(
        runs.schedule,
        tuple(runs.runs[number] for number in sorted(chosen)),
        clocks,
        runs.blocking_power_w,
        runs.source,
        runs.facts,
        runs.scope,
    )
    learned = learn(training)
    predicted = learned.predict([runs.runs[number].settings for number in left_out])
    layout = layout_of(runs)
    checked, _ = reject_outliers(runs)
    comparisons = []
    for number, prediction in zip(left_out, predicted, strict=True):
        entry = entry_of(checked.runs[number], layout)
        comparisons.append(
            Comparison(
                runs.runs[number].name or str(number),
                prediction,
                None if entry is None else _number(entry.time_s),
                None if entry is None else _number(entry.time_se_s),
                None if entry is None else _number(float(entry.energy_j.sum())),
                None
                if entry is None or not np.isfinite(entry.time_se_s)
                else _number(float(np.sqrt(np.sum(entry.energy_se_j**2)))),
            )
        )
    return Holdout(learned, tuple(sorted(chosen)), tuple(comparisons))


def summary(holdout: Holdout) -> dict[str, object]:
    """Errors as fractions, coverage and half-widths; None where nothing could be compared."""
    time = [c for c in holdout.test if c.time_error is not None]
    energy = [c for c in holdout.test if c.energy_error is not None]
    time_error = [abs(c.time_error or 0.0) for c in time]
    energy_error = [abs(c.energy_error or 0.0) for c in energy]
    time_half = [(c.predicted.time_half_s or 0.0) / (c.time_s or np.nan) for c in time]
    energy_half = [(c.predicted.energy_half_j or 0.0) / (c.energy_j or np.nan) for c in energy]
    return {
        "plans_train": len(holdout.train),
        "plans_test": len(holdout.test),
        "time_mape": _mean(time_error),
        "energy_mape": _mean(energy_error),
        "time_max": max(time_error, default=None),
        "energy_max": max(energy_error, default=None),
        "coverage_90": {
            "time": _mean([e <= h for e, h in zip(time_error, time_half, strict=True)]),
            "energy": _mean([e <= h for e, h in zip(energy_error, energy_half, strict=True)]),
        },
        "half_width_median": {
            "time": float(np.median(time_half)) if time else None,
            "energy": float(np.median(energy_half)) if energy else None,
        },
        "blocking_power_w": list(holdout.learned.profile.blocking_power_w),
    }


def _relative(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
