"""Schedules of torch.distributed.pipelining, run for real over gloo: what the hooks record."""

from __future__ import annotations

from typing import Any

import pytest

from kareus_pp.builders import build_schedule
from kareus_pp.schedule import Kind
from tests.integrations.test_megatron_order import as_schedule, check
from tests.integrations.world import run_world

CASES = [
    ("ScheduleGPipe", 1, 4),
    ("Schedule1F1B", 1, 5),
    ("Schedule1F1B", 1, 8),
    ("ScheduleInterleaved1F1B", 2, 8),
    ("ScheduleInterleaved1F1B", 2, 10),
    ("ScheduleLoopedBFS", 2, 4),
    ("ScheduleInterleavedZeroBubble", 1, 8),
    ("ScheduleInterleavedZeroBubble", 2, 8),
    ("ScheduleZBVZeroBubble", 2, 8),
    ("ScheduleDualPipeV", 2, 8),
]
RANKS = 4


@pytest.fixture(scope="module")
def recorded() -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    keys = ("name", "chunks", "microbatches")
    ranks = run_world(
        "tests.integrations.torch_cases:orders",
        RANKS,
        cases=[dict(zip(keys, case, strict=True)) for case in CASES],
    )
    return {case: [rank[number] for rank in ranks] for number, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_the_stream_is_torchs_own_and_nothing_else_changes(
    recorded: dict[tuple[str, int, int], list[dict[str, Any]]], case: tuple[str, int, int]
) -> None:
    check(case[0], recorded[case])
    assert all(rank["steps"] == 1 for rank in recorded[case]), "detached: no more is recorded"


@pytest.mark.parametrize(
    ("case", "built"),
    [
        (("ScheduleGPipe", 1, 4), ("gpipe", 4, 4)),
        (("Schedule1F1B", 1, 8), ("1f1b", 4, 8)),
        (("ScheduleInterleaved1F1B", 2, 8), ("interleaved", 4, 8, 2)),
        (("ScheduleInterleaved1F1B", 2, 10), ("interleaved", 4, 10, 2)),
        (("ScheduleInterleavedZeroBubble", 1, 8), ("zb-h1", 4, 8)),
        (("ScheduleInterleavedZeroBubble", 2, 8), ("zb-h1", 4, 8, 2)),
    ],
)
def test_a_recorded_schedule_has_the_signature_of_the_built_one(
    recorded: dict[tuple[str, int, int], list[dict[str, Any]]],
    case: tuple[str, int, int],
    built: tuple[Any, ...],
) -> None:
    assert as_schedule(recorded[case]).signature == build_schedule(*built).signature


def test_split_backwards_are_kinds_of_their_own(
    recorded: dict[tuple[str, int, int], list[dict[str, Any]]],
) -> None:
    kinds = {i.kind for i in as_schedule(recorded["ScheduleZBVZeroBubble", 2, 8]).instructions}
    assert {Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT} <= kinds


def test_v_shaped_schedules_go_there_and_back(
    recorded: dict[tuple[str, int, int], list[dict[str, Any]]],
) -> None:
    for case in (("ScheduleZBVZeroBubble", 2, 8), ("ScheduleDualPipeV", 2, 8)):
        assert as_schedule(recorded[case]).model_order == (
            *((stage, 0) for stage in range(RANKS)),
            *((stage, 1) for stage in reversed(range(RANKS))),
        )
