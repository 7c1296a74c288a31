"""Hypothesis strategies for the vocabulary."""

from __future__ import annotations

from hypothesis import strategies as st

from kareus_pp.builders import build_schedule
from kareus_pp.profile import Option, Origin, Overhead, Profile
from kareus_pp.schedule import Instruction, InstructionClass, Kind, Schedule
from kareus_pp.setting import Launch, OverlapSetting, Setting

small = st.integers(0, 999)
kinds = st.sampled_from(list(Kind))
instructions = st.builds(Instruction, small, kinds, small, small)
words = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
classes = st.builds(
    InstructionClass, small, kinds, small, st.booleans(), st.one_of(st.just(""), words)
)
launches = st.builds(Launch, words, small, small)
overlaps = st.builds(
    OverlapSetting,
    st.lists(launches, max_size=3, unique_by=lambda launch: launch.partition).map(tuple),
)
clocks = st.one_of(st.none(), st.integers(1, 99999))
settings_ = st.builds(Setting, clocks, overlaps)
costs = st.floats(1e-6, 1e6, allow_nan=False)
spreads = st.one_of(st.none(), st.floats(0, 1e3))
options = st.builds(
    Option, settings_, costs, costs, spreads, spreads, st.sampled_from(list(Origin))
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Profiles of up to 4 stages; every option of a class has another setting."""
    powers = tuple(draw(st.lists(st.floats(0, 1e3), min_size=1, max_size=4)))
    stages = st.integers(0, len(powers) - 1)
    known = st.builds(lambda cls, stage: cls._replace(stage=stage), classes, stages)
    several = st.lists(options, max_size=4, unique_by=lambda option: option.setting)
    return Profile(
        draw(st.dictionaries(known, several.map(tuple), max_size=4)),
        powers,
        Overhead(draw(st.floats(0, 1)), draw(st.floats(0, 1))),
    )


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = ("gpipe", "1f1b")) -> Schedule:
    """Built schedules of up to 5 stages and 9 microbatches."""
    return build_schedule(
        draw(st.sampled_from(names)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    )
