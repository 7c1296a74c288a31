"""How much a frequency plan would tell about every class, before it is run.

Unknown are the relative deviations of each class's time and power from the physics at every clock
of a grid, with the prior covariance of the models. A plan observes durations at its clocks, and
for each stage one sum of powers, weighted by their share in the stage's energy. The best plan is
the one after which the mean variance of all unknowns is smallest (Cohn, Ghahramani and Jordan,
1996: "active learning with statistical models"). Results are not needed for that, only shares.
"""

from __future__ import annotations

import numpy as np

from kareus_pp.measure import energy_model, time_model
from kareus_pp.measure.kernels import groups_of, matern, same
from kareus_pp.measure.table import Applied, Floats, Ints, Layout

TIME_TOLERANCE, ENERGY_TOLERANCE = 0.005, 0.01
"""Deviations of time and power that count alike."""
TIME_NOISE, ENERGY_NOISE = 0.002, 0.003
"""Assumed noise of one class's median duration and of one stage's energy."""
STATIC_SHARE = 0.35
"""Assumed share of the power that does not depend on the clock, at the highest clock."""
BLOCKING_SHARE = 0.25
"""Assumed power of a waiting GPU, as a share of a busy one's at the highest clock."""


class Information:
    """Posterior variances of times and powers on a grid, updated plan by plan.

    Args:
        layout: Schedule, cost keys and clocks.
        key: Cost key of every grid point.
        mhz: Clock of every grid point.
        blocking_known: The blocking power was measured.
    """

    def __init__(self, layout: Layout, key: Ints, mhz: Floats, blocking_known: bool) -> None:
        self._layout = layout
        self._point = {
            (int(k), float(f)): place for place, (k, f) in enumerate(zip(key, mhz, strict=True))
        }
        self._count = len(key)
        group = groups_of(layout.keys)[key]
        kinds, classes = same(group, group), same(key, key)
        x = np.log(mhz)
        smooth = matern(x, x, time_model.LENGTH)
        self._time = smooth * (time_model.SHARED**2 * kinds + time_model.OWN**2 * classes)
        stages = layout.schedule.stages
        self._power = np.zeros((self._count + stages, self._count + stages))
        level = energy_model.KIND**2 * kinds + energy_model.CLASS**2 * classes
        shape = energy_model.SMOOTH_KIND**2 * kinds + energy_model.SMOOTH_CLASS**2 * classes
        shape = shape + energy_model.SMOOTH_ALL**2
        self._power[: self._count, : self._count] = level + smooth * shape
        known = energy_model.BLOCKING_KNOWN**2 * np.eye(stages)
        learned = energy_model.BLOCKING_SHARED**2 + energy_model.BLOCKING_OWN**2 * np.eye(stages)
        self._power[self._count :, self._count :] = known if blocking_known else learned

    @property
    def variance(self) -> float:
        """Sum of the mean variances of time and power in units of their tolerances."""
        time = float(np.trace(self._time)) / TIME_TOLERANCE**2
        power = float(np.trace(self._power[: self._count, : self._count])) / ENERGY_TOLERANCE**2
        return (time + power) / self._count

    def gain(self, plan: Applied, duration_s: Floats, time_s: float) -> float:
        """By how much a plan would lower `variance`."""
        time_rows, power_rows = self._rows(plan, duration_s, time_s)
        time = _reduction(self._time, time_rows, TIME_NOISE)
        power = _reduction(self._power, power_rows, ENERGY_NOISE)
        gained = float(np.sum(time**2)) / TIME_TOLERANCE**2
        gained += float(np.sum(power[:, : self._count] ** 2)) / ENERGY_TOLERANCE**2
        return gained / self._count

    def add(self, plan: Applied, duration_s: Floats, time_s: float) -> None:
        """Take a plan as run."""
        time_rows, power_rows = self._rows(plan, duration_s, time_s)
        time = _reduction(self._time, time_rows, TIME_NOISE)
        power = _reduction(self._power, power_rows, ENERGY_NOISE)
        self._time = self._time - time.T @ time
        self._power = self._power - power.T @ power

    def _rows(self, plan: Applied, duration_s: Floats, time_s: float) -> tuple[Floats, Floats]:
        """What a plan observes: clocks of each class, and a weighted sum of powers per stage."""
        place = np.array(
            [
                self._point.get((int(k), float(f)), -1)
                for k, f in zip(plan.key, plan.mhz, strict=True)
            ],
            dtype=np.intp,
        )
        on_grid = place >= 0
        visited = np.unique(place[on_grid])
        time_rows = np.zeros((len(visited), self._count))
        time_rows[np.arange(len(visited)), visited] = 1.0
        ratio = plan.mhz / self._layout.top_mhz
        energy = duration_s * (STATIC_SHARE + (1 - STATIC_SHARE) * ratio**energy_model.EXPONENT)
        stages = self._layout.schedule.stages
        power_rows = np.zeros((stages, self._count + stages))
        for stage in range(stages):
            mine = self._layout.stage == stage
            idle = BLOCKING_SHARE * max(0.0, time_s - float(np.sum(duration_s[mine])))
            total = float(np.sum(energy[mine])) + idle
            chosen = mine & on_grid
            power_rows[stage, : self._count] = np.bincount(
                place[chosen], energy[chosen] / total, minlength=self._count
            )
            power_rows[stage, self._count + stage] = idle / total
        return time_rows, power_rows


def _reduction(covariance: Floats, rows: Floats, noise: float) -> Floats:
    """The matrix R for which observing `rows` lowers the covariance by R^T R."""
    cross = rows @ covariance
    observed = cross @ rows.T + noise**2 * np.eye(len(rows))
    return np.asarray(np.linalg.solve(np.linalg.cholesky(observed), cross))
