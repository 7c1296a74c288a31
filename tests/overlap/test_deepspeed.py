"""Overlap leaves DeepSpeed's training as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.overlap import deepspeed_case
from tests.overlap.ranks import Ranks, ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    pytest.importorskip("deepspeed")
    with ranks(4, timeout_s=280) as group:  # the first call compiles DeepSpeed's operator
        yield group


def check(four_ranks: Ranks, case: str) -> None:
    for row in four_ranks.run(deepspeed_case.train, case, **deepspeed_case.CASES[case]):
        assert row["max_rel_error"] <= 1e-6, row
        assert row["reasons"] == {}
        assert row["executed"]["forward", "split"] == 12
        assert row["executed"]["backward", "split"] == 12


def test_parameters_after_four_steps(four_ranks: Ranks) -> None:
    check(four_ranks, "column-parallel in order")


@pytest.mark.slow
@pytest.mark.parametrize("case", deepspeed_case.CASES)
def test_parameters_in_every_case(four_ranks: Ranks, case: str) -> None:
    check(four_ranks, case)


def test_refusals_are_in_words(four_ranks: Ranks) -> None:
    for found in four_ranks.run(deepspeed_case.refusals):
        for case, words in deepspeed_case.REFUSALS.items():
            assert words in found[case]
        assert found[""] == ""
    for said in four_ranks.run(deepspeed_case.without_tensor_parallel_layers):
        assert "LinearLayer and LinearAllreduce" in said


def test_a_refused_module_trains_as_it_did_and_says_why_once(four_ranks: Ranks) -> None:
    for found in four_ranks.run(deepspeed_case.refused_training):
        assert found["equal"]
        assert found["split"] == 0
        assert len(found["messages"]) == 1
        assert "Domino" in found["messages"][0]


def test_the_settings_of_a_plan_file_reach_the_executor(four_ranks: Ranks, tmp_path: Path) -> None:
    """Through the engine's session, on emulated devices, with clocks beside them."""
    for row in four_ranks.run(deepspeed_case.planned, str(tmp_path)):
        assert row["max_rel_error"] <= 1e-5, row
        assert row["loss_error"] <= 1e-5
        assert row["whole_steps"]
        assert row["overlapped_steps"] >= 10, row
        assert row["different"] >= 7
        assert row["launches_as_planned"]
        assert row["reasons"] == {}
