"""The in-process controller."""

from __future__ import annotations

import threading
import time

import pytest

from kareus_pp.device.base import DEFAULT_CLOCK, Applied, ClockController, Sample
from kareus_pp.device.dryrun import DryRunDevice
from kareus_pp.device.emulated import EmulatedDevice
from kareus_pp.device.inprocess import InProcessController
from kareus_pp.errors import DeviceError
from kareus_pp.simulate.gpu_model import load_gpu_model


class Recorder(DryRunDevice):
    """Remembers what it was asked for; a real emulated device is used where readings matter."""

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.refused = refused
        self.closed = 0

    def lock_clock(self, mhz: int) -> None:
        if mhz in self.refused:
            raise DeviceError(f"no clock of {mhz} MHz", "use another")
        self.calls.append(mhz)

    def unlock_clock(self) -> None:
        self.calls.append(DEFAULT_CLOCK)

    def close(self) -> None:
        self.closed += 1


def wait_for(condition: object, seconds: float = 20.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.002)


def test_requests_are_applied_and_repeats_cost_nothing() -> None:
    device = Recorder()
    controller: ClockController = InProcessController(device)
    assert controller.applied() == Applied(None, 0)
    for mhz in (1200, 1200, 900, 900, 1200, DEFAULT_CLOCK, DEFAULT_CLOCK):
        controller.request(mhz)
    assert device.calls == [1200, 900, 1200, DEFAULT_CLOCK]
    assert controller.applied() == Applied(DEFAULT_CLOCK, 4)
    controller.close()
    assert device.calls == [1200, 900, 1200, DEFAULT_CLOCK]


def test_default_clocks_first_are_no_switch() -> None:
    controller = InProcessController(Recorder())
    controller.request(DEFAULT_CLOCK)
    assert controller.applied() == Applied(DEFAULT_CLOCK, 0)
    controller.close()


def test_close_returns_to_default_clocks_once() -> None:
    device = Recorder()
    controller = InProcessController(device)
    controller.request(900)
    controller.close()
    controller.close()
    controller.request(1200)
    assert device.calls == [900, DEFAULT_CLOCK]
    assert device.closed == 1


def test_a_refused_clock_is_reported_and_can_be_asked_for_again() -> None:
    device = Recorder(refused=(1000,))
    controller = InProcessController(device)
    controller.request(1200)
    controller.request(1000)
    assert controller.applied() == Applied(1200, 1, "no clock of 1000 MHz; use another")
    device.refused = ()
    controller.request(1000)
    assert controller.applied() == Applied(1000, 2)
    controller.close()


def test_the_minimum_dwell_holds_a_clock_and_the_newest_request_wins() -> None:
    device = Recorder()
    controller = InProcessController(device, min_dwell_s=0.3)
    for mhz in (1200, 900, 1000, 1100):
        controller.request(mhz)
    assert controller.applied().mhz == 1200
    wait_for(lambda: controller.applied().mhz == 1100)
    assert device.calls == [1200, 1100]
    controller.close()
    assert device.calls == [1200, 1100, DEFAULT_CLOCK]


def test_a_dwelling_request_taken_back_is_never_applied() -> None:
    device = Recorder()
    controller = InProcessController(device, min_dwell_s=0.05)
    controller.request(1200)
    controller.request(900)
    controller.request(1200)
    time.sleep(0.15)
    assert device.calls == [1200]
    controller.close()


def test_a_refused_clock_does_not_make_the_dwell_thread_spin() -> None:
    device = Recorder(refused=(900,))
    controller = InProcessController(device, min_dwell_s=0.01)
    controller.request(1200)
    controller.request(900)
    wait_for(lambda: controller.applied().error)
    before_s = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before_s < 0.1
    controller.close()


def test_sampling_can_be_started_drained_stopped_and_started() -> None:
    device = EmulatedDevice(load_gpu_model("a100"), {})
    controller = InProcessController(device)
    samples: list[Sample] = []

    def some() -> bool:
        samples.extend(controller.drain())
        return len(samples) >= 3

    for _ in range(2):
        samples.clear()
        controller.start_sampling(0.005)
        controller.start_sampling(0.002)
        wait_for(some)
        controller.stop_sampling()
    assert [s.at_s for s in samples] == sorted(s.at_s for s in samples)
    assert all(s.energy_j is not None for s in samples)
    controller.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kareus-")]


def test_a_stopped_and_restarted_sampler_runs_once() -> None:
    controller = InProcessController(DryRunDevice())
    for _ in range(20):
        controller.start_sampling(10.0)
        controller.stop_sampling()
    controller.start_sampling(10.0)
    wait_for(lambda: sum(t.name == "kareus-sample" for t in threading.enumerate()) == 1)
    controller.close()


def test_dry_run_reads_nothing() -> None:
    device = DryRunDevice()
    device.lock_clock(1234)
    sample = device.sample()
    assert sample.requested_mhz == 1234
    assert (sample.energy_j, sample.power_w, sample.clock_mhz, sample.temperature_c) == (None,) * 4
    device.unlock_clock()
    assert device.sample().requested_mhz == DEFAULT_CLOCK
    assert device.supported_clocks_mhz() == ()


@pytest.mark.parametrize("mhz", [1000])
def test_an_emulated_device_refuses_in_one_sentence(mhz: int) -> None:
    controller = InProcessController(EmulatedDevice(load_gpu_model("a100"), {}))
    controller.request(mhz)
    assert "does not support an SM clock of 1000 MHz" in controller.applied().error
    controller.close()
