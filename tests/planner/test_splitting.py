"""Microbatches are split in forward and backward, or not at all; which ones is planned."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kareus_pp.builders import build_1f1b
from kareus_pp.errors import ProfileError, TargetError
from kareus_pp.evaluate import evaluate
from kareus_pp.plan import Plan, Settings
from kareus_pp.planner import Planner, PlannerOptions, undominated
from kareus_pp.planner.problem import place_of
from kareus_pp.planner.splitting import best, splittable, without_overlap
from kareus_pp.profile import DeviceFacts, Option, Profile
from kareus_pp.schedule import Kind, Schedule
from kareus_pp.setting import SEQUENTIAL, OverlapSetting, Setting
from kareus_pp.target import (
    Cost,
    Deadline,
    EnergyBudget,
    EnergyDelayProduct,
    Fastest,
    LeastEnergy,
    PowerCap,
    Slowdown,
    Straggler,
    Target,
    format_target,
)
from tests.planner.problems import all_points, problems

SPLIT = OverlapSetting.parse("mlp@0:0")
SCHEDULE = build_1f1b(2, 3)
QUICK = PlannerOptions(time_limit_s=0.5)


def profile(forward: float, backward: float, without: tuple[Kind, int] | None = None) -> Profile:
    """Two clocks; overlap takes `forward` and `backward` of the time, at the same power.

    Args:
        forward: Factor on forwards.
        backward: Factor on backwards.
        without: Kind and stage that have no option that overlaps.
    """
    options = {}
    for cls in SCHEDULE.classes:
        work, factor = (1.0, forward) if cls.kind is Kind.FORWARD else (2.0, backward)
        overlaps = (SEQUENTIAL,) if without == (cls.kind, cls.stage) else (SEQUENTIAL, SPLIT)
        options[cls] = tuple(
            Option(Setting(mhz, overlap), time_s, time_s * (100.0 + 300.0 * (mhz / 1000) ** 3))
            for overlap in overlaps
            for mhz in (500, 1000)
            for time_s in [work * 1000 / mhz * (1.0 if overlap == SEQUENTIAL else factor)]
        )
    return Profile(options, (80.0, 80.0), device=DeviceFacts(clocks_mhz=(500, 1000)))


def kinds_split(schedule: Schedule, settings: Settings) -> dict[tuple[int, ...], set[bool]]:
    """For every stage, chunk and microbatch whether its instructions are split."""
    found: dict[tuple[int, ...], set[bool]] = {}
    for order, row in zip(schedule.order, settings, strict=True):
        for instruction, setting in zip(order, row, strict=True):
            if not instruction.kind.is_fixed:
                place = (instruction.stage, instruction.chunk, instruction.microbatch)
                found.setdefault(place, set()).add(not setting.overlap.is_sequential)
    return found


def are_consistent(schedule: Schedule, settings: Settings) -> bool:
    """Forward and backward alike; what has no backward of its own is whole."""
    places = [place_of(i) for i in schedule.instructions if i.kind is Kind.BACKWARD]
    return all(
        split == {False} or (split == {True} and place in places)
        for place, split in kinds_split(schedule, settings).items()
    )


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[Schedule, Profile]:
    """A small problem; about every second option but the first of each class overlaps."""
    schedule, known = draw(problems(most_settings=3000))
    options = {}
    for cls, own in known.options.items():
        splits = [not cls.kind.is_fixed and n > 0 and draw(st.booleans()) for n in range(len(own))]
        options[cls] = tuple(
            replace(o, setting=o.setting._replace(overlap=SPLIT)) if split else o
            for o, split in zip(own, splits, strict=True)
        )
    return schedule, replace(known, options=options)


@given(overlapping(), st.floats(1.0, 2.0))
def test_plans_are_consistent_and_bounded(problem: tuple[Schedule, Profile], by: float) -> None:
    schedule, known = problem
    points = [p for p in all_points(schedule, known) if are_consistent(schedule, p[2])]
    planner = Planner(schedule, known, QUICK)
    shortest = min(time_s for time_s, _, _ in points)
    assert planner.shortest_s >= shortest * (1 - 1e-9)
    for plan in (
        planner.plan(Fastest()),
        planner.plan(Deadline(by * planner.shortest_s)),
        *planner.sweep(3, planner.least_energy_s),
    ):
        assert plan.time_s is not None
        assert plan.energy_j is not None
        assert plan.bound_j is not None
        assert are_consistent(schedule, plan.settings)
        # Bounds count the blocking power up to the plan's own end.
        ends = [(t, e) for t, e, _ in points if t <= plan.time_s * (1 + 1e-9)]
        least = min(e + sum(known.blocking_power_w) * (plan.time_s - t) for t, e in ends)
        assert plan.energy_j >= least * (1 - 1e-9)
        assert plan.bound_j <= least * (1 + 1e-6) + 1e-9


def one_clock(schedule: Schedule, time: float, energy: float) -> Profile:
    """One clock; overlap takes so much of the time and of the energy."""
    options = {
        cls: (
            Option(Setting(1000), work, 300.0 * work),
            Option(Setting(1000, SPLIT), work * time, 300.0 * work * energy),
        )
        for cls in schedule.classes
        for work in [1.0 if cls.kind is Kind.FORWARD else 2.0]
    }
    return Profile(options, (80.0,) * schedule.stages)


@pytest.mark.parametrize("by", [1.0, 1.05, 1.1, 1.2])
def test_only_microbatches_that_gain_are_split(by: float) -> None:
    """Overlap saves time and takes energy: what has slack stays whole. The optimum is known."""
    schedule = build_1f1b(3, 3)
    known = one_clock(schedule, 0.8, 1.2)
    places = sorted(splittable(schedule, known, QUICK))
    points = []
    for flags in itertools.product((False, True), repeat=len(places)):
        split = dict(zip(places, flags, strict=True))
        settings = tuple(
            tuple(
                Setting(1000, SPLIT if split[i.stage, i.chunk, i.microbatch] else SEQUENTIAL)
                for i in row
            )
            for row in schedule.order
        )
        found = evaluate(schedule, settings, known)
        points.append((found.time_s, found.energy_j))
    deadline = by * min(time_s for time_s, _ in points)
    watts = sum(known.blocking_power_w)
    least = min(e + watts * (deadline - t) for t, e in points if t <= deadline * (1 + 1e-9))
    plan = Planner(schedule, known, QUICK).plan(Deadline(deadline))
    assert plan.time_s is not None
    assert plan.energy_j is not None
    # What is minimised counts the blocking power up to the deadline.
    assert plan.energy_j + watts * (deadline - plan.time_s) == pytest.approx(least)
    assert {True, False} == {
        s for split in kinds_split(schedule, plan.settings).values() for s in split
    }, "neither all nor none"


@given(st.floats(0.5, 1.5), st.floats(0.5, 1.5))
def test_forward_and_backward_are_both_split_or_neither(forward: float, backward: float) -> None:
    planner = Planner(SCHEDULE, profile(forward, backward), QUICK)
    for plan in (planner.plan(Fastest()), *planner.sweep(2, planner.least_energy_s)):
        assert are_consistent(SCHEDULE, plan.settings)


TARGETS = [
    Fastest(),
    LeastEnergy(),
    Deadline(100.0),
    Slowdown(10.0),
    EnergyBudget(1e6),
    PowerCap(1e6),
    Straggler(100.0),
    Cost(1.0, 1.0),
    EnergyDelayProduct(),
]


@pytest.mark.parametrize(("factor", "splits"), [(0.8, True), (1.2, False)])
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_better_everywhere_is_taken_everywhere(
    factor: float, splits: bool, target: Target
) -> None:
    planner = Planner(SCHEDULE, profile(factor, factor), QUICK)
    made = planner.plan(target)
    for plan in (made, *planner.sweep(3, planner.least_energy_s)):
        assert {s for row in kinds_split(SCHEDULE, plan.settings).values() for s in row} == {splits}
    assert made.target == format_target(target)


def test_a_slowdown_is_against_the_shortest_iteration_of_all() -> None:
    planner = Planner(SCHEDULE, profile(0.5, 0.5), QUICK)
    fastest, slower = planner.plan(Fastest()), planner.plan(Slowdown(10.0))
    assert fastest.time_s == pytest.approx(planner.shortest_s)
    assert slower.time_s is not None
    assert slower.time_s <= 1.1 * planner.shortest_s * (1 + 1e-9)


def test_a_deadline_that_needs_overlap_is_met() -> None:
    planner = Planner(SCHEDULE, profile(0.5, 0.5), QUICK)
    met = planner.plan(Deadline(planner.shortest_s))
    assert met.time_s == pytest.approx(planner.shortest_s)


def test_a_frontier_takes_what_is_best_at_each_of_its_times() -> None:
    """Overlap is faster and takes more energy: fast plans split, slow ones do not."""
    schedule = build_1f1b(2, 3)
    planner = Planner(schedule, one_clock(schedule, 0.8, 1.2), QUICK)
    swept = undominated(planner.sweep(5, planner.longest_useful_s)).plans
    number = [
        sum(split == {True} for split in kinds_split(schedule, plan.settings).values())
        for plan in swept
    ]
    assert number[0] > number[-1] == 0
    assert number == sorted(number, reverse=True)


def clocks_apart(number: int) -> Profile:
    """Overlap saves time and energy, but in forwards only at the highest clock, and in backwards
    only at the lowest."""
    known = profile(0.7, 0.7)
    only = {Kind.FORWARD: 1000, Kind.BACKWARD: 500}
    options = {
        cls: tuple(
            o
            for o in own
            if o.setting.overlap == SEQUENTIAL or o.setting.clock_mhz == only[cls.kind]
        )
        for cls, own in known.options.items()
    }
    return replace(known, options=options, blocking_power_w=(80.0,) * number)


@pytest.mark.parametrize("known", [clocks_apart(2), profile(0.9, 1.05), profile(0.8, 0.8)])
def test_an_energy_budget_is_met_down_to_the_least_energy(known: Profile) -> None:
    planner = Planner(SCHEDULE, known, QUICK)
    least = planner.plan(LeastEnergy())
    assert least.energy_j is not None
    met = planner.plan(EnergyBudget(1.001 * least.energy_j))
    assert met.energy_j is not None
    assert met.energy_j <= 1.001 * least.energy_j
    with pytest.raises(TargetError):
        planner.plan(EnergyBudget(0.98 * least.energy_j))


@pytest.mark.parametrize("known", [clocks_apart(2), profile(0.9, 1.05), profile(0.8, 0.8)])
def test_deadlines_beyond_the_ends_are_answered_with_the_ends(known: Profile) -> None:
    planner = Planner(SCHEDULE, known, QUICK)
    ends = {0.01: planner.plan(Fastest()), 1e3: planner.plan(LeastEnergy())}
    for deadline_s, end in ends.items():
        plan = planner.plan(Deadline(deadline_s))
        assert plan.energy_j == pytest.approx(end.energy_j)
        assert plan.time_s == pytest.approx(end.time_s)


def test_limits_on_switches_that_a_split_cannot_keep_leave_the_others() -> None:
    """All split means two clocks on every stage: at most one switch is kept by whole plans."""
    limited = replace(QUICK, max_switches=1)
    plan = Planner(SCHEDULE, clocks_apart(2), limited).plan(Fastest())
    assert all(split == {False} for split in kinds_split(SCHEDULE, plan.settings).values())


def test_only_what_has_options_for_both_can_be_split() -> None:
    known = profile(0.8, 0.8, without=(Kind.BACKWARD, 1))
    assert {stage for stage, _, _ in splittable(SCHEDULE, known, QUICK)} == {0}
    for plan in Planner(SCHEDULE, known, QUICK).sweep(3, 100.0):
        for (stage, _, _), split in kinds_split(SCHEDULE, plan.settings).items():
            assert split == {stage == 0}


def test_clocks_that_leave_no_overlap_leave_whole_microbatches() -> None:
    known = profile(0.8, 0.8)
    kept = {
        cls: tuple(o for o in own if o.setting.clock_mhz == 1000 or o.setting.overlap == SEQUENTIAL)
        for cls, own in known.options.items()
    }
    options = replace(QUICK, clocks_mhz=(500,))
    plan = Planner(SCHEDULE, replace(known, options=kept), options).plan(Fastest())
    assert all(split == {False} for split in kinds_split(SCHEDULE, plan.settings).values())


def test_not_to_overlap_must_be_among_the_options() -> None:
    known = profile(0.8, 0.8)
    only = {
        cls: tuple(o for o in own if o.setting.overlap == SPLIT)
        for cls, own in known.options.items()
    }
    with pytest.raises(ProfileError, match="has no option that does not overlap"):
        Planner(SCHEDULE, replace(known, options=only), QUICK).plan(Fastest())


def test_without_overlap_nothing_overlaps() -> None:
    known = without_overlap(profile(0.5, 0.5))
    assert all(o.setting.overlap.is_sequential for own in known.options.values() for o in own)
    assert known.options.keys() == profile(0.5, 0.5).options.keys()


def test_a_straggler_wants_least_energy_above_the_blocking_power() -> None:
    """The longer plan takes more energy, but the shorter one draws blocking power as long."""
    settings = tuple(tuple(Setting(1000) for _ in row) for row in SCHEDULE.order)
    shorter = Plan(SCHEDULE, settings, time_s=5.0, energy_j=1000.0)
    longer = Plan(SCHEDULE, settings, time_s=8.0, energy_j=1100.0)
    late = Plan(SCHEDULE, settings, time_s=12.0, energy_j=900.0)
    plans = [shorter, longer, late]
    assert best(plans, Straggler(10.0), static_w=160.0) is longer
    assert best(plans, Deadline(10.0), static_w=160.0) is shorter
    assert best(plans, LeastEnergy(), static_w=160.0) is late


def test_a_target_that_cannot_be_met_is_refused() -> None:
    with pytest.raises(TargetError):
        Planner(SCHEDULE, profile(0.8, 0.8), QUICK).plan(EnergyBudget(1.0))
