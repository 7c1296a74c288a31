"""Power of every instruction class over the clock, learned from whole-iteration energies.

The counter of a rank gives one number per iteration: `E = sum_i t_i p_i(f_i) + P (T - busy)`.
With the durations known it is linear in the powers p at the visited clocks and in the blocking
power P. A waiting GPU spins at the clock it holds, so P has a part that goes with that clock.
The physics is the prior: `p(f) = p0 + k (f_eff / f_top)^3` with the clock that is really
reached (dynamic power goes with f V^2 and the voltage about with f), p0 and k not negative and
common to all classes; around it each kind, each class and, smoothly over the clock, each curve may
deviate (a Gaussian process observed through sums). The marginal likelihood sets scale and noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import nnls

from kareus_pp.measure.kernels import Conditioned, matern, same
from kareus_pp.measure.replay import Replay
from kareus_pp.measure.table import Applied, Entry, Floats, Ints, Layout
from kareus_pp.measure.time_model import TimeModel

EXPONENT = 3.0
COMMON = 0.3
"""Relative standard deviation of the common p0 and k around the first guess."""
KIND, CLASS = 0.1, 0.1
"""The same of a kind's and a class's p0 and k around the common ones."""
STAGE = 0.03
"""The same of a stage's GPU, all its classes alike (chips differ)."""
SMOOTH_ALL, SMOOTH_KIND, SMOOTH_CLASS = 0.1, 0.03, 0.03
"""The same of the smooth deviations over the clock; the voltage curve is common to all classes."""
LENGTH = 0.2
"""Length scale of the smooth deviations in log f."""
FIXED = 0.5
"""Relative standard deviation of the power of load and optimizer step around p0."""
BLOCKING_KNOWN = 0.01
"""Relative standard deviation of a measured blocking power."""
BLOCKING_SHARED, BLOCKING_OWN = 0.15, 0.1
"""The same of a learned one, common part and part of each stage."""
LEVEL_SCALES = (0.1, 0.3, 1.0, 2.0)
SHAPE_SCALES = (0.1, 0.3, 1.0, 2.0)
"""Factors on the deviations that are tried: on levels, and on the smooth ones."""
NOISES = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)
"""Relative scatter of a stage's energy around the model from plan to plan; likelihood decides."""
SPIN, SPIN_SD = 0.2, 0.15
"""Share of the blocking power that goes with the held clock, and its prior deviation."""
HEAT_PER_K = 0.003
"""Prior standard deviation of the relative rise of power with temperature (leakage)."""
MIN_HEAT_K = 2.0
"""Temperatures must spread at least this much for that to be learned."""


@dataclass(frozen=True)
class Terms:
    """What the energy of a stage is a sum of.

    Attributes:
        key: Cost key of every power.
        mhz: Clock of every power.
        stages: Number of blocking powers that follow, then the part of them that goes with the
            clock at which a stage waits, then heat; 0 for powers alone.
    """

    key: Ints
    mhz: Floats
    stages: int


class EnergyModel:
    """Powers of every cost key over the clock and blocking power of every stage.

    Args:
        entries: The measurements.
        layout: Their layout.
        times: The time model; gives the clock that is really reached and missing durations.
        replay: Replay of the schedule; tells at which clock a stage waits how long.
        blocking_power_w: Measured blocking powers; None to learn them.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        layout: Layout,
        times: TimeModel,
        replay: Replay,
        blocking_power_w: Sequence[float] | None,
    ) -> None:
        self.layout = layout
        self._replay = replay
        self._times = times
        self._fixed = np.array([key.cls.kind.is_fixed for key in layout.keys])
        self._stage = np.array([key.cls.stage for key in layout.keys], dtype=np.intp)
        self._terms = _terms(entries, layout)
        self._reference_c = _reference(entries)
        self._known_w = None if blocking_power_w is None else np.array(blocking_power_w)
        rows, energy, error = self._observations(entries)
        self.readings = np.bincount(
            np.concatenate([np.flatnonzero(np.isfinite(e.energy_j)) for e in entries]),
            minlength=layout.schedule.stages,
        )
        if not len(energy):
            self._mean = np.zeros(rows.shape[1])
            return
        self._set_prior(rows, energy)
        self._mean = self._prior_mean(self._terms)
        residual = energy - rows @ self._mean
        parts = [
            rows @ self._covariance(self._terms, self._terms, (level, shape)) @ rows.T
            for level, shape in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
        ]
        still, levels, shapes = parts[0], parts[1] - parts[0], parts[2] - parts[0]
        fits = []
        for level, shape, noise in product(LEVEL_SCALES, SHAPE_SCALES, NOISES):
            scatter = np.diag((noise * energy) ** 2 + error**2)
            fit = Conditioned(still + level**2 * levels + shape**2 * shapes + scatter, residual)
            fits.append(((level, shape), noise, fit))
        self.scale, self.noise, self._fit = max(fits, key=lambda fit: fit[2].log_likelihood)
        self._rows = rows

    @property
    def is_empty(self) -> bool:
        """True where no energy was read."""
        return not bool(np.any(self.readings))

    def knows(self, key: int) -> bool:
        """True where the stage of the class has an energy reading."""
        return bool(self.readings[self.layout.keys[key].cls.stage])

    def power_w(self, key: int, mhz: Floats) -> tuple[Floats, Floats]:
        """Power of a class in watts and its standard deviation; shapes as `mhz`."""
        wanted = Terms(np.full(len(mhz), key, dtype=np.intp), mhz, 0)
        cross = self._covariance(wanted, self._terms, self.scale) @ self._rows.T
        mean = self._prior_mean(wanted)[: len(mhz)] + cross @ self._fit.weights
        prior = np.diag(self._covariance(wanted, wanted, self.scale))
        variance = prior - np.sum(cross * self._fit.solve(cross.T).T, axis=1)
        return np.maximum(mean, 0.0), np.sqrt(np.maximum(variance, 0.0))

    def blocking_w(self) -> Floats:
        """Blocking power of every stage in watts."""
        count = len(self._terms.key)
        covariance = self._covariance(self._terms, self._terms, self.scale)
        posterior = self._mean + covariance @ self._rows.T @ self._fit.weights
        return np.maximum(posterior[count : count + self._terms.stages], 0.0)

    def predict(self, plans: Sequence[tuple[Applied, Floats, float]]) -> tuple[Floats, Floats]:
        """Energy of every stage, and the standard deviation of each plan's total.

        Args:
            plans: For each plan its settings, durations and iteration time.

        Returns:
            Energies in joules, shape `(plans, stages)`, and deviations, shape `(plans,)`.
        """
        key = np.concatenate([applied.key for applied, _, _ in plans])
        mhz = np.concatenate([self._clock(applied) for applied, _, _ in plans])
        terms = _unique_terms(key, mhz, self.layout.schedule.stages)
        stages = range(self.layout.schedule.stages)
        waits = self._replay.waits(np.array([duration_s for _, duration_s, _ in plans]).T).T
        rows = np.array(
            [
                self._row(terms, applied, duration_s, wait_s, time_s, stage, 0.0)
                for (applied, duration_s, time_s), wait_s in zip(plans, waits, strict=True)
                for stage in stages
            ]
        )
        cross = rows @ self._covariance(terms, self._terms, self.scale) @ self._rows.T
        mean = rows @ self._prior_mean(terms) + cross @ self._fit.weights
        total = rows.reshape(len(plans), len(stages), -1).sum(axis=1)
        total_cross = cross.reshape(len(plans), len(stages), -1).sum(axis=1)
        prior = np.sum((total @ self._covariance(terms, terms, self.scale)) * total, axis=1)
        variance = prior - np.sum(total_cross * self._fit.solve(total_cross.T).T, axis=1)
        energy = mean.reshape(len(plans), len(stages))
        return energy, np.sqrt(np.maximum(variance, 0.0) + np.sum((self.noise * energy) ** 2, 1))

    def _clock(self, applied: Applied) -> Floats:
        return np.where(self._fixed[applied.key], float(self.layout.top_mhz), applied.mhz)

    def _observations(self, entries: Sequence[Entry]) -> tuple[Floats, Floats, Floats]:
        known = [self._times.durations_s(entry.applied) for entry in entries]
        durations = [
            np.where(np.isfinite(entry.duration_s), entry.duration_s, model_s)
            for entry, model_s in zip(entries, known, strict=True)
        ]
        waits = self._replay.waits(np.array(durations).T).T
        rows, energy, error = [], [], []
        for entry, duration_s, wait_s in zip(entries, durations, waits, strict=True):
            heat_k = np.nan_to_num(entry.temperature_c - self._reference_c)
            for stage in np.flatnonzero(np.isfinite(entry.energy_j)):
                rows.append(
                    self._row(
                        self._terms,
                        entry.applied,
                        duration_s,
                        wait_s,
                        entry.time_s,
                        int(stage),
                        float(heat_k[stage]),
                    )
                )
                energy.append(entry.energy_j[stage])
                error.append(entry.energy_se_j[stage])
        width = _size(self._terms)
        return np.array(rows).reshape(len(rows), width), np.array(energy), np.array(error)

    def _row(
        self,
        terms: Terms,
        applied: Applied,
        duration_s: Floats,
        wait_s: Floats,
        time_s: float,
        stage: int,
        heat_k: float,
    ) -> Floats:
        """Seconds (for heat: kelvin seconds) that each term counts in the energy of a stage."""
        count = len(terms.key)
        mine = self.layout.stage == stage
        clock = self._clock(applied)[mine]
        place = _places(terms, applied.key[mine], clock)
        row = np.zeros(_size(terms))
        row[:count] = np.bincount(place, duration_s[mine], minlength=count)
        idle_s = time_s - float(np.sum(duration_s[mine]))
        row[count + stage] = idle_s
        # A stage waits at the clock of what comes next; the rest is at the end of the iteration.
        below = (clock / self.layout.top_mhz) ** EXPONENT - 1
        rest_s = idle_s - float(np.sum(wait_s[mine]))
        row[-2] = float(wait_s[mine] @ below) + rest_s * float(below[-1])
        row[-1] = heat_k * time_s
        return row

    def _ratio(self, terms: Terms) -> Floats:
        result = np.zeros(len(terms.key))
        for key in np.unique(terms.key):
            own = terms.key == key
            if not self._fixed[key]:
                result[own] = self._times.saturation.ratio(int(key), terms.mhz[own], EXPONENT)
        return result

    def _set_prior(self, rows: Floats, energy: Floats) -> None:
        """p0, k and the blocking power that fit best if all classes were alike."""
        count = len(self._terms.key)
        ratio = self._ratio(self._terms)
        design = np.stack(
            [rows[:, :count].sum(axis=1), rows[:, :count] @ ratio, rows[:, count:-2].sum(axis=1)], 1
        )
        target = np.ones(len(energy))
        if self._known_w is not None:
            target = target - rows[:, count:-2] @ self._known_w / energy
            design = design[:, :2]
        common, _ = nnls(design / energy[:, None], target)
        self._static_w, self._dynamic_w = float(common[0]), float(common[1])
        learned = common[2] if self._known_w is None else 0.0
        if self._known_w is not None:
            self._blocking_w = self._known_w
        else:
            self._blocking_w = np.full(self._terms.stages, float(learned))

    def _prior_mean(self, terms: Terms) -> Floats:
        powers = self._static_w + self._dynamic_w * self._ratio(terms)
        blocking = self._blocking_w[: terms.stages]
        if not terms.stages:
            return powers
        return np.concatenate([powers, blocking, [SPIN * self._blocking_level, 0.0]])

    def _covariance(self, a: Terms, b: Terms, scale: tuple[float, float]) -> Floats:
        """Prior covariance of the terms; blocking powers and heat follow the powers."""
        group, fixed = self._times.group, self._fixed
        kinds, classes = same(group[a.key], group[b.key]), same(a.key, b.key)
        moving = (~fixed[a.key])[:, None] & (~fixed[b.key])[None, :]
        smooth = matern(np.log(a.mhz), np.log(b.mhz), LENGTH)
        stages = same(self._stage[a.key], self._stage[b.key])
        level = KIND**2 * kinds + CLASS**2 * classes
        # p0 and k deviate on their own; neither is taken as known for being small.
        whole_w = self._static_w + self._dynamic_w
        static_w, dynamic_w = max(self._static_w, whole_w / 4), max(self._dynamic_w, whole_w / 4)
        curve = static_w**2 + dynamic_w**2 * self._ratio(a)[:, None] * self._ratio(b)[None, :]
        shape = smooth * (SMOOTH_ALL**2 + SMOOTH_KIND**2 * kinds + SMOOTH_CLASS**2 * classes)
        still = FIXED**2 * (classes + kinds) / 2
        relative = np.where(moving, STAGE**2 * stages + scale[1] ** 2 * shape, still)
        powers = relative * self._typical(a)[:, None] * self._typical(b)[None, :]
        powers = powers + np.where(moving, (COMMON**2 + scale[0] ** 2 * level) * curve, 0.0)
        if not a.stages and not b.stages:
            return np.asarray(powers)
        full = np.zeros((_size(a), _size(b)))
        full[: len(a.key), : len(b.key)] = powers
        if a.stages and b.stages:
            full[len(a.key) : -2, len(b.key) : -2] = self._blocking_covariance()
            full[-2, -2] = (SPIN_SD * self._blocking_level) ** 2
            heat_w = HEAT_PER_K * (self._static_w + self._dynamic_w)
            full[-1, -1] = heat_w**2 if np.isfinite(self._reference_c) else 0.0
        return full

    def _typical(self, terms: Terms) -> Floats:
        typical = self._static_w + self._dynamic_w * self._ratio(terms)
        return np.where(self._fixed[terms.key], max(self._static_w, self._blocking_level), typical)

    @property
    def _blocking_level(self) -> float:
        return float(np.mean(self._blocking_w))

    def _blocking_covariance(self) -> Floats:
        if self._known_w is not None:
            return np.asarray(np.diag((BLOCKING_KNOWN * self._known_w) ** 2))
        level = max(self._blocking_level, 0.1 * self._static_w)
        own = BLOCKING_OWN**2 * np.eye(self._terms.stages)
        return np.asarray(level**2 * (BLOCKING_SHARED**2 + own))


def _size(terms: Terms) -> int:
    return len(terms.key) + (terms.stages + 2 if terms.stages else 0)


def _terms(entries: Sequence[Entry], layout: Layout) -> Terms:
    key = np.concatenate([entry.applied.key for entry in entries])
    mhz = np.concatenate([entry.applied.mhz for entry in entries])
    fixed = np.array([cost.cls.kind.is_fixed for cost in layout.keys])
    return _unique_terms(
        key, np.where(fixed[key], float(layout.top_mhz), mhz), layout.schedule.stages
    )


def _unique_terms(key: Ints, mhz: Floats, stages: int) -> Terms:
    pairs = np.unique(np.stack([key.astype(float), mhz], axis=1), axis=0)
    return Terms(pairs[:, 0].astype(np.intp), pairs[:, 1], stages)


def _places(terms: Terms, key: Ints, mhz: Floats) -> Ints:
    number = {
        (int(k), float(f)): place
        for place, (k, f) in enumerate(zip(terms.key, terms.mhz, strict=True))
    }
    return np.array(
        [number[int(k), float(f)] for k, f in zip(key, mhz, strict=True)], dtype=np.intp
    )


def _reference(entries: Sequence[Entry]) -> float:
    """Mean temperature; NaN where temperatures are unknown or hardly differ."""
    heat = np.concatenate([entry.temperature_c for entry in entries])
    heat = heat[np.isfinite(heat)]
    return float(np.mean(heat)) if len(heat) and np.ptp(heat) >= MIN_HEAT_K else float("nan")
