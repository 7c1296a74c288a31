"""Which frequency plan to run next: the one that tells most about every instruction class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kareus_pp.config import ProfilingConfig
from kareus_pp.errors import ProfileError
from kareus_pp.measure.holdout import highest_plan
from kareus_pp.measure.information import Information
from kareus_pp.measure.learn import Learned, learn
from kareus_pp.measure.replay import Replay
from kareus_pp.measure.runs import PlanRun, Runs
from kareus_pp.measure.table import Applied, CostKey, Floats, Layout, layout_of
from kareus_pp.plan import Settings, default_settings
from kareus_pp.schedule import InstructionClass, Kind, Schedule
from kareus_pp.setting import SEQUENTIAL, Setting

GRID = 12
"""Clocks of the useful range that plans use."""
CANDIDATES = 32
"""Random plans among which the next one is chosen."""
TIME_ACCURACY, ENERGY_ACCURACY = 0.005, 0.02
"""The design stops when nine options in ten are known this well (relative deviation)."""
MIN_PLANS = 6
"""It does not stop before."""
NOMINAL_WORK = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
"""Assumed work of a kind before anything was measured; others count as a forward."""


class ExperimentDesign:
    """Chooses frequency plans one after the other, within a budget.

    Every rank that builds it from the same arguments and runs gets the same plans.

    Args:
        schedule: The schedule that plans are made for.
        clocks_mhz: Supported SM clocks.
        budget: Plans, iterations and slowdown that may be used.
        blocking_power_w: Measured blocking power of every stage; None where unknown.

    Raises:
        ProfileError: No clock is supported.
    """

    def __init__(
        self,
        schedule: Schedule,
        clocks_mhz: Sequence[int],
        budget: ProfilingConfig,
        blocking_power_w: Sequence[float] | None = None,
    ) -> None:
        if not clocks_mhz:
            raise ProfileError(
                "no SM clock can be set, so there is nothing to profile; read the supported "
                "clocks from the device"
            )
        self._schedule = schedule
        self._budget = budget
        clocks = tuple(sorted(set(clocks_mhz)))
        keys = tuple(CostKey(cls, SEQUENTIAL) for cls in schedule.classes)
        stages = np.array(schedule.stage_of, dtype=np.intp)
        self._layout = Layout(schedule, keys, stages, clocks)
        self._replay = Replay(schedule)
        self._blocking_known = blocking_power_w is not None
        self._clocks = np.array(clocks, dtype=float)

    def grid_mhz(self, learned: Learned | None = None) -> tuple[int, ...]:
        """Clocks that plans use, ascending: those that slow a class down within the bound.

        Before anything was learned, time is taken to go with the inverse of the clock; a power
        limit that holds the highest clocks back, or work that waits for memory, allows lower ones.
        """
        slowdown = self._clocks[-1] / self._clocks
        if learned is not None:
            model = learned.model
            ratios = [
                time_s / time_s[-1]
                for key, cost_key in enumerate(model.layout.keys)
                if not cost_key.cls.kind.is_fixed and model.times.varied[key]
                for time_s in [model.times.predict(key, self._clocks)[0]]
            ]
            if ratios:
                slowdown = np.median(np.array(ratios), axis=0)
        within = slowdown <= 1 + self._budget.max_slowdown_percent / 100
        useful = [int(mhz) for mhz in self._clocks[within]] or [int(self._clocks[-1])]
        places = np.unique(np.round(np.linspace(0, len(useful) - 1, GRID)).astype(int))
        return tuple(useful[int(place)] for place in places)

    def next_plan(self, runs: Runs) -> Settings | None:
        """The next plan to run after `runs`; None: accuracy reached or budget used.

        The first one runs at default clocks, the second as low as the slowdown allows.
        """
        done = len(runs.runs)
        if done >= self._budget.plans or (done and len(self._clocks) == 1):
            return None
        if done == 0:
            return default_settings(self._schedule)
        learned = _try_learn(runs)
        if learned is not None and done >= MIN_PLANS and accurate(learned):
            return None
        grid = self.grid_mhz(learned)
        information = self._information(grid)
        duration = self._durations(learned)
        limit_s = self._length_s(self._apply(default_settings(self._schedule)), duration)
        limit_s *= 1 + self._budget.max_slowdown_percent / 100
        for run in runs.runs:
            plan = self._apply(run.settings)
            information.add(plan, duration(plan), self._length_s(plan, duration))
        rng = np.random.default_rng([done, int(self._schedule.signature, 16) % 2**32])
        best: tuple[float, Settings] | None = None
        for settings in self._candidates(rng, grid, first=done == 1):
            plan = self._apply(settings)
            length_s = self._length_s(plan, duration)
            if length_s > limit_s * (1 + 1e-9):
                continue
            gain = information.gain(plan, duration(plan), length_s)
            if best is None or gain > best[0]:
                best = gain, settings
        return None if best is None else best[1]

    def _information(self, grid_mhz: Sequence[int]) -> Information:
        moving = [i for i, key in enumerate(self._layout.keys) if not key.cls.kind.is_fixed]
        grid = np.array(grid_mhz, dtype=float)
        key = np.repeat(np.array(moving, dtype=np.intp), len(grid))
        return Information(self._layout, key, np.tile(grid, len(moving)), self._blocking_known)

    def _apply(self, settings: Settings) -> Applied:
        plain = tuple(tuple(Setting(setting.clock_mhz) for setting in row) for row in settings)
        return self._layout.apply(plain)

    def _length_s(self, plan: Applied, duration: Callable[[Applied], Floats]) -> float:
        return float(self._replay(duration(plan)[:, None])[0])

    def _durations(self, learned: Learned | None) -> Callable[[Applied], Floats]:
        """Durations of a plan as learned or, where they are unknown, as the clock ratio has it."""
        work = np.array(
            [
                0.0 if key.cls.kind.is_fixed else NOMINAL_WORK.get(key.cls.kind, 1.0)
                for key in self._layout.keys
            ]
        )
        top = np.ones(len(work))
        if learned is not None:
            number = {key: i for i, key in enumerate(learned.model.layout.keys)}
            for place, key in enumerate(self._layout.keys):
                if key in number:
                    clock = np.array([float(self._layout.top_mhz)])
                    top[place] = learned.model.times.predict(number[key], clock)[0][0]
            known = np.isfinite(top)
            top = np.where(known, top / np.where(work > 0, work, 1.0), np.nanmedian(top))

        def duration(plan: Applied) -> Floats:
            if learned is not None and learned.model.layout.keys == self._layout.keys:
                found = learned.model.times.durations_s(plan)
            else:
                found = np.full(plan.mhz.shape, np.nan)
            assumed = (work * top)[plan.key] * self._layout.top_mhz / plan.mhz
            return np.where(np.isfinite(found), found, assumed)

        return duration

    def _candidates(
        self, rng: np.random.Generator, grid: Sequence[int], first: bool
    ) -> list[Settings]:
        """Plans that spread the clocks of each class around a centre of its own."""
        last = len(grid) - 1
        classes = [cls for cls in self._schedule.classes if not cls.kind.is_fixed]
        if first:
            return [self._plan(dict.fromkeys(classes, (0, 0)), grid)]
        chosen = []
        for number in range(CANDIDATES):
            # Classes at clocks of their own tell them apart; whole stages at clocks of their own
            # make the others wait, which tells the blocking power.
            unit = {cls: cls if number % 2 else cls.stage for cls in classes}
            units = list(dict.fromkeys(unit.values()))
            centre = dict(zip(units, rng.beta(0.5, 0.5, len(units)), strict=True))
            width = dict(
                zip(units, rng.integers(0, max(1, last // 3) + 1, len(units)), strict=True)
            )
            levels = {
                cls: (round(last * float(centre[unit[cls]])), int(width[unit[cls]]))
                for cls in classes
            }
            chosen.append(self._plan(levels, grid))
        return chosen

    def _plan(
        self, levels: Mapping[InstructionClass, tuple[int, int]], grid: Sequence[int]
    ) -> Settings:
        """A plan in which the microbatches of a class take turns around its level."""
        last = len(grid) - 1
        rows = []
        for order in self._schedule.order:
            row = []
            for instruction in order:
                if instruction.kind.is_fixed:
                    row.append(Setting())
                    continue
                middle, width = levels[self._schedule.class_of(instruction)]
                turn = (0, 1, -1)[instruction.microbatch % 3]
                row.append(Setting(grid[min(last, max(0, middle + turn * width))]))
            rows.append(tuple(row))
        return tuple(rows)


def accurate(learned: Learned) -> bool:
    """True where nine options in ten are known as well as the design wants."""
    options = [o for found in learned.profile.options.values() for o in found if o.time_s > 0]
    if learned.report.unknown_classes or not options:
        return False
    time = [(option.time_sd_s or 0.0) / option.time_s for option in options]
    energy = [(o.energy_sd_j or 0.0) / o.energy_j for o in options if o.energy_j > 0]
    return bool(
        np.quantile(time, 0.9) <= TIME_ACCURACY
        and energy
        and np.quantile(energy, 0.9) <= ENERGY_ACCURACY
    )


def choose_by_design(runs: Runs, count: int) -> tuple[int, ...]:
    """Training plans from recorded ones, one after the other, as a profile phase would.

    Results are seen only of plans already chosen.
    """
    layout = layout_of(runs)
    replay = Replay(runs.schedule)
    plans = [layout.apply(run.settings) for run in runs.runs]
    pairs = np.unique(
        np.concatenate([np.stack([p.key.astype(float), p.mhz], axis=1) for p in plans]), axis=0
    )
    moving = np.array([not key.cls.kind.is_fixed for key in layout.keys])
    pairs = pairs[moving[pairs[:, 0].astype(int)]]
    information = Information(
        layout, pairs[:, 0].astype(np.intp), pairs[:, 1], runs.blocking_power_w is not None
    )
    chosen = [highest_plan(runs)]
    work = _measured_work(runs.runs[chosen[0]], plans[chosen[0]], layout)

    def cost(number: int) -> tuple[Applied, Floats, float]:
        plan = plans[number]
        duration_s = work[plan.key] / plan.mhz
        return plan, duration_s, float(replay(duration_s[:, None])[0])

    information.add(*cost(chosen[0]))
    while len(chosen) < count:
        rest = [number for number in range(len(plans)) if number not in chosen]
        best = max(rest, key=lambda number: information.gain(*cost(number)))
        information.add(*cost(best))
        chosen.append(best)
    return tuple(sorted(chosen))


def _measured_work(run: PlanRun, plan: Applied, layout: Layout) -> Floats:
    """For each cost key its duration times its clock, from one run; nominal where unknown."""
    work = np.array(
        [float(layout.top_mhz) * NOMINAL_WORK.get(key.cls.kind, 1.0) for key in layout.keys]
    )
    if run.iterations:
        duration_s = np.array([v for row in run.iterations[0].duration_s for v in row])
        for key in np.unique(plan.key):
            mine = plan.key == key
            if np.isfinite(duration_s[mine]).any():
                work[key] = float(np.nanmedian(duration_s[mine] * plan.mhz[mine]))
    return work


def _try_learn(runs: Runs) -> Learned | None:
    try:
        return learn(runs)
    except ProfileError:
        return None
