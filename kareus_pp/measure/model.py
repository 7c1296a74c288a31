"""A job as learned: times, overhead and powers together, and what they predict for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kareus_pp.measure.energy_model import EnergyModel
from kareus_pp.measure.overhead import OverheadModel, features_of
from kareus_pp.measure.replay import Replay
from kareus_pp.measure.table import Applied, Entry, Floats, Ints, Layout
from kareus_pp.measure.time_model import TimeModel


@dataclass(frozen=True)
class Predicted:
    """Predictions of several plans; NaN where a plan uses a clock that is unknown for a class.

    Attributes:
        time_s: Iteration times; shape `(plans,)`.
        time_sd_s: Their standard deviations.
        energy_j: Energy of every stage; shape `(plans, stages)`.
        energy_sd_j: Standard deviation of the total energy; shape `(plans,)`.
    """

    time_s: Floats
    time_sd_s: Floats
    energy_j: Floats
    energy_sd_j: Floats

    @property
    def total_j(self) -> Floats:
        """Energy of all stages; shape `(plans,)`."""
        return np.asarray(self.energy_j.sum(axis=1))


class JobModel:
    """Times, overhead and powers fitted to the entries."""

    def __init__(
        self,
        entries: Sequence[Entry],
        layout: Layout,
        replay: Replay,
        blocking_power_w: Sequence[float] | None,
    ) -> None:
        self.layout = layout
        self._replay = replay
        self.times = TimeModel(entries, layout)
        durations = np.array([self.times.durations_s(entry.applied) for entry in entries])
        known = np.isfinite(durations).all(axis=1)
        measured = np.array([entry.time_s for entry in entries])[known]
        length_s = replay(durations[known].T)
        self.overhead = OverheadModel(
            self._features(durations[known], length_s), measured - length_s
        )
        self.energy = EnergyModel(entries, layout, self.times, replay, blocking_power_w)

    def predict(self, plans: Sequence[Applied]) -> Predicted:
        """Time and energy of plans."""
        count, stages = len(plans), self.layout.schedule.stages
        time_s, time_sd = np.full(count, np.nan), np.full(count, np.nan)
        energy, energy_sd = np.full((count, stages), np.nan), np.full(count, np.nan)
        durations = np.array([self.times.durations_s(plan) for plan in plans])
        known = [int(i) for i in np.flatnonzero(np.isfinite(durations).all(axis=1))]
        if len(known):
            length_s = self._replay(durations[known].T)
            features = self._features(durations[known], length_s)
            time_s[known] = length_s + self.overhead(features)
            paths = self._replay.critical(durations[known].T)
            spread = np.array(
                [
                    self._path_sd(plans[plan], durations[plan], path)
                    for plan, path in zip(known, paths, strict=True)
                ]
            )
            time_sd[known] = np.hypot(spread, self.overhead.sd_s)
            if not self.energy.is_empty:
                energy[known], energy_sd[known] = self.energy.predict(
                    [(plans[plan], durations[plan], float(time_s[plan])) for plan in known]
                )
        return Predicted(time_s, time_sd, energy, energy_sd)

    def _features(self, durations: Floats, length_s: Floats) -> Floats:
        stages = self.layout.schedule.stages
        busy = [
            np.asarray(np.bincount(self.layout.stage, row, minlength=stages), dtype=float)
            for row in durations
        ]
        return features_of(busy, length_s)

    def _path_sd(self, plan: Applied, duration_s: Floats, path: Ints) -> float:
        """Standard deviation of the longest path: errors of one class add up, classes do not."""
        variance = 0.0
        for key in np.unique(plan.key[path]):
            mine = path[plan.key[path] == key]
            clocks, place = np.unique(plan.mhz[mine], return_inverse=True)
            sd = self.times.predict(int(key), clocks)[1][place]
            variance += float(np.sum(sd * duration_s[mine])) ** 2
        return float(np.sqrt(variance))
