"""Power of every instruction class over the clock, learned from whole-iteration energies.

The counter of a rank gives one number per iteration: `E = sum_i t_i p_i(f_i) + P (T - busy)`.
Durations are known, so this is linear in the unknowns: per cost key `p(f) = p0 + k (f/f_top)^3`
(static and clock power; dynamic power goes with f V^2 and the voltage about with f), and the
blocking power P of the waiting GPU unless it was measured. Coefficients are not negative. Stages
run the same kinds of work on the same kind of GPU: a fit with coefficients shared by all stages is
the prior of each stage's own (empirical Bayes), so that few plans suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from kareus_pp.measure.table import Entry, Floats, Layout
from kareus_pp.schedule import Kind

TERMS = 2


@dataclass(frozen=True)
class EnergyOptions:
    """Choices of the energy model, made by cross-validation or by default.

    Attributes:
        spread: Relative standard deviation of a stage's coefficients around the shared ones.
        noise: Relative standard deviation of a plan's energy around the model.
        learn_blocking: Learn the blocking power even where it was measured.
    """

    spread: float = 0.2
    noise: float = 0.003
    learn_blocking: bool = False


@dataclass(frozen=True)
class StagePower:
    """Powers of one stage.

    Attributes:
        stage: The stage.
        keys: Numbers of its cost keys, in the order of the coefficients.
        coefficients: p0 and k of each cost key, then the blocking power, in watts.
        covariance: Of `coefficients`.
    """

    stage: int
    keys: tuple[int, ...]
    coefficients: Floats
    covariance: Floats

    @property
    def blocking_w(self) -> float:
        """Power of the waiting GPU."""
        return float(self.coefficients[-1])

    def power(self, key: int, ratio: Floats) -> tuple[Floats, Floats]:
        """Power in watts and its standard deviation, at `ratio` = f / f_top; shapes as `ratio`."""
        start = TERMS * self.keys.index(key)
        rows = np.zeros((len(ratio), len(self.coefficients)))
        rows[:, start : start + TERMS] = power_basis(ratio)
        return rows @ self.coefficients, _deviation(rows, self.covariance)

    def energy(self, row: Floats) -> tuple[float, float]:
        """Energy in joules and its standard deviation for one row of `energy_row`."""
        return float(row @ self.coefficients), float(_deviation(row[None, :], self.covariance)[0])


@dataclass(frozen=True)
class EnergyModel:
    """Powers of every stage; None for a stage without a usable energy reading."""

    stages: tuple[StagePower | None, ...]
    options: EnergyOptions


def power_basis(ratio: Floats) -> Floats:
    """What p0 and k are multiplied with; shape `(n, TERMS)`."""
    return np.stack([np.ones_like(ratio), ratio**3], axis=1)


def energy_row(
    layout: Layout,
    keys: Sequence[int],
    stage: int,
    entry_key: np.ndarray[tuple[int], np.dtype[np.intp]],
    mhz: Floats,
    duration_s: Floats,
    iter_time_s: float,
) -> Floats:
    """Coefficients of the unknowns of a stage in the energy of one iteration, in seconds."""
    mine = layout.stage == stage
    row = np.zeros(TERMS * len(keys) + 1)
    for place, key in enumerate(keys):
        chosen = mine & (entry_key == key)
        basis = power_basis(mhz[chosen] / layout.top_mhz)
        if layout.keys[key].cls.kind.is_fixed:
            basis[:, 1:] = 0.0
        row[TERMS * place : TERMS * (place + 1)] = duration_s[chosen] @ basis
    row[-1] = iter_time_s - float(np.sum(duration_s[mine]))
    return row


def stage_keys(layout: Layout, stage: int) -> tuple[int, ...]:
    """Numbers of the cost keys of a stage."""
    return tuple(i for i, key in enumerate(layout.keys) if key.cls.stage == stage)


def fit_energy(
    entries: Sequence[Entry],
    layout: Layout,
    durations: Sequence[Floats],
    blocking_power_w: Sequence[float] | None,
    options: EnergyOptions = EnergyOptions(),
) -> EnergyModel:
    """Learn the powers of every stage.

    Args:
        entries: The measurements.
        layout: Their layout.
        durations: For each entry the duration of every instruction, no NaN.
        blocking_power_w: Measured blocking power of every stage; None to learn it.
        options: Choices.
    """
    known = None if options.learn_blocking else blocking_power_w
    systems = [
        _system(entries, layout, durations, stage) for stage in range(layout.schedule.stages)
    ]
    shared = _shared(systems, layout, known, options)
    powers: list[StagePower | None] = []
    for stage, (rows, energy) in enumerate(systems):
        keys = stage_keys(layout, stage)
        if not len(energy):
            powers.append(None)
            continue
        kinds = [layout.keys[key].cls.kind for key in keys]
        prior = np.concatenate([*(shared[kind] for kind in kinds), shared[None]])
        deviation = _spread(prior, options.spread)
        if known is not None:
            prior[-1], deviation[-1] = known[stage], 1e-6 * known[stage]
        coefficients, covariance = _posterior(rows, energy, prior, deviation, options.noise)
        powers.append(StagePower(stage, keys, coefficients, covariance))
    return EnergyModel(tuple(powers), options)


def _system(
    entries: Sequence[Entry], layout: Layout, durations: Sequence[Floats], stage: int
) -> tuple[Floats, Floats]:
    keys = stage_keys(layout, stage)
    rows, energy = [], []
    for entry, duration_s in zip(entries, durations, strict=True):
        values = entry.energy_j[stage]
        values = values[np.isfinite(values)]
        if len(values) and len(entry.iter_time_s):
            time_s = float(np.median(entry.iter_time_s))
            rows.append(
                energy_row(
                    layout, keys, stage, entry.applied.key, entry.applied.mhz, duration_s, time_s
                )
            )
            energy.append(float(np.median(values)))
    return np.array(rows).reshape(len(rows), TERMS * len(keys) + 1), np.array(energy)


def _shared(
    systems: Sequence[tuple[Floats, Floats]],
    layout: Layout,
    known: Sequence[float] | None,
    options: EnergyOptions,
) -> dict[Kind | None, Floats]:
    """Coefficients shared by all stages, by kind, and the blocking power under None.

    Forward and backward times hardly vary against each other, so that their powers are hard to
    tell apart: what they have in common is fitted first and is the prior of each kind.
    """
    kinds = list(dict.fromkeys(key.cls.kind for key in layout.keys))
    width = TERMS * len(kinds) + 1
    rows, energy = [], []
    for stage, (own, values) in enumerate(systems):
        wide = np.zeros((len(values), width))
        for place, key in enumerate(stage_keys(layout, stage)):
            start = TERMS * kinds.index(layout.keys[key].cls.kind)
            wide[:, start : start + TERMS] += own[:, TERMS * place : TERMS * (place + 1)]
        wide[:, -1] = own[:, -1]
        rows.append(wide)
        energy.append(values)
    design, target = np.concatenate(rows), np.concatenate(energy)
    common = sum(design[:, TERMS * i : TERMS * (i + 1)] for i in range(len(kinds)))
    start_design = np.concatenate([np.asarray(common), design[:, -1:]], axis=1) / target[:, None]
    start_target = np.ones(len(target))
    if known is not None:
        start_target = 1 - start_design[:, -1] * float(np.mean(known))
        start_design = start_design[:, :-1]
    base, _ = nnls(start_design, start_target)
    blocking = float(np.mean(known)) if known is not None else float(base[-1])
    prior = np.concatenate([np.tile(base[:TERMS], len(kinds)), [blocking]])
    deviation = _spread(prior, options.spread)
    if known is not None:
        deviation[-1] = 1e-6 * blocking
    solution, _ = _posterior(design, target, prior, deviation, options.noise)
    shared: dict[Kind | None, Floats] = {
        kind: solution[TERMS * i : TERMS * (i + 1)] for i, kind in enumerate(kinds)
    }
    shared[None] = solution[-1:]
    return shared


def _spread(prior: Floats, share: float) -> Floats:
    """Prior standard deviations; a coefficient at zero may leave it."""
    return np.asarray(share * np.maximum(prior, 0.1 * float(np.max(prior))))


def _posterior(
    rows: Floats, energy: Floats, prior: Floats, deviation: Floats, noise: float
) -> tuple[Floats, Floats]:
    """Non-negative maximum a posteriori and its covariance (linear Gaussian)."""
    scale = 1 / (noise * energy)
    pull = 1 / np.maximum(deviation, 1e-9)
    stacked = np.concatenate([rows * scale[:, None], np.diag(pull)])
    wanted = np.concatenate([energy * scale, prior * pull])
    coefficients, _ = nnls(stacked, wanted)
    covariance = np.linalg.inv(stacked.T @ stacked)
    return coefficients, covariance


def _deviation(rows: Floats, covariance: Floats) -> Floats:
    variance: Floats = np.sum((rows @ covariance) * rows, axis=1)
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))
