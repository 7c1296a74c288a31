"""Overlapped options are chosen for forward and backward together, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kareus_pp.builders import build_1f1b
from kareus_pp.errors import TargetError
from kareus_pp.planner import PlannerOptions
from kareus_pp.planner.families import families, plan_among
from kareus_pp.profile import DeviceFacts, Option, Profile
from kareus_pp.schedule import Kind, Schedule
from kareus_pp.setting import SEQUENTIAL, OverlapSetting, Setting
from kareus_pp.target import Deadline, EnergyBudget, Fastest, LeastEnergy, Slowdown, format_target

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


def kinds_split(schedule: Schedule, settings: object) -> dict[tuple[int, int], set[bool]]:
    """For every stage and microbatch whether its instructions are split."""
    found: dict[tuple[int, int], set[bool]] = {}
    for order, row in zip(schedule.order, settings, strict=True):  # type: ignore[call-overload]
        for instruction, setting in zip(order, row, strict=True):
            place = (instruction.stage, instruction.microbatch)
            found.setdefault(place, set()).add(not setting.overlap.is_sequential)
    return found


@given(st.floats(0.5, 1.5), st.floats(0.5, 1.5))
def test_forward_and_backward_are_both_split_or_neither(forward: float, backward: float) -> None:
    made, swept = plan_among(SCHEDULE, profile(forward, backward), Fastest(), QUICK, 2)
    for plan in (made, *swept.plans):
        assert all(len(kinds) == 1 for kinds in kinds_split(SCHEDULE, plan.settings).values())


@pytest.mark.parametrize(("factor", "splits"), [(0.8, True), (1.2, False)])
@pytest.mark.parametrize(
    "target", [Fastest(), LeastEnergy(), Deadline(100.0), Slowdown(10.0), EnergyBudget(1e6)]
)
def test_the_better_family_is_taken(factor: float, splits: bool, target: object) -> None:
    made, swept = plan_among(SCHEDULE, profile(factor, factor), target, QUICK, 3)  # type: ignore[arg-type]
    for plan in (made, *swept.plans):
        assert {
            split for row in kinds_split(SCHEDULE, plan.settings).values() for split in row
        } == {splits}


def test_a_slowdown_is_against_the_shortest_iteration_of_any_family() -> None:
    known = profile(0.5, 0.5)
    fastest, _ = plan_among(SCHEDULE, known, Fastest(), QUICK, 1)
    slower, _ = plan_among(SCHEDULE, known, Slowdown(10.0), QUICK, 1)
    assert fastest.time_s is not None
    assert slower.time_s is not None
    assert slower.time_s <= 1.1 * fastest.time_s * (1 + 1e-9)
    assert slower.target == format_target(Slowdown(10.0))


def test_a_deadline_that_one_family_misses_is_met_by_the_other() -> None:
    known = profile(0.5, 0.5)
    fastest, _ = plan_among(SCHEDULE, known, Fastest(), QUICK, 1)
    assert fastest.time_s is not None
    met, _ = plan_among(SCHEDULE, known, Deadline(fastest.time_s), QUICK, 1)
    assert met.time_s == pytest.approx(fastest.time_s)


def test_a_stage_without_options_for_both_stays_whole() -> None:
    known = families(profile(0.8, 0.8, without=(Kind.BACKWARD, 1)))
    assert len(known) == 2, "not to split is a family of its own"
    for cls, options in known[1].options.items():
        split = {not option.setting.overlap.is_sequential for option in options}
        assert split == {cls.stage == 0}
    assert all(
        option.setting.overlap.is_sequential
        for options in known[0].options.values()
        for option in options
    )


def test_a_target_that_no_family_meets_is_refused() -> None:
    with pytest.raises(TargetError):
        plan_among(SCHEDULE, profile(0.8, 0.8), EnergyBudget(1.0), QUICK, 1)
