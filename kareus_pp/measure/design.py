"""Which frequency plan to run next: the one that tells most about every instruction class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kareus_pp.config import ProfilingConfig
from kareus_pp.measure.runs import Runs
from kareus_pp.plan import Settings, default_settings
from kareus_pp.schedule import Schedule
from kareus_pp.setting import Setting


class ExperimentDesign:
    """Chooses frequency plans one after the other, within a budget.

    Every rank that builds it from the same arguments and runs gets the same plans.

    Args:
        schedule: The schedule that plans are made for.
        clocks_mhz: Supported SM clocks.
        budget: Plans, iterations and slowdown that may be used.
        blocking_power_w: Measured blocking power of every stage; None where unknown.
    """

    def __init__(
        self,
        schedule: Schedule,
        clocks_mhz: Sequence[int],
        budget: ProfilingConfig,
        blocking_power_w: Sequence[float] | None = None,
    ) -> None:
        self._schedule = schedule
        self._clocks = tuple(sorted(set(clocks_mhz)))
        self._budget = budget
        self._blocking_power_w = blocking_power_w

    def next_plan(self, runs: Runs) -> Settings | None:
        """The next plan to run after `runs`; None: accuracy reached or budget used.

        The first one runs at default clocks.
        """
        done = len(runs.runs)
        if done >= self._budget.plans:
            return None
        if done == 0 or not self._clocks:
            return default_settings(self._schedule) if done == 0 else None
        lowest = self._clocks[-1] / (1 + self._budget.max_slowdown_percent / 100)
        useful = [mhz for mhz in self._clocks if mhz >= lowest] or [self._clocks[-1]]
        rng = np.random.default_rng(done)
        centre = {cls: rng.uniform() for cls in self._schedule.classes}
        seen: dict[object, int] = {}
        rows = []
        for order in self._schedule.order:
            row = []
            for instruction in order:
                if instruction.kind.is_fixed:
                    row.append(Setting())
                    continue
                cls = self._schedule.class_of(instruction)
                turn = seen[cls] = seen.get(cls, 0) + 1
                share = np.clip(centre[cls] + 0.25 * (turn % 3 - 1), 0, 1)
                row.append(Setting(useful[round(share * (len(useful) - 1))]))
            rows.append(tuple(row))
        return tuple(rows)
