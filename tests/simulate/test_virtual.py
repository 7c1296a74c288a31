"""Emulated iterations of a whole pipeline in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kareus_pp.builders import build_schedule
from kareus_pp.config import EmulatedConfig
from kareus_pp.evaluate import evaluate
from kareus_pp.plan import Settings, default_settings
from kareus_pp.profile import Option, Overhead, Profile, Source
from kareus_pp.schedule import InstructionClass, Kind, Schedule
from kareus_pp.setting import Setting
from kareus_pp.simulate.gpu_model import GpuModel, Work, load_gpu_model
from kareus_pp.simulate.virtual import VirtualPipeline, run_iteration

A100 = load_gpu_model("a100")
# No switch latency, no ticks and no leakage: what remains has a closed form.
PLAIN = A100.model_copy(
    update={
        "switch_latency_s": 0.0,
        "counter_tick_s": 0.0,
        "thermal": A100.thermal.model_copy(update={"leakage_w_per_c": 0.0}),
    }
)


def works_of(schedule: Schedule) -> dict[InstructionClass, Work]:
    works = {}
    for stage in range(schedule.stages):
        forward = Work(2e12 * (1 + 0.2 * stage), 2e9)
        works[InstructionClass(stage, Kind.FORWARD)] = forward
        works[InstructionClass(stage, Kind.BACKWARD)] = 2 * forward
    return works


def uniform(schedule: Schedule, mhz: int) -> Settings:
    return tuple(tuple(Setting(mhz) for _ in row) for row in schedule.order)


def true_profile(schedule: Schedule, model: GpuModel, overhead: Overhead, mhz: int) -> Profile:
    options = {
        cls: (Option(Setting(mhz), model.time_s(work, mhz), model.energy_j(work, mhz)),)
        for cls, work in works_of(schedule).items()
    }
    waiting = (model.waiting_power_w(mhz),) * schedule.stages
    return Profile(options, waiting, overhead)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("mhz", [855, 1110, 1410])
def test_one_clock_costs_what_the_longest_path_says(name: str, mhz: int) -> None:
    schedule = build_schedule(name, 4, 8)
    overhead = Overhead(iteration_s=0.01, p2p_s=0.001)
    pipeline = VirtualPipeline(schedule, works_of(schedule), PLAIN, overhead=overhead)
    record = pipeline.run(uniform(schedule, mhz))
    expected = evaluate(
        schedule, uniform(schedule, mhz), true_profile(schedule, PLAIN, overhead, mhz)
    )
    assert record.iter_time_s == pytest.approx(expected.time_s, rel=1e-9)
    assert sum(e for e in record.energy_j if e is not None) == pytest.approx(expected.energy_j)


def test_slack_filled_by_a_lower_clock_saves_energy_at_the_same_time() -> None:
    schedule = build_schedule("1f1b", 4, 8)
    works = works_of(schedule)
    base = run_iteration(schedule, default_settings(schedule), works, PLAIN)
    plan = (
        *uniform(schedule, 1200)[:1],
        *default_settings(schedule)[1:],
    )
    slower = run_iteration(schedule, plan, works, PLAIN)
    assert slower.iter_time_s < 1.06 * base.iter_time_s
    assert slower.energy_j[0] < 0.9 * base.energy_j[0]  # type: ignore[operator]


def test_switch_latency_keeps_the_old_clock_for_a_while() -> None:
    schedule = build_schedule("1f1b", 2, 4)
    late = PLAIN.model_copy(update={"switch_latency_s": 0.005})
    plan = tuple(
        tuple(Setting(855 if i.kind is Kind.FORWARD else 1410) for i in row)
        for row in schedule.order
    )
    works = works_of(schedule)
    sharp = run_iteration(schedule, plan, works, PLAIN).duration_s[1]
    held = VirtualPipeline(schedule, works, late)
    held.run(plan)
    dull = held.run(plan).duration_s[1]
    kinds = [i.kind for i in schedule.order[1]]
    # The first forward waits for its peer, and the switch hides in that wait.
    assert dull[0] == pytest.approx(sharp[0])
    for kind, held_s, sharp_s in list(zip(kinds, dull, sharp, strict=True))[1:-1]:
        assert (held_s < sharp_s) is (kind is Kind.FORWARD)


def test_ticks_err_by_what_the_record_says() -> None:
    schedule = build_schedule("1f1b", 4, 8)
    pipeline = VirtualPipeline(schedule, works_of(schedule), A100)
    deviations = []
    for _ in range(200):
        record = pipeline.run(default_settings(schedule))
        assert pipeline.true_cost is not None
        for read, true, sd in zip(
            record.energy_j, pipeline.true_cost.energy_j, record.energy_sd_j, strict=True
        ):
            assert read is not None
            assert sd is not None
            deviations.append((read - true) / sd)
    rms = (sum(d * d for d in deviations) / len(deviations)) ** 0.5
    assert 0.6 < rms < 1.5


def test_counter_errors_do_not_add_up_over_iterations() -> None:
    schedule = build_schedule("1f1b", 4, 8)
    pipeline = VirtualPipeline(schedule, works_of(schedule), A100)
    read = true = 0.0
    for _ in range(100):
        record = pipeline.run(default_settings(schedule))
        assert pipeline.true_cost is not None
        read += sum(e for e in record.energy_j if e is not None)
        true += sum(pipeline.true_cost.energy_j)
    most_power_w = 4 * 500.0
    assert abs(read - true) <= 0.1 * most_power_w


def test_hidden_factors_scale_time_and_power() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    works = works_of(schedule)
    config = EmulatedConfig(time_factors=(1.1, 1.1), power_factors=(0.9, 0.9))
    base = run_iteration(schedule, default_settings(schedule), works, PLAIN)
    hidden = run_iteration(schedule, default_settings(schedule), works, PLAIN, config)
    assert hidden.iter_time_s == pytest.approx(1.1 * base.iter_time_s)
    for a, b in zip(hidden.energy_j, base.energy_j, strict=True):
        assert a == pytest.approx(0.99 * b)  # type: ignore[operator]


def test_noise_depends_on_the_seed_alone() -> None:
    schedule = build_schedule("1f1b", 2, 4)

    def run(seed: int) -> tuple[tuple[float, ...], ...]:
        config = EmulatedConfig(noise=0.01, seed=seed)
        return run_iteration(
            schedule, default_settings(schedule), works_of(schedule), A100, config
        ).duration_s

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_runs_are_labelled_emulated() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    pipeline = VirtualPipeline(schedule, works_of(schedule))
    runs = pipeline.runs([pipeline.run_plan(default_settings(schedule), 3, "default")])
    assert runs.source is Source.EMULATED
    assert "emulated" in runs.facts["gpu"]
    assert len(runs.runs[0].iterations) == 3


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_plan_is_no_faster_than_top_clocks(data: st.DataObject) -> None:
    schedule = build_schedule("1f1b", 3, 4)
    plan = tuple(
        tuple(Setting(data.draw(st.sampled_from(A100.clocks_mhz))) for _ in row)
        for row in schedule.order
    )
    works = works_of(schedule)
    pipeline = VirtualPipeline(schedule, works, A100)
    top = pipeline.run(default_settings(schedule))
    record = pipeline.run(plan)
    assert record.iter_time_s >= top.iter_time_s * (1 - 1e-9)
    assert pipeline.true_cost is not None
    for stage, energy_j in enumerate(pipeline.true_cost.energy_j):
        assert 0 < pipeline.true_cost.busy_j[stage] < energy_j
        assert pipeline.true_cost.busy_s[stage] == pytest.approx(sum(record.duration_s[stage]))
