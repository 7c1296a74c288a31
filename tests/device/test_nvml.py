"""The NVML backend against the stub, through the real pynvml."""

from __future__ import annotations

import time

import pytest

from kareus_pp.device import errors
from kareus_pp.device.counter import CounterWatch
from kareus_pp.device.nvml import NvmlDevice, inventory, throttle_names
from kareus_pp.device.readback import CAPPED, HELD, IDLE, NOT_HELD, verdict
from kareus_pp.errors import DeviceError
from kareus_pp.profile import Source
from tests.stub import nvml as stub
from tests.stub.nvml import StubMachine


def test_identity_clocks_and_limits_are_read_from_the_device(machine: StubMachine) -> None:
    machine.set_name(1, "A GPU of next year")
    machine.set(1, clock_min=300, clock_max=3000, clock_step=100)
    device = NvmlDevice(machine.uuid(1))
    assert device.identity.name == "A GPU of next year"
    assert device.identity.uuid == machine.uuid(1)
    assert device.supported_clocks_mhz() == tuple(range(300, 3001, 100))
    assert device.power_limit_w() == 400.0
    assert (device.source, device.scope) == (Source.COUNTER, "gpu")
    device.close()
    device.close()


def test_lock_and_unlock_touch_the_locked_graphics_clock_only(machine: StubMachine) -> None:
    device = NvmlDevice(machine.uuid(0))
    device.lock_clock(900)
    assert machine.lock_mhz(0) == 900
    assert device.sample().clock_mhz == 900
    device.unlock_clock()
    assert machine.lock_mhz(0) == 0
    assert {event.operation for event in machine.events()} == {stub.LOCK, stub.RESET}
    device.close()


def test_an_unsupported_clock_is_refused_with_the_nearest(machine: StubMachine) -> None:
    device = NvmlDevice(machine.uuid(0))
    with pytest.raises(errors.ClockError, match=r"901 MHz is not .*nearest is 900 MHz"):
        device.lock_clock(901)
    assert machine.events() == []
    device.close()


def test_a_sample_tells_energy_power_clock_heat_and_throttling(machine: StubMachine) -> None:
    device = NvmlDevice(machine.uuid(0))
    before = device.sample()
    time.sleep(0.45)
    after = device.sample()
    assert before.energy_j is not None
    assert after.energy_j is not None
    assert after.power_w == pytest.approx(300.0)
    # The counter moves in ticks of 100 ms: never more than one of them away.
    drawn_j = after.energy_j - before.energy_j
    assert drawn_j == pytest.approx(300.0 * (after.at_s - before.at_s), abs=31.0)
    assert (after.throttled, after.temperature_c is not None) == ((), True)
    machine.set(0, limit_w=200)
    capped = device.sample()
    assert capped.throttled == ("power cap",)
    assert capped.clock_mhz is not None
    assert capped.clock_mhz < 1410
    device.close()


def test_no_counter_is_none_and_the_source_says_so(machine: StubMachine) -> None:
    machine.set(0, counter_mode=stub.COUNTER_ABSENT)
    device = NvmlDevice(machine.uuid(0))
    assert device.sample().energy_j is None
    assert device.source is Source.INSTANT_POWER
    machine.faults(f"nvmlDeviceGetFieldValues@0={stub.NOT_SUPPORTED},0,-1")
    device.close()
    device = NvmlDevice(machine.uuid(0))
    assert device.source is Source.AVERAGE_POWER
    assert device.sample().power_w == pytest.approx(300.0)
    device.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (stub.NO_PERMISSION, errors.NoPermissionError),
        (stub.NOT_SUPPORTED, errors.NotSupportedError),
        (stub.GPU_IS_LOST, errors.GpuLostError),
        (999, errors.NvmlError),
    ],
)
def test_every_nvml_error_has_cause_and_remedy(
    machine: StubMachine, code: int, expected: type[DeviceError]
) -> None:
    device = NvmlDevice(machine.uuid(1))
    machine.faults(f"{stub.LOCK}@1={code},0,-1")
    with pytest.raises(expected) as caught:
        device.lock_clock(900)
    assert machine.uuid(1) in caught.value.cause
    assert caught.value.remedy
    decoded = errors.decode(errors.encode(caught.value))
    assert (type(decoded), str(decoded)) == (expected, str(caught.value))
    device.close()


def test_mig_no_driver_and_unknown_uuid_are_errors_of_their_own(machine: StubMachine) -> None:
    with pytest.raises(errors.GpuNotFoundError, match="GPU-nowhere"):
        NvmlDevice("GPU-nowhere")
    machine.set(0, mig=1)
    with pytest.raises(errors.MigError, match="MIG"):
        NvmlDevice(machine.uuid(0))
    assert [len(gpu.mig_uuids) for gpu in inventory()] == [2, 0]
    machine.set(0, driver_loaded=0)
    with pytest.raises(errors.NoDriverError, match="driver"):
        inventory()


def test_counter_faults_are_told_and_a_glitch_is_dropped(machine: StubMachine) -> None:
    device = NvmlDevice(machine.uuid(0))
    watch = CounterWatch(device.label)
    assert watch.check(device.sample()).energy_j is not None
    machine.set(0, jump_mj=-50_000)
    assert watch.check(device.sample()).energy_j is None
    machine.set(0, jump_mj=50_000)
    assert watch.check(device.sample()).energy_j is not None
    for jump_mj, word in ((-50_000, "back"), (5e9, "ahead")):
        watch = CounterWatch(device.label)
        watch.check(device.sample())
        machine.set(0, jump_mj=jump_mj)
        assert watch.check(device.sample()).energy_j is None
        with pytest.raises(errors.CounterError, match=word):
            watch.check(device.sample())
    device.close()


def test_read_back_verdicts() -> None:
    assert verdict(900, 900, 0) == HELD
    assert verdict(900, 915, 0) == HELD
    assert verdict(900, None, 0) == HELD
    assert verdict(1410, 1200, 0x4) == CAPPED
    assert verdict(1410, 210, 0x1) == IDLE
    assert verdict(1410, 1200, 0) == NOT_HELD
    # Throttling only lowers a clock: a higher one is never explained by it.
    assert verdict(900, 1410, 0x4) == NOT_HELD
    assert throttle_names(0x4 | 0x20 | 0x1 | 0x2) == ("power cap", "thermal slowdown")
