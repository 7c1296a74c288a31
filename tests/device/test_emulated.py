"""The emulated device: exact in virtual time, alive in wall-clock time."""

from __future__ import annotations

import math
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kareus_pp.config import EmulatedConfig
from kareus_pp.device.base import DEFAULT_CLOCK, Device, Pacer
from kareus_pp.device.emulated import EmulatedDevice
from kareus_pp.device.timesource import VirtualTime, WallTime
from kareus_pp.errors import DeviceError
from kareus_pp.profile import Source
from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.simulate.gpu_model import Work, load_gpu_model

MODEL = load_gpu_model("a100")
FORWARD = InstructionClass(0, Kind.FORWARD)
BACKWARD = InstructionClass(0, Kind.BACKWARD)
WORK = Work(3e12, 4e9)
WORKS = {FORWARD: WORK, BACKWARD: 2 * WORK}
LATENCY_S = MODEL.switch_latency_s


def emulated(config: EmulatedConfig | None = None) -> EmulatedDevice:
    return EmulatedDevice(MODEL, WORKS, 0, config, VirtualTime())


def execute(device: EmulatedDevice, cls: InstructionClass = FORWARD) -> float:
    start_s = device.now()
    device.begin_instruction(cls)
    device.end_instruction()
    return device.now() - start_s


def settle(device: EmulatedDevice, mhz: int) -> None:
    device.lock_clock(mhz)
    device.wait_until(device.now() + LATENCY_S)


def test_it_is_a_device_and_a_pacer() -> None:
    device: Device = emulated()
    pacer: Pacer = emulated()
    assert pacer is not None
    assert device.source is Source.EMULATED
    assert device.scope == "gpu"
    assert "emulated" in device.identity.name
    assert "emulated" in device.identity.uuid


@pytest.mark.parametrize("mhz", [855, 1110, 1410])
def test_an_instruction_takes_the_time_of_the_model(mhz: int) -> None:
    device = emulated()
    settle(device, mhz)
    assert execute(device) == pytest.approx(MODEL.time_s(WORK, mhz), rel=1e-9)
    assert execute(device, BACKWARD) == pytest.approx(MODEL.time_s(2 * WORK, mhz), rel=1e-9)


def test_real_execution_counts_towards_the_paced_time() -> None:
    device = emulated()
    paced_s = MODEL.time_s(WORK, MODEL.top_mhz)
    start_s = device.now()
    device.begin_instruction(FORWARD)
    device.wait_until(start_s + 0.4 * paced_s)
    device.end_instruction()
    assert device.now() - start_s == pytest.approx(paced_s, rel=1e-9)
    assert (device.instructions, device.overruns) == (1, 0)


def test_an_overrun_is_counted_and_the_rest_is_waiting() -> None:
    device = emulated()
    paced_s = MODEL.time_s(WORK, MODEL.top_mhz)
    device.begin_instruction(FORWARD)
    device.wait_until(device.now() + 1.5 * paced_s)
    device.end_instruction()
    assert (device.instructions, device.overruns) == (1, 1)
    assert device.account.busy_s == pytest.approx(paced_s, rel=1e-9)
    assert device.account.waiting_s == pytest.approx(0.5 * paced_s, rel=1e-9)


def test_a_clock_change_in_mid_instruction_takes_effect_after_its_latency() -> None:
    device = emulated()
    fast_s, slow_s = MODEL.time_s(WORK, 1410), MODEL.time_s(WORK, 855)
    device.begin_instruction(FORWARD)
    device.wait_until(device.now() + 0.25 * fast_s)
    device.lock_clock(855)
    device.end_instruction()
    at_fast = 0.25 + LATENCY_S / fast_s
    expected_s = at_fast * fast_s + (1 - at_fast) * slow_s
    assert device.now() == pytest.approx(expected_s, rel=1e-9)


def test_requests_within_the_latency_take_effect_in_order() -> None:
    device = emulated()
    device.lock_clock(855)
    device.lock_clock(1200)
    assert device.sample().clock_mhz == 1410
    assert device.sample().requested_mhz == 1200
    device.wait_until(device.now() + LATENCY_S)
    assert device.sample().clock_mhz == 1200
    device.unlock_clock()
    device.wait_until(device.now() + LATENCY_S)
    assert device.sample().clock_mhz == 1410
    assert device.sample().requested_mhz == DEFAULT_CLOCK


def test_throttling_shows_while_computing_only() -> None:
    device = emulated()
    assert device.sample().throttled == ()
    assert device.sample().clock_mhz == 1410
    device.begin_instruction(FORWARD)
    busy = device.sample()
    assert busy.throttled == ("power cap",)
    assert busy.clock_mhz == round(MODEL.effective_mhz(1410))
    assert busy.power_w == pytest.approx(MODEL.power_w(WORK, 1410))
    device.end_instruction()
    settle(device, 855)
    device.begin_instruction(FORWARD)
    assert device.sample().throttled == ()
    assert device.sample().clock_mhz == 855


def test_waiting_draws_the_power_of_the_held_clock() -> None:
    model = MODEL.model_copy(
        update={"thermal": MODEL.thermal.model_copy(update={"leakage_w_per_c": 0.0})}
    )
    device = EmulatedDevice(model, WORKS, 0, None, VirtualTime())
    settle(device, 855)
    before = device.account
    device.wait_until(device.now() + 2.0)
    spent_j = device.account.waiting_j - before.waiting_j
    assert spent_j == pytest.approx(2.0 * model.waiting_power_w(855))


def test_the_counter_moves_in_ticks_and_never_ahead() -> None:
    device = emulated()
    readings = []
    for step in range(1, 1001):
        device.wait_until(step * 0.001)
        readings.append(device.sample().energy_j)
    jumps = [
        i
        for i, (a, b) in enumerate(pairwise(readings), 1)
        if b > a  # type: ignore[operator]
    ]
    assert len(jumps) in (9, 10)
    assert all(abs(b - a - 100) <= 1 for a, b in pairwise(jumps))
    last = readings[-1]
    assert last is not None
    assert last <= device.account.energy_j


def test_ticks_of_stages_have_phases_of_their_own() -> None:
    readings = set()
    for stage in range(4):
        device = EmulatedDevice(MODEL, {}, stage, None, VirtualTime())
        device.wait_until(0.25)
        readings.add(device.sample().energy_j)
    assert len(readings) == 4


def test_temperature_approaches_its_steady_state() -> None:
    device = emulated()
    thermal = MODEL.thermal
    device.wait_until(30 * thermal.time_constant_s)
    sample = device.sample()
    assert sample.temperature_c is not None
    assert sample.power_w is not None
    steady_c = thermal.ambient_c + thermal.resistance_c_per_w * sample.power_w
    assert sample.temperature_c == pytest.approx(steady_c, abs=1e-6)
    assert sample.power_w < MODEL.waiting_power_w(MODEL.top_mhz), "a cool GPU leaks less"


def test_energy_follows_the_temperature_as_small_steps_say() -> None:
    """The closed form against Euler steps, where leakage is strong and the GPU warms up fast."""
    thermal = MODEL.thermal.model_copy(update={"leakage_w_per_c": 3.0, "time_constant_s": 0.5})
    model = MODEL.model_copy(update={"thermal": thermal})
    device = EmulatedDevice(model, {FORWARD: 100 * WORK}, 0, None, VirtualTime())
    seconds = execute(device)
    temperature_c, energy_j, steps = thermal.reference_c, 0.0, 20_000
    for _ in range(steps):
        leakage_w = thermal.leakage_w_per_c * (temperature_c - thermal.reference_c)
        power_w = model.power_w(100 * WORK, 1410) + leakage_w
        energy_j += power_w * seconds / steps
        towards_c = thermal.ambient_c + thermal.resistance_c_per_w * power_w
        temperature_c += (towards_c - temperature_c) / thermal.time_constant_s * seconds / steps
    assert device.account.busy_j == pytest.approx(energy_j, rel=1e-4)
    assert device.sample().temperature_c == pytest.approx(temperature_c, rel=1e-4)


def test_instructions_of_unknown_classes_are_not_paced() -> None:
    device = emulated()
    assert execute(device, InstructionClass(0, Kind.OPTIMIZER)) == 0.0
    assert (device.instructions, device.unpaced) == (0, 1)
    device.end_instruction()
    assert device.instructions == 0


@pytest.mark.parametrize(
    "cls",
    [
        FORWARD._replace(communicates=True),
        FORWARD._replace(shape="4x128"),
        FORWARD._replace(communicates=True, shape="4x128"),
    ],
)
def test_shape_and_communication_fall_back_to_the_plain_class(cls: InstructionClass) -> None:
    assert execute(emulated(), cls) == execute(emulated())


def test_a_user_exception_between_begin_and_end_leaves_a_usable_device() -> None:
    device = emulated()
    device.begin_instruction(FORWARD)
    assert execute(device, BACKWARD) == pytest.approx(MODEL.time_s(2 * WORK, 1410))


def test_unsupported_clocks_and_closed_devices_are_errors() -> None:
    device = emulated()
    with pytest.raises(DeviceError, match="does not support an SM clock of 1000 MHz; use one of"):
        device.lock_clock(1000)
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="was closed"):
        device.sample()
    with pytest.raises(DeviceError, match="was closed"):
        device.unlock_clock()


def test_factors_must_cover_every_stage() -> None:
    config = EmulatedConfig(time_factors=(1.0, 1.1))
    with pytest.raises(DeviceError, match=r"emulated\.time_factors has 2 values"):
        EmulatedDevice(MODEL, WORKS, 2, config, VirtualTime())


def test_work_scale_scales_the_time_of_compute_bound_work() -> None:
    works = {FORWARD: Work(1e9, 0.0)}
    device = EmulatedDevice(MODEL, works, 0, EmulatedConfig(work_scale=1000), VirtualTime())
    assert execute(device) == pytest.approx(MODEL.time_s(Work(1e12, 0.0), 1410))


def test_noise_scatters_times_around_the_true_one() -> None:
    device = emulated(EmulatedConfig(noise=0.02, seed=3))
    times = [execute(device) for _ in range(400)]
    mean = sum(times) / len(times)
    sd = math.sqrt(sum((t - mean) ** 2 for t in times) / len(times))
    assert mean == pytest.approx(MODEL.time_s(WORK, 1410), rel=0.005)
    assert sd / mean == pytest.approx(0.02, rel=0.2)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.sampled_from([FORWARD, BACKWARD])),
        st.tuples(st.just("lock"), st.sampled_from(MODEL.clocks_mhz)),
        st.tuples(st.just("wait"), st.floats(0, 0.3)),
        st.tuples(st.just("sample"), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(0, 5))
def test_time_and_energy_add_up_whatever_happens(actions: list, seed: int) -> None:
    device = emulated(EmulatedConfig(noise=0.05, seed=seed))
    last_j = 0.0
    for what, value in actions:
        if what == "run":
            execute(device, value)
        elif what == "lock":
            device.lock_clock(value)
        elif what == "wait":
            device.wait_until(device.now() + value)
        reading = device.sample()
        assert reading.energy_j is not None
        assert last_j <= reading.energy_j <= device.account.energy_j + 1e-9
        last_j = reading.energy_j
    account = device.account
    assert min(account.busy_s, account.busy_j, account.waiting_s, account.waiting_j) >= 0
    assert account.busy_s + account.waiting_s == pytest.approx(device.now(), abs=1e-9)
    assert account.energy_j == account.busy_j + account.waiting_j
    most_w = 1.1 * (MODEL.power.static_w + MODEL.power.compute_w)
    assert account.energy_j <= most_w * device.now() + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-4, 0.05), max_size=20))
def test_looking_does_not_change_what_is_seen(pauses: list[float]) -> None:
    """The same span in one piece, and cut by readings."""
    whole, cut = emulated(), emulated()
    for pause_s in pauses:
        cut.wait_until(cut.now() + pause_s)
        cut.sample()
    whole.wait_until(cut.now())
    execute(whole)
    execute(cut)
    assert whole.account.energy_j == pytest.approx(cut.account.energy_j, rel=1e-9)
    assert whole.sample().temperature_c == pytest.approx(cut.sample().temperature_c, rel=1e-9)
    assert whole.sample().energy_j == pytest.approx(cut.sample().energy_j, rel=1e-9)


def test_wall_clock_pacing_follows_a_clock_change_from_another_thread() -> None:
    """No timing is asserted but that an instruction is never over early."""
    work = Work(1e13, 0.0)
    device = EmulatedDevice(MODEL, {FORWARD: work}, 0, None, WallTime())
    fast_s, slow_s = MODEL.time_s(work, 1410), MODEL.time_s(work, 855)
    changer = threading.Timer(0.2 * fast_s, device.lock_clock, [855])
    start_s = device.now()
    changer.start()
    device.begin_instruction(FORWARD)
    device.end_instruction()
    elapsed_s = device.now() - start_s
    changer.join()
    assert elapsed_s > fast_s
    busy_s = device.account.busy_s
    assert fast_s < busy_s < slow_s
    assert busy_s <= elapsed_s
