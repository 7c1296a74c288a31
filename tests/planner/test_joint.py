"""The joint relaxation: forward and backward of a microbatch are split by the same share."""

from __future__ import annotations

import pytest

from kareus_pp.planner import Planner, PlannerOptions
from kareus_pp.planner.joint import JointRelaxation
from kareus_pp.planner.options import Solver
from kareus_pp.planner.splitting import splittable
from kareus_pp.profile import Profile
from kareus_pp.target import Deadline, Fastest
from tests.planner.test_splitting import QUICK, SCHEDULE, one_clock, profile


def relaxation(known: Profile, solver: Solver = "highs") -> JointRelaxation:
    options = PlannerOptions(solver=solver)
    return JointRelaxation(SCHEDULE, known, options, splittable(SCHEDULE, known, options))


def cost_j(joint: JointRelaxation, time_s: float) -> float:
    found = joint.at(time_s)
    assert found is not None
    return found.cost_j


@pytest.mark.parametrize("times", [(12.0, 15.0, 10.5), (10.5, 12.0, 15.0)])
def test_solving_again_is_solving_anew(times: tuple[float, ...]) -> None:
    known = profile(0.8, 0.9)
    warm = relaxation(known)
    for time_s in times:
        assert cost_j(warm, time_s) == pytest.approx(cost_j(relaxation(known), time_s))


def test_cbc_and_highs_agree() -> None:
    known = profile(0.8, 0.9)
    for time_s in (10.5, 15.0):
        highs, cbc = (cost_j(relaxation(known, name), time_s) for name in ("highs", "cbc"))
        assert highs == pytest.approx(cbc)


def test_no_iteration_is_shorter_than_the_shortest() -> None:
    joint = relaxation(profile(0.8, 0.9))
    assert joint.at(1.0) is None
    assert joint.at(100.0) is not None


def test_a_forward_that_gains_does_not_pay_for_its_backward() -> None:
    """Free choice would split forwards alone; together they lose, and the bound knows it."""
    known = profile(0.5, 1.5)
    planner = Planner(SCHEDULE, known, QUICK)
    plan = planner.plan(Fastest())
    assert plan.time_s is not None
    assert plan.bound_j is not None
    free_j = planner._free.bound_j(plan.time_s)
    assert plan.bound_j > 1.01 * free_j
    assert plan.gap is not None
    assert plan.gap < 0.05


def test_shares_of_0_or_1_say_what_is_best() -> None:
    """With one clock, durations are exact, and so are whole shares."""
    known = one_clock(SCHEDULE, 0.8, 1.2)
    joint = relaxation(known)
    planner = Planner(SCHEDULE, known, QUICK)
    deadline_s = 1.1 * planner.shortest_s
    first, *others = joint.splits(deadline_s, 5.0)
    assert others
    best = planner.plan(Deadline(deadline_s))
    made = planner._for(first).plan(Deadline(deadline_s), 0.5)
    assert made.energy_j == pytest.approx(best.energy_j)
    assert set(joint.splits(deadline_s, 0.0)) <= {first, *others}, "no time: only rounded shares"
