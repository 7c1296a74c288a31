"""An emulated GPU: executes instructions in the time, and at the power, that a GPU model says.

The real execution happens on the CPU meanwhile. All that it yields is labelled
`Source.EMULATED`. docs/emulation.md says what it shows and what it cannot.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kareus_pp.config import EmulatedConfig
from kareus_pp.device.base import DEFAULT_CLOCK, POWER_CAP, DeviceIdentity, Sample
from kareus_pp.device.timesource import TimeSource, WallTime
from kareus_pp.errors import DeviceError
from kareus_pp.profile import Source
from kareus_pp.schedule import InstructionClass
from kareus_pp.simulate.gpu_model import GpuModel, Work, load_gpu_model


class _Switch(NamedTuple):
    at_s: float
    mhz: int


@dataclass
class _Running:
    """The instruction in execution; `done` is the finished fraction of its work."""

    work: Work
    factor: float
    done: float = 0.0


@dataclass(frozen=True)
class Account:
    """What an emulated device has spent since it was opened; sums exactly to the counter.

    Attributes:
        busy_s: Time in which it executed instructions.
        busy_j: Energy of that time.
        waiting_s: All other time.
        waiting_j: Energy of that time.
    """

    busy_s: float = 0.0
    busy_j: float = 0.0
    waiting_s: float = 0.0
    waiting_j: float = 0.0

    @property
    def energy_j(self) -> float:
        """All energy."""
        return self.busy_j + self.waiting_j


class EmulatedDevice:
    """One emulated GPU; implements `Device` and `Pacer`.

    Calls may come from several threads; the work of one instruction is begun and ended by one.

    Args:
        model: The GPU model.
        works: Work of the instruction classes of this stage, as counted from its modules. A class
            that is not there is looked up without shape and without communication; one that is not
            there either (data load, optimizer step) takes its real time and counts as waiting.
        stage: The pipeline stage, which has its own hidden factors and noise.
        config: Work scale, hidden factors, noise and seed.
        time_source: Where time comes from; the wall clock by default.

    Attributes:
        instructions: Instructions paced so far.
        overruns: Those of them whose real execution took longer than the paced time.
        unpaced: Instructions of classes without work.
    """

    def __init__(
        self,
        model: GpuModel,
        works: Mapping[InstructionClass, Work],
        stage: int = 0,
        config: EmulatedConfig | None = None,
        time_source: TimeSource | None = None,
    ) -> None:
        config = config or EmulatedConfig()
        self.model = model
        self.instructions = 0
        self.overruns = 0
        self.unpaced = 0
        self._works = {cls: work.scaled(config.work_scale) for cls, work in works.items()}
        self._time_factor = _factor(config.time_factors, stage, "time_factors")
        self._power_factor = _factor(config.power_factors, stage, "power_factors")
        self._noise = config.noise
        self._random = np.random.default_rng([config.seed & 0xFFFFFFFF, stage])
        self._time = time_source or WallTime()
        self._identity = DeviceIdentity(f"GPU-emulated-{stage}", f"{model.name} (emulated)")
        self._lock = threading.RLock()
        self._closed = False
        self._running: _Running | None = None
        self._clock_mhz = model.top_mhz
        self._requested_mhz = DEFAULT_CLOCK
        self._switches: deque[_Switch] = deque()
        self._temperature_c = model.thermal.reference_c
        self._spent = Account()
        self._at_s = self._time.now()
        # The counter ticks at a phase of its own, as on real boards.
        phase_s = float(self._random.uniform(0.0, 1.0)) * model.counter_tick_s
        self._tick_s = self._at_s - phase_s
        self._visible_j = 0.0

    @classmethod
    def from_config(
        cls, config: EmulatedConfig, works: Mapping[InstructionClass, Work], stage: int
    ) -> EmulatedDevice:
        """Open the emulated device of a stage in wall-clock time.

        Raises:
            ConfigError: The GPU model is unknown or malformed.
            DeviceError: The hidden factors do not cover the stage.
        """
        return cls(load_gpu_model(config.gpu_model), works, stage, config)

    @property
    def identity(self) -> DeviceIdentity:
        """A made-up UUID, and the model's name with the word emulated."""
        return self._identity

    @property
    def source(self) -> Source:
        """Always `Source.EMULATED`."""
        return Source.EMULATED

    @property
    def scope(self) -> str:
        """Always `gpu`."""
        return "gpu"

    @property
    def account(self) -> Account:
        """Exact time and energy up to now; a real GPU has no such reading."""
        with self._lock:
            self._advance(self._time.now())
            return self._spent

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The clocks of the model, ascending."""
        return self.model.clocks_mhz

    def lock_clock(self, mhz: int) -> None:
        """Request a clock; it is there after the model's switch latency.

        Raises:
            DeviceError: The clock is not supported, or the device was closed.
        """
        if mhz not in self.model.clocks_mhz:
            lowest, highest = self.model.clocks_mhz[0], self.model.clocks_mhz[-1]
            raise DeviceError(
                f"{self._identity.name} does not support an SM clock of {mhz} MHz",
                f"use one of its {len(self.model.clocks_mhz)} clocks from {lowest} to {highest}",
            )
        self._switch(mhz, mhz)

    def unlock_clock(self) -> None:
        """Request default clocks; raises `DeviceError` where the device was closed."""
        self._switch(DEFAULT_CLOCK, self.model.top_mhz)

    def _switch(self, requested: int, mhz: int) -> None:
        with self._lock:
            self._check_open()
            now = self._time.now()
            self._advance(now)
            self._requested_mhz = requested
            self._switches.append(_Switch(now + self.model.switch_latency_s, mhz))

    def sample(self) -> Sample:
        """Read the device now; the energy counter as of its last tick."""
        with self._lock:
            self._check_open()
            now = self._time.now()
            self._advance(now)
            busy = self._running is not None and self._running.done < 1.0
            throttled = busy and self.model.is_throttled(self._clock_mhz)
            held = self.model.effective_mhz(self._clock_mhz) if busy else self._clock_mhz
            return Sample(
                at_s=now,
                energy_j=self._visible_j,
                power_w=self._power_w(busy),
                clock_mhz=round(held),
                temperature_c=self._temperature_c,
                throttled=(POWER_CAP,) if throttled else (),
                requested_mhz=self._requested_mhz,
            )

    def close(self) -> None:
        """End the emulation; safe to call twice."""
        with self._lock:
            if not self._closed:
                self._advance(self._time.now())
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(f"{self._identity.name} was closed", "open the device again")

    def begin_instruction(self, cls: InstructionClass, time_factor: float = 1.0) -> None:
        """Start an instruction now; an unfinished one before it is dropped."""
        with self._lock:
            self._advance(self._time.now())
            work = self._work_of(cls)
            if work is None:
                self.unpaced += 1
                self._running = None
                return
            noise = math.exp(self._noise * float(self._random.standard_normal()))
            self._running = _Running(work, self._time_factor * time_factor * noise)

    def end_instruction(self) -> None:
        """Return when the paced time of the instruction is over; at once where none runs.

        The clock may change meanwhile; the rest of the work then takes the time of the new clock.
        """
        with self._lock:
            running = self._running
            if running is None:
                return
            self._advance(self._time.now())
            self.instructions += 1
            self.overruns += running.done >= 1.0
        while True:
            with self._lock:
                self._advance(self._time.now())
                if self._running is not running:
                    return
                if running.done >= 1.0:
                    self._running = None
                    return
                goal_s = self._next_event_s(running)
            self._time.sleep_until(goal_s)

    def now(self) -> float:
        """Seconds of its time source."""
        return self._time.now()

    def wait_until(self, at_s: float) -> None:
        """Wait, executing nothing, until `at_s` of the time source."""
        while self._time.now() < at_s:
            self._time.sleep_until(at_s)

    def _work_of(self, cls: InstructionClass) -> Work | None:
        for key in (
            cls,
            cls._replace(communicates=False),
            cls._replace(shape=""),
            cls._replace(communicates=False, shape=""),
        ):
            if key in self._works:
                return self._works[key]
        return None

    def _next_event_s(self, running: _Running) -> float:
        finish_s = self._at_s + self._left_s(running)
        return min(finish_s, self._switches[0].at_s) if self._switches else finish_s

    def _left_s(self, running: _Running) -> float:
        whole_s = running.factor * self.model.time_s(running.work, self._clock_mhz)
        return (1.0 - running.done) * whole_s

    def _advance(self, now_s: float) -> None:
        """Integrate progress, energy and temperature from the last call up to `now_s`."""
        while self._switches and self._switches[0].at_s <= now_s:
            switch = self._switches.popleft()
            self._advance_at_clock(switch.at_s)
            self._clock_mhz = switch.mhz
        self._advance_at_clock(now_s)

    def _advance_at_clock(self, until_s: float) -> None:
        running = self._running
        if running is not None and running.done < 1.0 and until_s > self._at_s:
            left_s = self._left_s(running)
            span_s = min(until_s - self._at_s, left_s)
            self._spend(self._at_s + span_s, busy=True)
            # A rounding error below a nanosecond must not leave an instruction unfinished.
            if left_s - span_s < 1e-9:
                running.done = 1.0
            else:
                running.done += (1.0 - running.done) * span_s / left_s
        self._spend(until_s, busy=False)

    def _spend(self, until_s: float, busy: bool) -> None:
        """Draw power up to `until_s`, showing the counter at the last tick on the way."""
        tick_s = self.model.counter_tick_s
        ticks = math.floor((until_s - self._tick_s) / tick_s) if tick_s else 0
        if ticks > 0:
            self._tick_s += ticks * tick_s
            self._draw(self._tick_s, busy)
            self._visible_j = self._spent.energy_j
        self._draw(until_s, busy)
        if not tick_s:
            self._visible_j = self._spent.energy_j

    def _draw(self, until_s: float, busy: bool) -> None:
        """Solve `T' = (ambient + R p(T) - T) / tau` with `p(T) = base + leakage (T - reference)`.

        The power is linear in the temperature, so both have closed forms, and it does not matter
        into how many spans a time is divided.
        """
        span_s = until_s - self._at_s
        if span_s <= 0:
            return
        thermal = self.model.thermal
        factor = self._power_factor
        leakage = factor * thermal.leakage_w_per_c
        base_w = factor * self._base_power_w(busy)
        gain = 1.0 - thermal.resistance_c_per_w * leakage
        steady_c = (
            thermal.ambient_c
            + thermal.resistance_c_per_w * (base_w - leakage * thermal.reference_c)
        ) / gain
        rate = gain / thermal.time_constant_s
        off_c = self._temperature_c - steady_c
        decayed = -math.expm1(-rate * span_s)
        mean_over_c = steady_c - thermal.reference_c
        energy_j = base_w * span_s + leakage * (mean_over_c * span_s + off_c * decayed / rate)
        self._temperature_c = steady_c + off_c * (1.0 - decayed)
        self._at_s = until_s
        spent = self._spent
        self._spent = (
            Account(
                spent.busy_s + span_s, spent.busy_j + energy_j, spent.waiting_s, spent.waiting_j
            )
            if busy
            else Account(
                spent.busy_s, spent.busy_j, spent.waiting_s + span_s, spent.waiting_j + energy_j
            )
        )

    def _base_power_w(self, busy: bool) -> float:
        if busy and self._running is not None:
            return self.model.power_w(self._running.work, self._clock_mhz)
        return self.model.waiting_power_w(self._clock_mhz)

    def _power_w(self, busy: bool) -> float:
        over_c = self._temperature_c - self.model.thermal.reference_c
        leakage_w = self.model.thermal.leakage_w_per_c * over_c
        return self._power_factor * (self._base_power_w(busy) + leakage_w)


def _factor(factors: tuple[float, ...], stage: int, name: str) -> float:
    if not factors:
        return 1.0
    if stage >= len(factors):
        raise DeviceError(
            f"emulated.{name} has {len(factors)} values and there is a stage {stage}",
            "give one for every stage, or none",
        )
    return factors[stage]
