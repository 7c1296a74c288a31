from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kareus_pp.builders import build_1f1b
from kareus_pp.evaluate import evaluate
from kareus_pp.planner import Planner, PlannerOptions
from kareus_pp.planner.smoothing import smooth
from kareus_pp.profile import Option, Origin, Profile
from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.setting import Setting
from kareus_pp.target import Slowdown


def curve(jump: float = 0.0, knee: float = 1350.0) -> Profile:
    """Two stages at 25 clocks with a knee, and a rise of time at 1100 MHz on request."""
    options = {}
    for stage in range(2):
        for kind, work in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0)):
            own = []
            for clock in range(800, 1550, 30):
                time = work * (0.02 + 80.0 / min(clock, knee))
                time *= 1 + jump * (clock >= 1100)
                own.append(Option(Setting(clock), time, work * (10 + 20 * (clock / 1000) ** 3)))
            options[InstructionClass(stage, kind)] = tuple(own)
    return Profile(options, (60.0, 60.0))


def noisy(profile: Profile, noise: float) -> Profile:
    random = np.random.default_rng(1)
    return replace(
        profile,
        options={
            cls: tuple(
                replace(
                    o,
                    time_s=o.time_s * (1 + noise * random.standard_normal()),
                    energy_j=o.energy_j * (1 + noise * random.standard_normal()),
                    time_sd_s=noise * o.time_s,
                )
                for o in own
            )
            for cls, own in profile.options.items()
        },
    )


def error(found: Profile, truth: Profile) -> float:
    pairs = [
        (a.time_s, b.time_s)
        for cls, own in truth.options.items()
        for a, b in zip(found.options[cls], own, strict=True)
    ]
    return float(np.sqrt(np.mean([(a / b - 1) ** 2 for a, b in pairs])))


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_smoothing_brings_noisy_readings_nearer_to_the_truth(noise: float) -> None:
    truth = curve()
    seen = noisy(truth, noise)
    for method in ("auto", "physical", "local"):
        found = smooth(seen, method)  # type: ignore[arg-type]
        assert found.methods
        assert error(found.profile, truth) < 0.5 * error(seen, truth)
        assert found.noise == pytest.approx(noise, rel=0.05)
    some = next(iter(found.profile.options.values()))
    assert {o.origin for o in some} == {Origin.PREDICTED}


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_what_the_physical_form_cannot_follow_is_split(noise: float) -> None:
    truth = curve(jump=0.15, knee=2000.0)
    seen = noisy(truth, noise)
    split = smooth(seen, "auto")
    assert split.name == "local"
    assert error(split.profile, truth) < error(seen, truth)
    assert error(split.profile, truth) < error(smooth(seen, "physical").profile, truth)


def test_what_neither_form_can_follow_is_left_alone() -> None:
    wavy = replace(
        curve(),
        options={
            cls: tuple(
                replace(
                    o,
                    energy_j=o.energy_j * (1 + 0.1 * (-1) ** n),
                    time_s=o.time_s * 1.05 ** (n % 3),
                )
                for n, o in enumerate(own)
            )
            for cls, own in curve().options.items()
        },
    )
    assert smooth(noisy(wavy, 0.01), "auto").name == "none"


def test_only_declared_noise_is_smoothed_by_default() -> None:
    clean = curve()
    assert smooth(clean, "auto").profile is clean
    seen = noisy(clean, 0.03)
    undeclared = replace(
        seen,
        options={
            c: tuple(replace(o, time_sd_s=None) for o in own) for c, own in seen.options.items()
        },
    )
    assert smooth(undeclared, "auto").name == "none"
    assert smooth(undeclared, "physical").name == "physical"
    few = replace(seen, options={c: own[:5] for c, own in seen.options.items()})
    assert smooth(few, "auto").name == "none"


def test_figures_stay_those_of_the_profile_as_given() -> None:
    seen = noisy(curve(), 0.02)
    planner = Planner(build_1f1b(2, 4), seen, PlannerOptions(time_limit_s=0.5))
    assert planner.smoothing == "physical"
    plan = planner.plan(Slowdown(5.0))
    found = evaluate(plan.schedule, plan.settings, seen)
    assert (plan.time_s, plan.energy_j) == (found.time_s, found.energy_j)
    assert (plan.bound_j or 0.0) <= found.energy_j
