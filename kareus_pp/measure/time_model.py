"""Time of every instruction class over the clock, learned from measured durations.

The physics is the prior: part of an instruction does not depend on the SM clock (memory, links,
waiting), part goes with 1/f, and above some clock the power limit holds the GPU back, so that
asking for more gains nothing: `t(f) = a + b max(u, u_sat)` with `u = f_top / f` and a and b not
negative. The saturation is shared by the classes of one group and is averaged over its posterior:
clocks that were never visited stay between "no gain" and "full gain". What the data show beyond
that is a smooth relative deviation, a Gaussian process over log f with a part shared by the group
and a part of the class's own: close to visited clocks the data decide, far from them the physics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from kareus_pp.measure.kernels import Conditioned, groups_of, matern, same
from kareus_pp.measure.table import Applied, Entry, Floats, Ints, Layout

MIN_SPAN = 1.03
"""A class varied in clock if its highest clock is at least this many times its lowest."""
LENGTH = 0.2
"""Length scale of the deviations in log f."""
SHARED, OWN = 0.01, 0.01
"""Relative standard deviations of the shared and the own part, times the fitted scale."""
SCALES = (0.1, 0.3, 1.0, 3.0)
"""Scales tried; the marginal likelihood decides."""
FLOOR = 0.001
"""Relative repeatability of a class's median duration from plan to plan."""
SATURATIONS = 25
"""Saturation clocks tried for each group."""
MISFIT = 0.004
"""Relative misfit of the saturating physics alone."""


@dataclass(frozen=True)
class Points:
    """Measured durations, one for each cost key and visited clock; arrays of one length.

    Attributes:
        key: Number of the cost key.
        mhz: Clock.
        time_s: Median duration over microbatches and plans.
        sd: Relative standard deviation of `time_s`.
    """

    key: Ints
    mhz: Floats
    time_s: Floats
    sd: Floats


class Saturation:
    """Saturation of the clock, by group: a posterior over `u_sat`, and the trend it implies."""

    def __init__(self, points: Points, group: Ints, top_mhz: float) -> None:
        self._top_mhz = top_mhz
        self._group = group
        self._levels: dict[int, tuple[Floats, Floats]] = {}
        self._coefficients: dict[int, Floats] = {}
        u = top_mhz / points.mhz
        weight = 1 / (points.time_s * np.hypot(points.sd, MISFIT))
        for number in np.unique(group[points.key]):
            mine = group[points.key] == number
            levels = np.exp(np.linspace(0.0, np.log(max(1.0, float(u[mine].max()))), SATURATIONS))
            misfit = np.zeros(SATURATIONS)
            for key in np.unique(points.key[mine]):
                own = points.key == key
                fits = [
                    nnls(
                        _basis(np.maximum(u[own], level)) * weight[own, None],
                        points.time_s[own] * weight[own],
                    )
                    for level in levels
                ]
                self._coefficients[int(key)] = np.array([fit[0] for fit in fits])
                misfit += [fit[1] ** 2 for fit in fits]
            share = np.exp(-0.5 * (misfit - misfit.min()))
            self._levels[int(number)] = (levels, share / share.sum())

    def trend_s(self, key: int, mhz: Floats) -> Floats:
        """Duration by the physics alone; shape as `mhz`."""
        levels, share = self._levels[int(self._group[key])]
        u = np.maximum(self._top_mhz / mhz[:, None], levels[None, :])
        a, b = self._coefficients[key].T
        return np.asarray((a + b * u) @ share)

    def trend_sd(self, key: int, mhz: Floats) -> Floats:
        """Relative standard deviation of the trend for want of knowledge of the saturation."""
        levels, share = self._levels[int(self._group[key])]
        u = np.maximum(self._top_mhz / mhz[:, None], levels[None, :])
        a, b = self._coefficients[key].T
        value = a + b * u
        mean = value @ share
        variance = np.maximum((value**2) @ share - mean**2, 0.0)
        return np.asarray(np.sqrt(variance) / mean)

    def ratio(self, key: int, mhz: Floats, power: float = 1.0) -> Floats:
        """Expected `(f_eff / f_top) ** power`, with the clock that is really reached."""
        found = self._levels.get(int(self._group[key]))
        if found is None:
            return np.asarray((mhz / self._top_mhz) ** power)
        levels, share = found
        reached = np.minimum(mhz[:, None] / self._top_mhz, 1 / levels[None, :])
        return np.asarray(reached**power @ share)


class TimeModel:
    """Durations of every cost key over the clock; see the module's docstring."""

    def __init__(self, entries: Sequence[Entry], layout: Layout) -> None:
        self.layout = layout
        self.group = groups_of(layout.keys)
        self._fixed = np.array([key.cls.kind.is_fixed for key in layout.keys])
        self.points = _points(entries, layout)
        self.varied = tuple(
            bool(self._fixed[key]) or _varied(self.points.mhz[self.points.key == key])
            for key in range(len(layout.keys))
        )
        moving = ~self._fixed[self.points.key] if len(self.points.key) else np.zeros(0, bool)
        self._seen = _chosen(self.points, moving)
        self.saturation = Saturation(self._seen, self.group, float(layout.top_mhz))
        self._x = np.log(self._seen.mhz)
        residual = np.zeros(len(self._x))
        for key in np.unique(self._seen.key):
            own = self._seen.key == key
            residual[own] = np.log(
                self._seen.time_s[own] / self.saturation.trend_s(int(key), self._seen.mhz[own])
            )
        noise = np.diag(self._seen.sd**2 + FLOOR**2)
        fits = [
            (scale, Conditioned(scale**2 * self._kernel(self._seen, self._seen) + noise, residual))
            for scale in SCALES
        ]
        self.scale, self._fit = max(fits, key=lambda fit: fit[1].log_likelihood)

    def knows(self, key: int) -> bool:
        """True where the class has any usable duration."""
        return bool(np.any(self.points.key == key))

    def visited_mhz(self, key: int) -> Floats:
        """Clocks at which the class was measured."""
        return np.asarray(self.points.mhz[self.points.key == key])

    def predict(self, key: int, mhz: Floats) -> tuple[Floats, Floats]:
        """Duration in seconds and its relative standard deviation; shapes as `mhz`.

        NaN for a class without durations, and at clocks that were not visited where the class
        never varied in clock.
        """
        own = self.points.key == key
        if not np.any(own):
            return np.full(mhz.shape, np.nan), np.full(mhz.shape, np.nan)
        if self._fixed[key] or not self.varied[key]:
            return self._constant(key, mhz)
        wanted = Points(np.full(len(mhz), key, dtype=np.intp), mhz, mhz, mhz)
        cross = self.scale**2 * self._kernel(wanted, self._seen)
        deviation = cross @ self._fit.weights
        prior = self.scale**2 * (SHARED**2 + OWN**2)
        variance = prior - np.sum(cross * self._fit.solve(cross.T).T, axis=1) + FLOOR**2
        unexplained = np.maximum(variance, FLOOR**2)
        near = 1 - np.minimum(1.0, (unexplained - FLOOR**2) / prior)
        doubt = self.saturation.trend_sd(key, mhz) * (1 - near)
        time_s = self.saturation.trend_s(key, mhz) * np.exp(deviation)
        return time_s, np.sqrt(unexplained + doubt**2)

    def durations_s(self, applied: Applied) -> Floats:
        """Duration of every instruction of a plan; NaN where unknown."""
        result = np.full(applied.mhz.shape, np.nan)
        for key in np.unique(applied.key):
            mine = applied.key == key
            clocks, place = np.unique(applied.mhz[mine], return_inverse=True)
            result[mine] = self.predict(int(key), clocks)[0][place]
        return result

    def _constant(self, key: int, mhz: Floats) -> tuple[Floats, Floats]:
        own = _chosen(self.points, self.points.key == key)
        known = self._fixed[key] | np.isclose(mhz[:, None], own.mhz[None, :]).any(axis=1)
        nearest = np.argmin(np.abs(mhz[:, None] - own.mhz[None, :]), axis=1)
        sd = np.hypot(own.sd[nearest], FLOOR)
        return np.where(known, own.time_s[nearest], np.nan), np.where(known, sd, np.nan)

    def _kernel(self, a: Points, b: Points) -> Floats:
        shared = SHARED**2 * same(self.group[a.key], self.group[b.key])
        return matern(np.log(a.mhz), np.log(b.mhz), LENGTH) * (shared + OWN**2 * same(a.key, b.key))


def _basis(u: Floats) -> Floats:
    return np.stack([np.ones_like(u), u], axis=1)


def _varied(mhz: Floats) -> bool:
    return len(mhz) > 0 and bool(mhz.max() >= MIN_SPAN * mhz.min())


def _chosen(points: Points, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Points:
    return Points(points.key[mask], points.mhz[mask], points.time_s[mask], points.sd[mask])


def _points(entries: Sequence[Entry], layout: Layout) -> Points:
    """Medians over microbatches, iterations and plans; fixed kinds count as one clock."""
    rows = [(entry, row) for entry in entries for row in entry.durations_s]
    key = np.concatenate([entry.applied.key for entry, _ in rows])
    mhz = np.concatenate([entry.applied.mhz for entry, _ in rows])
    time_s = np.concatenate([row for _, row in rows])
    fixed = np.array([cost.cls.kind.is_fixed for cost in layout.keys])
    mhz = np.where(fixed[key], float(layout.top_mhz), mhz)
    usable = np.isfinite(time_s) & (time_s > 0)
    found = []
    for number in np.unique(key[usable]):
        own = usable & (key == number)
        for clock in np.unique(mhz[own]):
            values = time_s[own & (mhz == clock)]
            middle = float(np.median(values))
            spread = 1.4826 * float(np.median(np.abs(values - middle))) / middle
            sd = 1.2533 * max(spread, 0.005) / np.sqrt(len(values))
            found.append((number, clock, middle, sd))
    columns = np.array(found, dtype=float).reshape(-1, 4).T
    return Points(columns[0].astype(np.intp), columns[1], columns[2], columns[3])
