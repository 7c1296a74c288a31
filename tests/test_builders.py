"""Built schedules: executable for every size, and the properties their papers state."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kareus_pp.builders import (
    P2P_MODES,
    SCHEDULE_NAMES,
    build_1f1b,
    build_interleaved,
    build_schedule,
    build_zb_h1,
)
from kareus_pp.errors import ScheduleError
from kareus_pp.evaluate import start_times
from kareus_pp.schedule import Instruction, Kind, Schedule, validate_schedule

CHUNKED = ("interleaved", "zb-h1")
BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRADIENT)


@st.composite
def built(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    stages = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if name in CHUNKED else 1
    microbatches = draw(st.integers(1, 20))
    if chunks > 1:
        assume(microbatches % max(1, microbatches // stages) == 0)
    waiting = name == "interleaved" and microbatches >= stages
    p2p = draw(st.sampled_from(P2P_MODES)) if waiting else "asynchronous"
    return build_schedule(name, stages, microbatches, chunks, p2p)


def makespan(schedule: Schedule, cost: dict[Kind, float]) -> float:
    durations = [cost[i.kind] for i in schedule.instructions]
    return float(max(start_times(schedule, durations) + durations))


def in_flight(row: tuple[Instruction, ...], released_by: tuple[Kind, ...]) -> int:
    held = itertools.accumulate(
        1 if i.kind is Kind.FORWARD else -1 if i.kind in released_by else 0 for i in row
    )
    return max(held)


@settings(deadline=None)
@given(built())
def test_every_built_schedule_is_complete_and_can_be_executed(schedule: Schedule) -> None:
    validate_schedule(schedule)
    split = schedule.name == "zb-h1"
    kinds = "FIW" if split else "FB"
    for stage, row in enumerate(schedule.order):
        wanted = {
            Instruction(stage, Kind(kind), microbatch, chunk)
            for kind in kinds
            for microbatch in range(schedule.microbatches)
            for chunk in range(schedule.chunks)
        }
        assert set(row) == wanted
        assert len(row) == len(wanted)


@settings(deadline=None)
@given(built())
def test_a_built_schedule_survives_its_file_form_with_its_signature(schedule: Schedule) -> None:
    again = Schedule.from_dict(schedule.to_dict())
    assert again == schedule
    assert again.signature == schedule.signature


@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(
    stages: int, rounds: int, chunks: int
) -> None:
    """Narayanan et al. 2021, section 2.2.2: the bubble is (p - 1) (tf + tb) / v."""
    microbatches = stages * rounds
    plain = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
    chunked = {kind: time / chunks for kind, time in plain.items()}
    work = 3.0 * microbatches
    bubble = makespan(build_1f1b(stages, microbatches), plain) - work
    assert bubble == pytest.approx((stages - 1) * 3.0)
    interleaved = makespan(build_interleaved(stages, microbatches, chunks), chunked) - work
    assert interleaved == pytest.approx((stages - 1) * 3.0 / chunks)


@given(st.integers(1, 8), st.integers(0, 12))
def test_zero_bubble_h1_has_the_bubble_and_the_memory_of_its_paper(stages: int, more: int) -> None:
    """Qi et al. 2024, table 1: bubble (p - 1) (TF + TB - TW), memory as 1F1B."""
    microbatches = stages + more
    schedule = build_zb_h1(stages, microbatches)
    cost = {Kind.FORWARD: 1.0, Kind.INPUT_GRADIENT: 1.0, Kind.WEIGHT_GRADIENT: 1.0}
    assert makespan(schedule, cost) - 3.0 * microbatches == pytest.approx(stages - 1)
    whole = build_1f1b(stages, microbatches)
    most = max(in_flight(row, (Kind.BACKWARD,)) for row in whole.order)
    assert all(in_flight(row, (Kind.WEIGHT_GRADIENT,)) <= most for row in schedule.order)


def test_weight_gradients_follow_the_order_of_their_input_gradients() -> None:
    for row in build_zb_h1(4, 8, chunks=2).order:
        before = [i._replace(kind=Kind.FORWARD) for i in row if i.kind is Kind.INPUT_GRADIENT]
        after = [i._replace(kind=Kind.FORWARD) for i in row if i.kind is Kind.WEIGHT_GRADIENT]
        assert before == after


def test_a_small_zero_bubble_schedule_in_full() -> None:
    rows = [" ".join(map(str, row)) for row in build_zb_h1(2, 3).order]
    assert rows == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_a_small_interleaved_schedule_in_full() -> None:
    rows = [" ".join(map(str, row)) for row in build_interleaved(2, 2, 2).order]
    assert rows == [
        "0F0 0F1 0F0.1 0F1.1 0B0.1 0B1.1 0B0 0B1",
        "1F0 1F1 1F0.1 1B0.1 1F1.1 1B1.1 1B0 1B1",
    ]


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 24), st.integers(2, 3), st.integers(-1, 26))
def test_a_group_is_refused_or_gives_a_schedule_that_can_be_executed(
    stages: int, microbatches: int, chunks: int, group: int
) -> None:
    allowed = stages <= group <= microbatches and not 0 < microbatches % group < stages
    if allowed:
        validate_schedule(build_interleaved(stages, microbatches, chunks, group))
    else:
        with pytest.raises(ScheduleError, match=f"a group of {group} "):
            build_interleaved(stages, microbatches, chunks, group)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "message"),
    [
        ("zb-h2", 2, 2, 1, "unknown schedule 'zb-h2'; use one of gpipe, 1f1b, interleaved, zb-h1"),
        ("1f1b", 0, 2, 1, "stages is 0 and must be at least 1"),
        ("1f1b", 2, -1, 1, "microbatches is -1 and must be at least 1"),
        ("interleaved", 2, 2, 0, "chunks is 0 and must be at least 1"),
        ("1f1b", 2, 2, 2, "1f1b has one chunk on a stage and 2 are asked for; use interleaved or"),
        ("interleaved", 4, 11, 2, "11 microbatches on 4 stages with 2 chunks cannot be split"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_sentence(
    name: str, stages: int, microbatches: int, chunks: int, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, stages, microbatches, chunks)


@pytest.mark.parametrize(
    ("name", "p2p", "message"),
    [
        ("interleaved", "eager", "unknown p2p mode 'eager'; use one of asynchronous, overlapped, "),
        ("interleaved", "blocking", "4 microbatches on 5 stages with 2 chunks are too few"),
        ("1f1b", "blocking", "1f1b is planned without waits .* and blocking is asked for; use int"),
    ],
)
def test_a_p2p_mode_that_cannot_be_is_refused(name: str, p2p: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, 5, 4, 2 if name == "interleaved" else 1, p2p)
