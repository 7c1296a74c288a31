"""Measuring in isolation: thermally stable windows, and the power of a waiting GPU.

For partitions, for users who want every option measured, and for the blocking power. Windows are
seconds long, because energy counters and power readings are slow (see `samples`); trials come in
randomised order, and the GPU cools down between them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from kareus_pp.device.base import DEFAULT_CLOCK, Device, Sample
from kareus_pp.errors import DeviceError
from kareus_pp.measure.samples import WindowReading, read_window

_TICK_S = 0.3
"""Sampled this much longer at both ends, so that counter ticks lie beyond the window."""
T = TypeVar("T")


@dataclass(frozen=True)
class WindowConfig:
    """How one window is measured.

    Attributes:
        measure_s: Length of the window.
        warm_s: Work before it, not measured.
        cool_s: Longest pause before each trial.
        cool_to_c: The pause ends early at this temperature; None: always the whole pause.
        trials: Windows of each candidate.
        seed: Of the order.
    """

    measure_s: float = 5.0
    warm_s: float = 0.5
    cool_s: float = 5.0
    cool_to_c: float | None = None
    trials: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """Means over the trials that were not rejected; None where none was left.

    Attributes:
        time_s: Time of one repetition.
        time_sd_s: Standard deviation between trials; None with fewer than two.
        energy_j: Energy of one repetition.
        energy_sd_j: As for the time, no smaller than that of the readings themselves.
        temperature_c: Mean temperature.
        trials: Trials that count.
        rejected: Why the others do not.
    """

    time_s: float | None
    time_sd_s: float | None
    energy_j: float | None
    energy_sd_j: float | None
    temperature_c: float | None
    trials: int
    rejected: tuple[str, ...] = ()


class Clock:
    """Time and sleep, replaceable in tests and on emulated devices."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def sleep(self, span_s: float) -> None:
        """Let time pass."""
        time.sleep(span_s)


class Sampler(Protocol):
    """Reads a device every so often while work goes on."""

    def start(self) -> None:
        """Begin to read."""
        ...

    def stop(self) -> list[Sample]:
        """End, and return what was read."""
        ...


class ThreadSampler:
    """Reads the device in a thread; for a process that does not train."""

    def __init__(self, device: Device, period_s: float = 0.02) -> None:
        self._device = device
        self._period_s = period_s
        self._done = threading.Event()
        self._samples: list[Sample] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read."""
        self._samples = []
        self._done.clear()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def stop(self) -> list[Sample]:
        """End, and return what was read; empty before the first start."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        return self._samples

    def _read(self) -> None:
        with contextlib.suppress(DeviceError):
            while not self._done.wait(self._period_s):
                self._samples.append(self._device.sample())


class WindowProfiler:
    """Measures pieces of work on one GPU.

    Runs in a process of its own or before training, never on a training thread.

    Args:
        device: The GPU; its clock is locked for each candidate and unlocked at the end.
        config: Lengths, pauses, trials.
        clock: Time.
        sampler: Reads the device while it works; a thread by default.
    """

    def __init__(
        self,
        device: Device,
        config: WindowConfig | None = None,
        clock: Clock | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._device = device
        self._config = config or WindowConfig()
        self._clock = clock or Clock()
        self._sampler = sampler or ThreadSampler(device)

    def measure(self, candidates: Mapping[T, tuple[int, Callable[[], None]]]) -> dict[T, Measured]:
        """Measure every candidate in several trials, in random order.

        Args:
            candidates: For each name the clock in MHz (`DEFAULT_CLOCK` for none) and one
                repetition of its work, which returns when the GPU has done it.

        Raises:
            DeviceError: The device cannot be read or locked.
        """
        order = [name for name in candidates for _ in range(self._config.trials)]
        shuffled = np.random.default_rng(self._config.seed).permutation(len(order))
        found: dict[T, list[tuple[float, WindowReading, int]]] = {name: [] for name in candidates}
        try:
            for place in shuffled:
                name = order[int(place)]
                mhz, work = candidates[name]
                found[name].append(self._trial(mhz, work))
        finally:
            self._device.unlock_clock()
        return {name: _summary(trials) for name, trials in found.items()}

    def blocking_power(
        self, clocks_mhz: Sequence[int], wait: Callable[[], None]
    ) -> dict[int, Measured]:
        """Power in watts of a GPU that waits, for each clock, as energy of one second.

        Args:
            clocks_mhz: Clocks to wait at.
            wait: Lets the GPU wait as in training (in a receive that nothing answers, a CUDA
                context open) for a moment, then returns.
        """
        found = self.measure({mhz: (mhz, wait) for mhz in clocks_mhz})
        return {mhz: _per_second(measured) for mhz, measured in found.items()}

    def _trial(self, mhz: int, work: Callable[[], None]) -> tuple[float, WindowReading, int]:
        self._cool_down()
        if mhz == DEFAULT_CLOCK:
            self._device.unlock_clock()
        else:
            self._device.lock_clock(mhz)
        self._sampler.start()
        try:
            self._repeat(work, self._config.warm_s + _TICK_S)
            start_s = self._clock.now()
            count = self._repeat(work, self._config.measure_s)
            end_s = self._clock.now()
            self._repeat(work, _TICK_S)
        finally:
            samples = self._sampler.stop()
        clocks = self._device.supported_clocks_mhz()
        reading = read_window(samples, start_s, end_s, max(clocks, default=None))
        return (end_s - start_s) / count, reading, count

    def _repeat(self, work: Callable[[], None], span_s: float) -> int:
        until_s = self._clock.now() + span_s
        count = 0
        while self._clock.now() < until_s:
            work()
            count += 1
        return max(1, count)

    def _cool_down(self) -> None:
        until_s = self._clock.now() + self._config.cool_s
        goal = self._config.cool_to_c
        self._device.unlock_clock()
        while (left_s := until_s - self._clock.now()) > 0:
            if goal is not None:
                temperature = self._device.sample().temperature_c
                if temperature is None:
                    raise DeviceError(
                        f"{self._device.identity.name} does not tell its temperature",
                        "cool down for a time instead of to a temperature",
                    )
                if temperature <= goal:
                    return
            self._clock.sleep(min(0.1, left_s))


def _summary(trials: Sequence[tuple[float, WindowReading, int]]) -> Measured:
    good = [(t, r, n) for t, r, n in trials if not r.rejected and r.energy_j is not None]
    rejected = tuple(reading.rejected for _, reading, _ in trials if reading.rejected)
    if not good:
        return Measured(None, None, None, None, None, 0, rejected)
    times = np.array([time_s for time_s, _, _ in good])
    energies = np.array([(r.energy_j or 0.0) / n for _, r, n in good])
    reading_sd = float(np.sqrt(np.mean([((r.energy_sd_j or 0.0) / n) ** 2 for _, r, n in good])))
    heat = [r.temperature_c for _, r, _ in good if r.temperature_c is not None]
    several = len(good) > 1
    return Measured(
        time_s=float(times.mean()),
        time_sd_s=float(times.std(ddof=1)) if several else None,
        energy_j=float(energies.mean()),
        energy_sd_j=max(float(energies.std(ddof=1)), reading_sd) if several else reading_sd,
        temperature_c=float(np.mean(heat)) if heat else None,
        trials=len(good),
        rejected=rejected,
    )


def _per_second(measured: Measured) -> Measured:
    if measured.time_s is None or measured.energy_j is None:
        return measured
    return Measured(
        time_s=1.0,
        time_sd_s=None,
        energy_j=measured.energy_j / measured.time_s,
        energy_sd_j=None
        if measured.energy_sd_j is None
        else measured.energy_sd_j / measured.time_s,
        temperature_c=measured.temperature_c,
        trials=measured.trials,
        rejected=measured.rejected,
    )
