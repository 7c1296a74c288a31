"""What a user relies on: frontiers, invariance, degenerate and impossible inputs, time limits."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kareus_pp.builders import build_1f1b, build_gpipe
from kareus_pp.config import PlannerConfig
from kareus_pp.errors import PlanError, ProfileError
from kareus_pp.evaluate import evaluate
from kareus_pp.plan import validate_frontier
from kareus_pp.planner import Planner, PlannerOptions, frontier, plan
from kareus_pp.profile import Option, Overhead, Profile
from kareus_pp.schedule import Instruction, InstructionClass, Kind, Schedule, looped_model_order
from kareus_pp.setting import Launch, OverlapSetting, Setting
from kareus_pp.target import Deadline, EnergyDelayProduct, Fastest, LeastEnergy, Straggler
from tests.planner.problems import problems
from tests.planner.test_switches import gpu


def test_a_frontier_runs_from_the_shortest_to_the_least_energy() -> None:
    schedule = build_1f1b(4, 8)
    found = frontier(schedule, gpu(4), points=20)
    validate_frontier(found)
    planner = Planner(schedule, gpu(4))
    assert math.isclose(found.plans[0].time_s or 0.0, planner.shortest_s, rel_tol=1e-9)
    assert len(found.plans) > 10
    for point in found.plans:
        cost = evaluate(schedule, point.settings, gpu(4))
        assert (cost.time_s, cost.energy_j) == (point.time_s, point.energy_j)
        assert 0.0 <= (point.gap or 0.0) < 0.02
    shorter = frontier(schedule, gpu(4), points=5, longest_s=1.02 * planner.shortest_s)
    assert (shorter.plans[-1].time_s or 0.0) <= 1.02 * planner.shortest_s * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(problems(most_settings=500))
def test_effective_energy_falls_along_a_sweep(problem: tuple[Schedule, Profile]) -> None:
    schedule, profile = problem
    planner = Planner(schedule, profile)
    bounds = []
    for point in planner.sweep(6, planner.longest_useful_s):
        assert (point.bound_j or 0.0) <= (point.energy_j or 0.0) + 1e-6
        bounds.append(float(point.target.split(":")[1]))
    bounds.sort()
    relaxed = [
        planner._free.relaxation.bound_cost_j(b - planner.problem.overhead_s) for b in bounds
    ]
    assert all(b <= a + 1e-6 for a, b in itertools.pairwise(relaxed))


@settings(max_examples=20, deadline=None)
@given(problems(most_settings=500), st.sampled_from([1e-3, 1e3]), st.sampled_from([1e-3, 1e3]))
def test_units_do_not_matter(
    problem: tuple[Schedule, Profile], second: float, joule: float
) -> None:
    schedule, profile = problem
    scaled = replace(
        profile,
        options={
            cls: tuple(
                replace(o, time_s=o.time_s * second, energy_j=o.energy_j * joule) for o in own
            )
            for cls, own in profile.options.items()
        },
        blocking_power_w=tuple(w * joule / second for w in profile.blocking_power_w),
        overhead=Overhead(profile.overhead.iteration_s * second, profile.overhead.p2p_s * second),
    )
    middle = 1.2 * Planner(schedule, profile).shortest_s + 0.1
    one = plan(schedule, profile, Deadline(middle))
    other = plan(schedule, scaled, Deadline(middle * second))
    assert math.isclose(one.energy_j or 0.0, (other.energy_j or 0.0) / joule, abs_tol=1e-5)


def test_names_of_microbatches_and_order_of_options_do_not_matter() -> None:
    schedule, profile = build_gpipe(2, 2), gpu(2)
    turned = Schedule(
        tuple(
            tuple(i._replace(microbatch=1 - i.microbatch) for i in row) for row in schedule.order
        ),
        schedule.model_order,
    )
    shuffled = replace(profile, options={c: own[::-1] for c, own in profile.options.items()})
    deadline = Deadline(1.1 * Planner(schedule, profile).shortest_s)
    energies = [
        plan(s, p, deadline).energy_j
        for s, p in ((schedule, profile), (turned, profile), (schedule, shuffled))
    ]
    assert energies == pytest.approx([energies[0]] * 3, rel=1e-9)


def test_overhead_and_latency_count_in_every_time() -> None:
    schedule = build_1f1b(2, 3)
    slow = replace(gpu(2), overhead=Overhead(0.5, 0.01))
    shortest = Planner(schedule, slow).shortest_s
    assert shortest > Planner(schedule, gpu(2)).shortest_s + 0.5
    for target in (Fastest(), Deadline(shortest + 0.05), EnergyDelayProduct(), LeastEnergy()):
        found = plan(schedule, slow, target)
        assert (found.time_s or 0.0) >= shortest * (1 - 1e-9)
    assert (plan(schedule, slow, Deadline(shortest + 0.05)).time_s or 0.0) <= shortest + 0.05


def test_a_straggler_s_time_is_used_up() -> None:
    schedule, profile = build_1f1b(3, 4), gpu(3)
    planner = Planner(schedule, profile)
    late = planner.plan(Straggler(10 * planner.longest_useful_s))
    least = planner.plan(LeastEnergy())
    watts = sum(profile.blocking_power_w)

    def effective(p):  # type: ignore[no-untyped-def]
        return p.energy_j - watts * p.time_s

    assert effective(late) <= effective(least)


def test_overlap_settings_are_options_and_switch_no_clock() -> None:
    split = OverlapSetting((Launch("attention", 2, 8),))
    options = {
        InstructionClass(s, kind): tuple(
            Option(Setting(clock, overlap), base * 1000 / clock * gain, base * clock / 100 * gain)
            for clock in (1000,)
            for overlap, gain in ((OverlapSetting(), 1.0), (split, 0.9))
        )
        for s in range(2)
        for kind, base in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0))
    }
    profile = Profile(options, (1.0, 1.0))
    for extra in (PlannerOptions(), PlannerOptions(switch_delay_s=0.1)):
        found = plan(build_1f1b(2, 2), profile, Fastest(), extra)
        assert {s.overlap for row in found.settings for s in row} == {split}
        assert found.switches == 0


def test_fixed_instructions_keep_the_clock_they_find() -> None:
    order = (
        (
            Instruction(0, Kind.LOAD, 0),
            Instruction(0, Kind.FORWARD, 0),
            Instruction(0, Kind.BACKWARD, 0),
            Instruction(0, Kind.OPTIMIZER, 0),
        ),
    )
    schedule = Schedule(order, looped_model_order(1))
    options = dict(gpu(1).options)
    options[InstructionClass(0, Kind.LOAD)] = (Option(Setting(), 0.1, 6.0),)
    options[InstructionClass(0, Kind.OPTIMIZER)] = (
        Option(Setting(1000), 0.3, 30.0),
        Option(Setting(1400), 0.2, 30.0),
    )
    found = plan(schedule, Profile(options, (60.0,)), Fastest(), PlannerOptions(switch_delay_s=0.1))
    assert [s.clock_mhz for s in found.settings[0]] == [None, 1400, 1400, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {}}, "no options for instruction class"),
        ({"blocking_power_w": (60.0,)}, "blocking power of 1 stages"),
        ({"blocking_power_w": (60.0, math.nan)}, "blocking power of stage 1"),
        ({"time_s": math.nan}, "must be finite"),
        ({"time_s": -1.0}, "negative time"),
        ({"energy_j": math.inf}, "must be finite"),
        ({"none": True}, "empty list"),
    ],
)
def test_what_a_profile_lacks_is_named(change: dict[str, object], message: str) -> None:
    profile = gpu(2)
    cls = InstructionClass(1, Kind.BACKWARD)
    if "none" in change:
        profile = replace(profile, options={**profile.options, cls: ()})
    elif "time_s" in change or "energy_j" in change:
        own = (replace(profile.options[cls][0], **change), *profile.options[cls][1:])  # type: ignore[arg-type]
        profile = replace(profile, options={**profile.options, cls: own})
    else:
        profile = replace(profile, **change)  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=message):
        plan(build_1f1b(2, 2), profile, Fastest())


def test_one_option_ties_and_zero_durations() -> None:
    single = {
        cls: (Option(Setting(1000), 0.0, 0.0), Option(Setting(1100), 0.0, 0.0))
        for cls in gpu(2).options
    }
    found = plan(build_1f1b(2, 2), Profile(single, (0.0, 0.0)), Deadline(1.0))
    assert (found.time_s, found.energy_j, found.gap) == (0.0, 0.0, None)


def test_disconnected_stages_are_planned_each_on_its_own() -> None:
    order = (
        (Instruction(0, Kind.FORWARD, 0),),
        (Instruction(1, Kind.FORWARD, 1), Instruction(1, Kind.FORWARD, 2)),
    )
    schedule = Schedule(order, looped_model_order(2))
    found = plan(schedule, gpu(2), Fastest())
    cost = evaluate(schedule, found.settings, gpu(2))
    assert found.time_s == cost.time_s
    # Stage 1 has more to do and sets the time; stage 0 slows down to it.
    assert found.settings[0][0].clock_mhz < found.settings[1][0].clock_mhz  # type: ignore[operator]


def test_a_time_limit_returns_the_best_so_far() -> None:
    began = time.perf_counter()
    found = plan(build_1f1b(8, 64), gpu(8), Fastest(), PlannerOptions(time_limit_s=0.01))
    assert found.gap is not None
    assert time.perf_counter() - began < 60.0


def test_points_below_one_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 1"):
        frontier(build_1f1b(2, 2), gpu(2), points=0)


def test_options_come_from_the_configuration() -> None:
    config = PlannerConfig(solver="cbc", max_switches=3, clocks_mhz=(900,), time_limit_s=2.0)
    options = PlannerOptions.from_config(config)
    assert options == PlannerOptions(
        solver="cbc", max_switches=3, clocks_mhz=(900,), time_limit_s=2.0
    )
