"""A small pipeline with a known physics, to learn from: graph replay plus noise."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kareus_pp.builders import build_1f1b
from kareus_pp.evaluate import start_times
from kareus_pp.measure import IterationRecord, PlanRun, Runs
from kareus_pp.plan import Settings
from kareus_pp.profile import Source
from kareus_pp.schedule import InstructionClass, Kind, Schedule
from kareus_pp.setting import Setting

CLOCKS = tuple(range(900, 1411, 15))


@dataclass
class Job:
    """Truth: `t = w (m + (1 - m) f_top / f)`, `p = p0 + k (f / f_top)^3`, blocking power P."""

    schedule: Schedule = field(default_factory=lambda: build_1f1b(4, 8))
    clocks_mhz: tuple[int, ...] = CLOCKS
    blocking_w: float = 80.0
    overhead_s: float = 0.05
    time_noise: float = 0.0
    energy_noise: float = 0.0
    spin: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def time_s(self, cls: InstructionClass, mhz: float) -> float:
        work = 0.1 * (1 + 0.08 * cls.stage) * (1.0 if cls.kind is Kind.FORWARD else 1.9)
        memory = 0.2 if cls.kind is Kind.FORWARD else 0.3
        return work * (memory + (1 - memory) * self.clocks_mhz[-1] / mhz)

    def power_w(self, cls: InstructionClass, mhz: float) -> float:
        dynamic = (210 if cls.kind is Kind.FORWARD else 240) - 5 * cls.stage
        return 110 + dynamic * (mhz / self.clocks_mhz[-1]) ** 3

    def run(self, settings: Settings, iterations: int = 3, name: str = "") -> PlanRun:
        return PlanRun(settings, tuple(self.iterate(settings) for _ in range(iterations)), name)

    def iterate(self, settings: Settings) -> IterationRecord:
        flat = [
            (stage, self.schedule.class_of(i), float(s.clock_mhz or self.clocks_mhz[-1]))
            for stage, (order, row) in enumerate(zip(self.schedule.order, settings, strict=True))
            for i, s in zip(order, row, strict=True)
        ]
        duration = np.array([self.time_s(cls, mhz) for _, cls, mhz in flat])
        duration *= 1 + self.time_noise * self.rng.standard_normal(len(flat))
        start = start_times(self.schedule, duration)
        time_s = float(np.max(start + duration)) + self.overhead_s
        energy = []
        for stage in range(self.schedule.stages):
            mine = [n for n, (s, _, _) in enumerate(flat) if s == stage]
            busy = sum(duration[n] * self.power_w(flat[n][1], flat[n][2]) for n in mine)
            waiting = self._waiting_j(stage, mine, start, duration, [f[2] for f in flat], time_s)
            noise = 1 + self.energy_noise * self.rng.standard_normal()
            energy.append(float((busy + waiting) * noise))
        rows = np.split(duration, np.cumsum([len(row) for row in self.schedule.order])[:-1])
        return IterationRecord(time_s, tuple(tuple(map(float, r)) for r in rows), tuple(energy))

    def _waiting_j(
        self,
        stage: int,
        mine: list[int],
        start: np.ndarray,
        duration: np.ndarray,
        mhz: list[float],
        time_s: float,
    ) -> float:
        """A stage waits at the clock of what comes next; a part of the power goes with it."""
        energy = 0.0
        spans = [
            (start[n] - free, mhz[n])
            for n, free in zip(mine, [0.0, *(start + duration)[mine][:-1]], strict=True)
        ]
        free_s = time_s - sum(span for span, _ in spans) - duration[mine].sum()
        for span, clock in [*spans, (free_s, mhz[mine[-1]])]:
            ratio = (clock / self.clocks_mhz[-1]) ** 3
            energy += span * self.blocking_w * (1 - self.spin + self.spin * ratio)
        return energy

    def uniform(self, mhz: int | None) -> Settings:
        return tuple(tuple(Setting(mhz) for _ in row) for row in self.schedule.order)

    def runs(self, *runs: PlanRun, **changes: object) -> Runs:
        return Runs(
            self.schedule,
            tuple(runs),
            clocks_mhz=self.clocks_mhz,
            source=Source.EMULATED,
            **changes,  # type: ignore[arg-type]
        )
