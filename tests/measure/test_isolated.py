from __future__ import annotations

import pytest

from kareus_pp.config import EmulatedConfig
from kareus_pp.device.base import DEFAULT_CLOCK, Sample
from kareus_pp.device.emulated import EmulatedDevice
from kareus_pp.device.timesource import VirtualTime
from kareus_pp.measure import WindowConfig, WindowProfiler
from kareus_pp.schedule import InstructionClass
from kareus_pp.simulate.gpu_model import Work, load_gpu_model

CLS = InstructionClass.parse("0F")
MODEL = load_gpu_model("a100")
WORK = Work(0.01 * MODEL.rates.flops_per_s_per_mhz * 1300, 0.002 * MODEL.rates.bytes_per_s)


class Emulated(VirtualTime):
    """An emulated GPU in virtual time; the profiler's clock and sampler, too."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []
        self.due_s = 0.02
        self.device = EmulatedDevice(MODEL, {CLS: WORK}, 0, EmulatedConfig(), self)

    def sleep_until(self, at_s: float) -> None:
        """Stop at every reading on the way."""
        super().sleep_until(min(at_s, self.due_s))
        if self.now() >= self.due_s - 1e-9:
            self.samples.append(self.device.sample())
            self.due_s += 0.02

    def start(self) -> None:
        self.samples = []

    def stop(self) -> list[Sample]:
        return self.samples

    def sleep(self, span_s: float) -> None:
        end_s = self.now() + span_s
        while self.now() < end_s:
            self.sleep_until(end_s)

    def work(self) -> None:
        self.device.begin_instruction(CLS)
        self.device.end_instruction()

    def wait(self) -> None:
        self.sleep(0.01)


def test_windows_match_the_model_and_the_clock_comes_back() -> None:
    gpu = Emulated()
    profiler = WindowProfiler(gpu.device, WindowConfig(measure_s=3.0, cool_s=1.0), gpu, gpu)
    found = profiler.measure({mhz: (mhz, gpu.work) for mhz in (1050, 1200, DEFAULT_CLOCK)})
    for mhz, measured in found.items():
        clock = mhz or MODEL.top_mhz
        assert measured.trials == 3, measured.rejected
        assert measured.time_s == pytest.approx(MODEL.time_s(WORK, clock), rel=0.01)
        assert measured.energy_j == pytest.approx(MODEL.energy_j(WORK, clock), rel=0.02)
        assert measured.energy_sd_j is not None
    assert gpu.device.sample().requested_mhz == DEFAULT_CLOCK


def test_blocking_power_by_clock() -> None:
    gpu = Emulated()
    profiler = WindowProfiler(gpu.device, WindowConfig(measure_s=3.0, cool_s=0.5), gpu, gpu)
    found = profiler.blocking_power((1050, 1410), gpu.wait)
    for mhz, measured in found.items():
        assert measured.energy_j == pytest.approx(MODEL.waiting_power_w(mhz), rel=0.1)
    assert (found[1050].energy_j or 0) < (found[1410].energy_j or 0)


def test_a_clock_that_is_not_held_is_rejected_and_an_error_unlocks() -> None:
    gpu = Emulated()
    profiler = WindowProfiler(gpu.device, WindowConfig(measure_s=1.0, cool_s=0.1), gpu, gpu)
    found = profiler.measure({"capped": (1395, gpu.work)})
    assert found["capped"].energy_j is None
    assert found["capped"].trials == 0
    assert "throttled" in found["capped"].rejected[0]

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        profiler.measure({"broken": (1050, fail)})
    assert gpu.device.sample().requested_mhz == DEFAULT_CLOCK


def test_cooling_to_a_temperature_is_shorter_than_the_whole_pause() -> None:
    gpu = Emulated()
    config = WindowConfig(measure_s=1.0, cool_s=100.0, cool_to_c=59.0, trials=1)
    WindowProfiler(gpu.device, config, gpu, gpu).measure({1050: (1050, gpu.work)})
    assert gpu.now() < 50
