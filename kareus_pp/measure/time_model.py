"""Time of an instruction class over the clock, learned from measured durations.

The physics is the prior: part of an instruction does not depend on the SM clock (memory, links,
waiting), part goes with 1/f, so `t(f) = a + b u + c u^2` with `u = f_top / f` and no coefficient
below zero, which makes it monotone. What the measurements show beyond it is a smooth relative
deviation, modelled as a Gaussian process over log f (Rasmussen and Williams, 2006, chapter 2):
close to a visited clock the data decide, far from it the physics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import nnls

from kareus_pp.measure.table import Entry, Floats, Layout

MIN_SPAN = 1.03
"""A class varied in clock if its highest clock is at least this many times its lowest."""


@dataclass(frozen=True)
class ClockPoint:
    """The duration of one cost key at one clock.

    Attributes:
        mhz: Clock.
        time_s: Robust mean duration.
        sd: Relative standard deviation of `time_s` as an estimate.
        count: Durations behind it.
    """

    mhz: float
    time_s: float
    sd: float
    count: int


@dataclass(frozen=True)
class TimeCurve:
    """Duration of one cost key over the clock.

    Attributes:
        points: What was measured, ascending in clock.
        top_mhz: Clock at which u is 1.
        coefficients: a, b, c of the physics, in seconds.
        misfit: Relative standard deviation of the smooth deviation from the physics.
        length: Its length scale in log f.
        depends_on_clock: False where the class never varied in clock: then only the visited clock
            is known.
        fixed: The class does not depend on the clock at all (load, optimizer step).
    """

    points: tuple[ClockPoint, ...]
    top_mhz: float
    coefficients: tuple[float, float, float]
    misfit: float
    length: float
    varied: bool
    fixed: bool = False

    def predict(self, mhz: Floats) -> tuple[Floats, Floats]:
        """Duration in seconds and its relative standard deviation; shapes as `mhz`.

        NaN at clocks that were not visited where the class never varied in clock.
        """
        if self.fixed or not self.varied:
            return self._predict_constant(mhz)
        trend = self._trend(mhz)
        x = np.log(np.array([p.mhz for p in self.points]))
        residual = np.array([p.time_s for p in self.points]) / self._trend(np.exp(x)) - 1
        noise = np.diag([p.sd**2 + 1e-12 for p in self.points])
        factor = cho_factor(self._kernel(x, x) + noise)
        cross = self._kernel(np.log(mhz), x)
        deviation = cross @ cho_solve(factor, residual)
        variance = self.misfit**2 - np.sum(cross * cho_solve(factor, cross.T).T, axis=1)
        return trend * (1 + deviation), np.sqrt(np.maximum(variance, 0.0))

    def _predict_constant(self, mhz: Floats) -> tuple[Floats, Floats]:
        point = max(self.points, key=lambda p: p.count)
        known = (
            np.full(mhz.shape, True)
            if self.fixed
            else np.isclose(mhz[:, None], [p.mhz for p in self.points]).any(axis=1)
        )
        return np.where(known, point.time_s, np.nan), np.where(known, point.sd, np.nan)

    def _trend(self, mhz: Floats) -> Floats:
        u = self.top_mhz / mhz
        a, b, c = self.coefficients
        return np.asarray(a + b * u + c * u**2)

    def _kernel(self, x: Floats, y: Floats) -> Floats:
        distance = (x[:, None] - y[None, :]) / self.length
        return np.asarray(self.misfit**2 * np.exp(-0.5 * distance**2))


@dataclass(frozen=True)
class TimeOptions:
    """Choices of the time model, made by cross-validation or by default."""

    misfit: float = 0.003
    length: float = 0.08


def clock_points(entries: Sequence[Entry], layout: Layout) -> list[list[ClockPoint]]:
    """For each cost key its measured points: medians over microbatches and plans."""
    key = np.concatenate([entry.applied.key for entry in entries])
    mhz = np.concatenate([entry.applied.mhz for entry in entries])
    time_s = np.concatenate([entry.duration_s for entry in entries])
    usable = np.isfinite(time_s) & (time_s > 0)
    points: list[list[ClockPoint]] = []
    for number, cost_key in enumerate(layout.keys):
        mine = usable & (key == number)
        found = []
        groups = (
            [mine]
            if cost_key.cls.kind.is_fixed
            else [mine & (mhz == clock) for clock in np.unique(mhz[mine])]
        )
        for group in groups:
            values = time_s[group]
            if not len(values):
                continue
            middle = float(np.median(values))
            spread = 1.4826 * float(np.median(np.abs(values - middle))) / middle
            sd = 1.2533 * max(spread, 1e-4) / np.sqrt(len(values))
            found.append(ClockPoint(float(np.median(mhz[group])), middle, float(sd), len(values)))
        points.append(found)
    return points


def fit_time(
    entries: Sequence[Entry], layout: Layout, options: TimeOptions = TimeOptions()
) -> tuple[TimeCurve | None, ...]:
    """A curve for each cost key of the layout; None where it has no usable duration."""
    return tuple(
        _fit_curve(points, layout, options, cost_key.cls.kind.is_fixed)
        for points, cost_key in zip(clock_points(entries, layout), layout.keys, strict=True)
    )


def _fit_curve(
    points: list[ClockPoint], layout: Layout, options: TimeOptions, fixed: bool
) -> TimeCurve | None:
    if not points:
        return None
    varied = points[-1].mhz >= MIN_SPAN * points[0].mhz
    u = layout.top_mhz / np.array([p.mhz for p in points])
    time_s = np.array([p.time_s for p in points])
    weight = 1 / (time_s * np.sqrt(np.array([p.sd for p in points]) ** 2 + options.misfit**2))
    basis = np.stack([np.ones_like(u), u, u**2], axis=1)
    coefficients, _ = nnls(basis * weight[:, None], time_s * weight)
    return TimeCurve(
        points=tuple(points),
        top_mhz=float(layout.top_mhz),
        coefficients=(float(coefficients[0]), float(coefficients[1]), float(coefficients[2])),
        misfit=options.misfit,
        length=options.length,
        varied=varied,
        fixed=fixed,
    )
