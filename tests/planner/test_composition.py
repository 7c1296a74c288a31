from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kareus_pp.planner.composition import compose_partitions
from kareus_pp.profile import Option, Origin
from kareus_pp.setting import SEQUENTIAL, Launch, OverlapSetting, Setting


@st.composite
def partitions(draw: st.DrawFn) -> list[list[Option]]:
    number = st.integers(1, 50).map(float)
    return [
        [
            Option(
                Setting(
                    clock,
                    OverlapSetting((Launch(f"part{p}", slot, 4),)) if slot else SEQUENTIAL,
                ),
                draw(number),
                draw(number),
            )
            for clock in (1000, 1200)
            for slot in range(draw(st.integers(1, 3)))
        ]
        for p in range(draw(st.integers(1, 3)))
    ]


@given(partitions())
def test_it_is_the_undominated_part_of_the_product(parts: list[list[Option]]) -> None:
    found = compose_partitions(parts)
    for clock in (1000, 1200):
        own = [[o for o in part if o.setting.clock_mhz == clock] for part in parts]
        points = {
            (sum(o.time_s for o in choice), sum(o.energy_j for o in choice))
            for choice in itertools.product(*own)
        }
        best = {
            p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)
        }
        assert {(o.time_s, o.energy_j) for o in found if o.setting.clock_mhz == clock} == best


def test_settings_errors_and_origins_are_put_together() -> None:
    attention = Option(
        Setting(1200, OverlapSetting((Launch("attention", 2, 8),))), 1.0, 10.0, 0.3, 3.0
    )
    mlp = Option(
        Setting(1200, OverlapSetting((Launch("mlp", 1, 16),))),
        2.0,
        20.0,
        0.2,
        None,
        Origin.PREDICTED,
    )
    other_clock = Option(Setting(900), 1.0, 1.0)
    (found,) = compose_partitions([[attention, other_clock], [mlp]], counts=[2, 1])
    assert str(found.setting) == "1200/attention@2:8,mlp@1:16"
    assert (found.time_s, found.energy_j) == (4.0, 40.0)
    assert found.time_sd_s == (0.6**2 + 0.2**2) ** 0.5
    assert found.energy_sd_j is None
    assert found.origin is Origin.PREDICTED


def test_nothing_composes_to_nothing() -> None:
    assert compose_partitions([]) == ()
