"""The profile phase on an emulated 4-stage job: what it learns against the emulator's truth.

The devices are the emulated ones, in virtual time: 1 % noise on every duration, a counter that
moves every 100 ms, switch latency, temperature, hidden factors on the stages. The truth is the GPU
model itself. Run: `python -m benchmarks.learning_emulated [--json]`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kareus_pp.builders import build_1f1b
from kareus_pp.config import EmulatedConfig, ProfilingConfig
from kareus_pp.device.base import Sample
from kareus_pp.device.emulated import EmulatedDevice
from kareus_pp.device.timesource import VirtualTime
from kareus_pp.measure import (
    ExperimentDesign,
    IterationRecord,
    Learned,
    PlanRun,
    learn,
    read_window,
)
from kareus_pp.plan import Settings
from kareus_pp.profile import Overhead
from kareus_pp.schedule import InstructionClass, Kind, Schedule
from kareus_pp.simulate.gpu_model import GpuModel, Work, load_gpu_model
from kareus_pp.simulate.virtual import VirtualPipeline

STAGES, MICROBATCHES = 4, 16
TIME_FACTORS = (1.0, 1.04, 0.97, 1.10)
POWER_FACTORS = (1.0, 0.98, 1.03, 1.01)
FORWARD_S, BACKWARD_S, MEMORY_SHARE = 0.06, 0.12, 0.2


@dataclass(frozen=True)
class Outcome:
    """What one profile phase took and how far its options are from the truth (relative)."""

    plans: int
    iterations: int
    emulated_s: float
    sweep_iterations: int
    sweep_s: float
    solver_s: float
    time_worst: float
    energy_worst: float
    time_mean: float
    energy_mean: float
    inside_90: float


class SampledTime(VirtualTime):
    """Virtual time in which the device is read every 20 ms, as the helper process does."""

    PERIOD_S = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.device: EmulatedDevice | None = None
        self.samples: list[Sample] = []

    def sleep_until(self, at_s: float) -> None:
        """Move to `at_s` or to the next reading, whichever comes first."""
        due_s = len(self.samples) * self.PERIOD_S
        super().sleep_until(min(at_s, due_s))
        if self.now() >= due_s and self.device is not None:
            self.samples.append(self.device.sample())


class SampledJob:
    """A pipeline in virtual time whose energy is read as on a GPU: from samples of the counter."""

    def __init__(
        self,
        schedule: Schedule,
        work: dict[InstructionClass, Work],
        model: GpuModel,
        config: EmulatedConfig,
    ) -> None:
        overhead = Overhead(iteration_s=0.05, p2p_s=0.0005)
        self.pipeline = VirtualPipeline(schedule, work, model, config, overhead)
        self._times = [SampledTime() for _ in range(schedule.stages)]
        self.pipeline.devices = tuple(
            EmulatedDevice(model, work, stage, config, source)
            for stage, source in enumerate(self._times)
        )
        for source, device in zip(self._times, self.pipeline.devices, strict=True):
            source.device = device
        self._top_mhz = model.top_mhz

    def run_plan(self, settings: Settings, iterations: int, name: str) -> PlanRun:
        """Execute iterations, the next one meanwhile, and read their windows."""
        records, spans = [], []
        for _ in range(iterations):
            start_s = self.pipeline.now_s
            records.append(self.pipeline.run(settings))
            spans.append((start_s, self.pipeline.now_s))
        # As in training, time goes on: a window ends between two ticks.
        self.pipeline.now_s += 0.25
        for device in self.pipeline.devices:
            device.wait_until(self.pipeline.now_s)
        samples = [source.samples for source in self._times]
        found = tuple(
            self.read(samples, record, *span) for record, span in zip(records, spans, strict=True)
        )
        return PlanRun(settings, found, name)

    def read(
        self,
        samples: Sequence[Sequence[Sample]],
        record: IterationRecord,
        start_s: float,
        end_s: float,
    ) -> IterationRecord:
        """An iteration with the energies that the samples of every stage give."""
        readings = [read_window(s, start_s, end_s, self._top_mhz) for s in samples]
        return replace(
            record,
            energy_j=tuple(reading.energy_j for reading in readings),
            energy_sd_j=tuple(reading.energy_sd_j for reading in readings),
            temperature_c=tuple(reading.temperature_c for reading in readings),
            flags=tuple(reading.rejected for reading in readings),
        )


def works(schedule: Schedule, model: GpuModel) -> dict[InstructionClass, Work]:
    """Forwards and backwards of a fixed length at the highest clock."""
    result = {}
    for cls in schedule.classes:
        length_s = FORWARD_S if cls.kind is Kind.FORWARD else BACKWARD_S
        compute_s = (1 - MEMORY_SHARE) * length_s
        rate = model.rates.flops_per_s_per_mhz * model.effective_mhz(model.top_mhz)
        result[cls] = Work(compute_s * rate, MEMORY_SHARE * length_s * model.rates.bytes_per_s)
    return result


def job_config(gpu: str, seed: int) -> EmulatedConfig:
    """1 % noise and hidden factors on the stages."""
    return EmulatedConfig(
        gpu_model=gpu,
        noise=0.01,
        seed=seed,
        time_factors=TIME_FACTORS,
        power_factors=POWER_FACTORS,
    )


def usable_clocks(model: GpuModel) -> tuple[int, ...]:
    """As in the runtime: clocks that the power limit lets the GPU hold.

    The highest one stands for default clocks, so it is always among them.
    """
    return tuple(
        mhz for mhz in model.clocks_mhz if mhz == model.top_mhz or not model.is_throttled(mhz)
    )


def profile_phase(gpu: str, seed: int, budget: ProfilingConfig) -> Outcome:
    """Run the design on a new emulated job, learn, and compare with the truth."""
    model = load_gpu_model(gpu)
    schedule = build_1f1b(STAGES, MICROBATCHES)
    work = works(schedule, model)
    job = SampledJob(schedule, work, model, job_config(gpu, seed))
    clocks = usable_clocks(model)
    design = ExperimentDesign(schedule, clocks, budget)
    runs = replace(job.pipeline.runs(()), clocks_mhz=clocks)
    started = time.perf_counter()
    while (settings := design.next_plan(runs)) is not None:
        plan = job.run_plan(settings, budget.iterations_per_plan, str(len(runs.runs)))
        runs = runs.with_runs((*runs.runs, plan))
    learned = learn(runs)
    solver_s = time.perf_counter() - started
    times, energies, inside = errors(learned, model, work)
    visited = {s.clock_mhz or model.top_mhz for r in runs.runs for row in r.settings for s in row}
    useful = [mhz for mhz in clocks if mhz >= min(visited)]
    mean_s = float(np.mean([i.iter_time_s for run in runs.runs for i in run.iterations]))
    sweep = len(useful) * budget.iterations_per_plan
    return Outcome(
        plans=len(runs.runs),
        iterations=sum(len(run.iterations) for run in runs.runs),
        emulated_s=job.pipeline.now_s,
        sweep_iterations=sweep,
        sweep_s=sweep * mean_s,
        solver_s=solver_s,
        time_worst=max(times),
        energy_worst=max(energies),
        time_mean=float(np.mean(times)),
        energy_mean=float(np.mean(energies)),
        inside_90=inside,
    )


def errors(
    learned: Learned, model: GpuModel, work: dict[InstructionClass, Work]
) -> tuple[list[float], list[float], float]:
    """Relative errors of all options, and the share inside their 90 % intervals."""
    times, energies, inside = [], [], []
    for cls, options in learned.profile.options.items():
        for option in options:
            mhz = float(option.setting.clock_mhz or model.top_mhz)
            true_s = TIME_FACTORS[cls.stage] * model.time_s(work[cls], mhz)
            true_j = true_s * POWER_FACTORS[cls.stage] * model.power_w(work[cls], mhz)
            times.append(abs(option.time_s / true_s - 1))
            energies.append(abs(option.energy_j / true_j - 1))
            inside.append(abs(option.time_s - true_s) <= 1.645 * (option.time_sd_s or 0.0))
            inside.append(abs(option.energy_j - true_j) <= 1.645 * (option.energy_sd_j or 0.0))
    return times, energies, float(np.mean(inside))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    budget = ProfilingConfig(plans=12, iterations_per_plan=3)
    outcomes = {
        f"{gpu}, seed {seed}": profile_phase(gpu, seed, budget)
        for gpu in ("a100", "a40")
        for seed in range(arguments.seeds)
    }
    if arguments.json:
        print(json.dumps({name: vars(outcome) for name, outcome in outcomes.items()}, indent=1))
        return
    print("emulated 4-stage job, options of all classes at all useful clocks against the truth")
    for name, o in outcomes.items():
        print(
            f"{name}: {o.plans} plans, {o.iterations} iterations, {o.emulated_s:.0f} s of training "
            f"(every clock: {o.sweep_iterations} iterations, {o.sweep_s:.0f} s); solver "
            f"{o.solver_s:.1f} s; time off {o.time_mean:.2%}, worst {o.time_worst:.2%}; energy off "
            f"{o.energy_mean:.2%}, worst {o.energy_worst:.2%}; {o.inside_90:.0%} inside the "
            f"90 % interval"
        )


if __name__ == "__main__":
    main()
