"""Overlap leaves Megatron-Core's loss and gradients as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.overlap import cases, negative, pipeline_case, session_case
from tests.overlap.ranks import Ranks

SETTINGS = 75


def check(row: dict[str, Any]) -> None:
    float32 = "float32" in row["case"]
    assert row["max_rel_error"] <= (1e-5 if float32 else 1e-12), row
    assert row["reasons"] == {}
    assert row["all_slots_hit"], row["slots_hit"]
    assert row["launches_as_planned"], row
    assert row.get("random_states_kept", True), row


@pytest.mark.parametrize("case", cases.EQUALITY)
def test_equality(two_megatron_ranks: Ranks, case: str) -> None:
    for row in two_megatron_ranks.run(cases.equality, case, **cases.EQUALITY[case]):
        check(row)
        if case.startswith("compiled"):
            # None where triton is missing and this Megatron needs a stand-in for it.
            assert row["compiled"] is None or row["compiled"] > 0
            assert row["compiled"] or not row["version"].startswith("megatron-core 0.16")


@pytest.mark.parametrize("case", cases.DROPOUT)
def test_dropout(two_megatron_ranks: Ranks, case: str) -> None:
    for row in two_megatron_ranks.run(cases.dropout, case, cases.DROPOUT[case]):
        check(row)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.EQUALITY)
def test_equality_with_many_settings(two_megatron_ranks: Ranks, case: str) -> None:
    arguments = cases.EQUALITY[case]
    for row in two_megatron_ranks.run(cases.equality, case, settings=SETTINGS, **arguments):
        check(row)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.DROPOUT)
def test_dropout_with_many_settings(two_megatron_ranks: Ranks, case: str) -> None:
    rows = two_megatron_ranks.run(cases.dropout, case, cases.DROPOUT[case], settings=SETTINGS)
    for row in rows:
        check(row)


def test_grad_reduce_that_overlaps_the_backward(four_megatron_ranks: Ranks) -> None:
    for row in four_megatron_ranks.run(cases.grad_reduce, "overlap_grad_reduce"):
        check(row)


def test_another_setting_on_every_instruction(four_megatron_ranks: Ranks) -> None:
    rows = four_megatron_ranks.run(
        pipeline_case.pipeline, "1F1B", steps=3, microbatches=6, sequential_share=0.3
    )
    for row in rows:
        check(row)
        assert row["loss_error"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [None, 2])
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_twenty_steps(
    four_megatron_ranks: Ranks, virtual: int | None, microbatches: int, share: float
) -> None:
    rows = four_megatron_ranks.run(
        pipeline_case.pipeline, "20 steps", virtual, microbatches, sequential_share=share
    )
    for row in rows:
        check(row)
        assert row["loss_error"] == 0.0


@pytest.mark.parametrize("virtual", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_the_settings_of_a_plan_file_reach_the_executor(
    four_megatron_ranks: Ranks, tmp_path: Path, virtual: int | None
) -> None:
    """Through the real session, on emulated devices, with clocks beside them."""
    for row in four_megatron_ranks.run(session_case.planned, str(tmp_path), virtual):
        assert row["max_rel_error"] <= 1e-12
        assert row["loss_error"] == 0.0
        assert row["different"] >= 6 * (virtual or 1) + 1, "another setting on every instruction"
        assert row["overlapped_steps"] >= 20
        assert row["launches_as_planned"]
        assert row["reasons"] == {}
        assert row["phase"] == "apply"


def test_the_profile_phase_measures_the_overlap_that_the_blocks_offer(
    four_megatron_ranks: Ranks, tmp_path: Path
) -> None:
    """Rule 27: candidates found by the partition API, whole and jointly with clocks."""
    for row in four_megatron_ranks.run(session_case.profiled, str(tmp_path)):
        assert row["max_rel_error"] <= 1e-12
        assert row["offered"] == 4, "two forwards and two backwards"
        assert row["all_tried"]
        assert row["runs_of_each"] == {3}, "at three clocks"
        assert row["all_known"]
        assert row["split"] >= 2 * 3 * 2 * 4, "candidates, clocks, iterations, microbatches"
        assert row["serial"] == 0
        assert row["reasons"] == {}


@pytest.mark.parametrize("control", negative.CONTROLS)
def test_without_its_protection_it_fails(two_megatron_ranks: Ranks, control: str) -> None:
    """A test that cannot fail proves nothing: each protection is taken away."""
    fails = "as it must" if negative.CONTROLS[control].fault else "wrong numbers"
    assert two_megatron_ranks.run(negative.run, control) == [("", fails)] * 2


def test_grad_reduce_without_the_toggle_fails(four_megatron_ranks: Ranks) -> None:
    assert four_megatron_ranks.run(negative.run_grad_reduce) == ["as it must"] * 4


def test_detaching_restores_everything(two_megatron_ranks: Ranks) -> None:
    for found in two_megatron_ranks.run(negative.detach):
        assert found == {
            "gradients": True,
            "state_dict": True,
            "dict": True,
            "hooks": True,
            "c10d": True,
            "threads": True,
        }


@pytest.mark.parametrize("case", negative.FALLBACKS)
def test_fallback_is_said_once_in_words(two_megatron_ranks: Ranks, case: str) -> None:
    words = negative.FALLBACKS[case]
    for reasons, messages, split, equal in two_megatron_ranks.run(negative.fallback, case):
        assert not split
        assert equal
        assert len(reasons) == 1
        assert words in reasons[0]
        assert len(messages) == 1
        assert words in messages[0]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("nanobatch", [0, 1])
def test_an_exception_passes_and_leaves_the_executor_usable(
    two_megatron_ranks: Ranks, phase: str, nanobatch: int
) -> None:
    for error, restored in two_megatron_ranks.run(negative.exception, phase, nanobatch):
        assert "injected" in error
        assert restored <= 1e-12
