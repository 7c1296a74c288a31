"""Overlap leaves DeepSpeed's training as it is."""

from __future__ import annotations

from collections.abc import Iterator

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
