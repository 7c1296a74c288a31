"""Small random problems, and their optimum by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from hypothesis import strategies as st

from kareus_pp.evaluate import FREE_SWITCHES, SwitchPrice, evaluate
from kareus_pp.plan import Settings
from kareus_pp.profile import Option, Overhead, Profile
from kareus_pp.schedule import Instruction, Kind, Schedule, looped_model_order
from kareus_pp.setting import DEFAULT_SETTING, Setting

Point = tuple[float, float, Settings]


def small_schedule(stages: int, microbatches: int, split: bool = False) -> Schedule:
    """GPipe order, with backwards split into input and weight gradients on request."""
    after = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if split else (Kind.BACKWARD,)
    order = tuple(
        tuple(Instruction(s, Kind.FORWARD, m) for m in range(microbatches))
        + tuple(Instruction(s, kind, m) for m in range(microbatches) for kind in after)
        for s in range(stages)
    )
    return Schedule(order, looped_model_order(stages))


SCHEDULES = [
    small_schedule(1, 1),
    small_schedule(1, 2),
    small_schedule(2, 1),
    small_schedule(2, 1, split=True),
    small_schedule(2, 2),
    small_schedule(3, 1),
    # Stage 0 begins its second forward when stage 1 is through with the first.
    replace(
        small_schedule(2, 2),
        waits=frozenset({(Instruction(1, Kind.FORWARD, 0), Instruction(0, Kind.FORWARD, 1))}),
    ),
    Schedule(
        tuple(
            (
                Instruction(s, Kind.LOAD, 0),
                Instruction(s, Kind.FORWARD, 0),
                Instruction(s, Kind.BACKWARD, 0),
                Instruction(s, Kind.OPTIMIZER, 0),
            )
            for s in range(2)
        ),
        looped_model_order(2),
    ),
    # Two chunks on each of two stages.
    Schedule(
        tuple(
            tuple(
                Instruction(s, kind, 0, chunk)
                for kind, chunk in ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 1))
            )
            for s in range(2)
        ),
        looped_model_order(2, 2),
    ),
]


@st.composite
def problems(draw: st.DrawFn, most_settings: int = 20_000) -> tuple[Schedule, Profile]:
    """A small schedule with random options, few enough to enumerate."""
    schedule = draw(st.sampled_from(SCHEDULES))
    movable = sum(not i.kind.is_fixed for i in schedule.instructions)
    most = 2
    while (most + 1) ** movable <= most_settings and most < 5:
        most += 1
    number = st.floats(0.0, 10.0).map(lambda x: round(x, 2))
    options = {}
    for cls in schedule.classes:
        count = 1 if cls.kind.is_fixed else draw(st.integers(1, most))
        options[cls] = tuple(
            Option(Setting(1000 + 100 * k), draw(number), draw(number)) for k in range(count)
        )
    power = tuple(draw(st.floats(0.0, 3.0).map(lambda x: round(x, 2))) for _ in schedule.order)
    overhead = Overhead(draw(number), draw(st.sampled_from([0.0, 0.5])))
    return schedule, Profile(options, power, overhead)


def all_points(
    schedule: Schedule, profile: Profile, switch: SwitchPrice = FREE_SWITCHES
) -> Iterator[Point]:
    """Time, energy and settings of every choice there is."""
    choices = [
        [DEFAULT_SETTING]
        if i.kind.is_fixed
        else [o.setting for o in profile.options[schedule.class_of(i)]]
        for i in schedule.instructions
    ]
    sizes = [len(row) for row in schedule.order]
    for flat in itertools.product(*choices):
        rest = iter(flat)
        settings = tuple(tuple(itertools.islice(rest, size)) for size in sizes)
        found = evaluate(schedule, settings, profile, switch)
        yield found.time_s, found.energy_j, settings


def least(points: list[Point], key: Callable[[Point], float]) -> float:
    """Least value of a key over points."""
    return min(map(key, points))
