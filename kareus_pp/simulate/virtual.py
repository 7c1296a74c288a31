"""Emulated iterations of a whole pipeline in virtual time: minutes of training in milliseconds.

The devices are those of `device.emulated`, one for each stage, so that noise, switch latency,
temperature and counter ticks are those of an emulated run in wall-clock time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kareus_pp.config import EmulatedConfig
from kareus_pp.device.base import Sample
from kareus_pp.device.emulated import Account, EmulatedDevice
from kareus_pp.device.timesource import VirtualTime
from kareus_pp.measure.runs import IterationRecord, PlanRun, Runs
from kareus_pp.plan import Settings
from kareus_pp.profile import Overhead, Source
from kareus_pp.schedule import InstructionClass, Schedule, topological_order
from kareus_pp.setting import Setting
from kareus_pp.simulate.gpu_model import GpuModel, Work, load_gpu_model


@dataclass(frozen=True)
class TrueCost:
    """What no counter shows: the exact cost of an iteration.

    Attributes:
        energy_j: For each stage its energy.
        busy_j: For each stage the energy of its instructions.
        busy_s: For each stage the time of its instructions.
    """

    energy_j: tuple[float, ...]
    busy_j: tuple[float, ...]
    busy_s: tuple[float, ...]


class VirtualPipeline:
    """A pipeline of emulated GPUs; temperature, clocks and counters live on between iterations.

    Args:
        schedule: What an iteration executes.
        works: Work of the instruction classes of all stages, not yet scaled.
        model: The GPU of every stage; by default the one that `config` names.
        config: Work scale, hidden factors, noise, seed.
        overhead: Time between the iterations and latency of a dependency across stages.

    Attributes:
        devices: The emulated device of every stage.
        now_s: Virtual time at which the next iteration starts.
        true_cost: Exact cost of the last iteration; None before the first.
    """

    def __init__(
        self,
        schedule: Schedule,
        works: Mapping[InstructionClass, Work],
        model: GpuModel | None = None,
        config: EmulatedConfig | None = None,
        overhead: Overhead | None = None,
    ) -> None:
        config = config or EmulatedConfig()
        model = model or load_gpu_model(config.gpu_model)
        self.schedule = schedule
        self.overhead = overhead or Overhead()
        self.now_s = 0.0
        self.true_cost: TrueCost | None = None
        self.devices = tuple(
            EmulatedDevice(model, works, stage, config, VirtualTime())
            for stage in range(schedule.stages)
        )
        self._order = topological_order(schedule)
        stages = (*schedule.stage_of, None)
        self._next_on_stage = [a == b for a, b in pairwise(stages)]
        self._before: list[list[tuple[int, float]]] = [[] for _ in schedule.instructions]
        for edge in schedule.edges:
            lag_s = self.overhead.p2p_s if edge.crosses_stages else 0.0
            self._before[edge.after].append((edge.before, lag_s))

    def run(self, settings: Settings) -> IterationRecord:
        """Execute one iteration.

        A clock is requested when the instruction before it on the stage ends, as the runtime does;
        energy is the difference of the counter at start and end, so it has the error of its ticks.
        """
        flat = [setting for row in settings for setting in row]
        start_s = self.now_s
        accounts = [device.account for device in self.devices]
        before = [device.sample() for device in self.devices]
        self._request_first(settings)
        end_s = [0.0] * len(flat)
        duration_s = [0.0] * len(flat)
        for node in self._order:
            device = self.devices[self.schedule.stage_of[node]]
            device.wait_until(
                max((end_s[b] + lag_s for b, lag_s in self._before[node]), default=start_s)
            )
            begun_s = device.now()
            device.begin_instruction(self.schedule.class_of(self.schedule.instructions[node]))
            device.end_instruction()
            end_s[node] = device.now()
            duration_s[node] = end_s[node] - begun_s
            if self._next_on_stage[node]:
                _request(device, flat[node + 1])
        self.now_s = max(end_s) + self.overhead.iteration_s
        for device in self.devices:
            device.wait_until(self.now_s)
        self.true_cost = _cost(accounts, [device.account for device in self.devices])
        return self._record(start_s, duration_s, before)

    def run_plan(self, settings: Settings, iterations: int, name: str = "") -> PlanRun:
        """Execute several iterations under one frequency plan."""
        return PlanRun(settings, tuple(self.run(settings) for _ in range(iterations)), name)

    def runs(self, plans: Sequence[PlanRun]) -> Runs:
        """The frequency plans that were executed here, for the learner."""
        device = self.devices[0]
        return Runs(
            schedule=self.schedule,
            runs=tuple(plans),
            clocks_mhz=device.supported_clocks_mhz(),
            source=Source.EMULATED,
            facts={"gpu": device.identity.name},
        )

    def _request_first(self, settings: Settings) -> None:
        for device, row in zip(self.devices, settings, strict=True):
            if row:
                _request(device, row[0])

    def _record(
        self, start_s: float, duration_s: Sequence[float], before: Sequence[Sample]
    ) -> IterationRecord:
        rows, position = [], 0
        for order in self.schedule.order:
            rows.append(tuple(duration_s[position : position + len(order)]))
            position += len(order)
        time_s = self.now_s - start_s
        after = [device.sample() for device in self.devices]
        energy = [_energy_j(b) - _energy_j(a) for a, b in zip(before, after, strict=True)]
        # Each end of the window falls anywhere between two ticks.
        tick_sd = [device.model.counter_tick_s / 6**0.5 for device in self.devices]
        return IterationRecord(
            iter_time_s=time_s,
            duration_s=tuple(rows),
            energy_j=tuple(energy),
            energy_sd_j=tuple(e / time_s * sd for e, sd in zip(energy, tick_sd, strict=True)),
            temperature_c=tuple(sample.temperature_c for sample in after),
        )


def run_iteration(
    schedule: Schedule,
    settings: Settings,
    works: Mapping[InstructionClass, Work],
    model: GpuModel | None = None,
    config: EmulatedConfig | None = None,
    overhead: Overhead | None = None,
) -> IterationRecord:
    """Execute one iteration on new, not yet warm devices; see `VirtualPipeline`."""
    return VirtualPipeline(schedule, works, model, config, overhead).run(settings)


def _request(device: EmulatedDevice, setting: Setting) -> None:
    if setting.clock_mhz is None:
        device.unlock_clock()
    else:
        device.lock_clock(setting.clock_mhz)


def _energy_j(sample: Sample) -> float:
    assert sample.energy_j is not None, "an emulated counter can always be read"
    return sample.energy_j


def _cost(before: Sequence[Account], after: Sequence[Account]) -> TrueCost:
    pairs = list(zip(before, after, strict=True))
    return TrueCost(
        tuple(b.energy_j - a.energy_j for a, b in pairs),
        tuple(b.busy_j - a.busy_j for a, b in pairs),
        tuple(b.busy_s - a.busy_s for a, b in pairs),
    )
