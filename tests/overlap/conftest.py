"""Groups of processes shared by the overlap tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.overlap.ranks import Ranks, ranks

NEW_VERSION = "KAREUS_PP_MEGATRON_020"


def _path(version: str) -> str:
    if version == "installed":
        return ""
    path = os.environ.get(NEW_VERSION, "")
    if not path:
        pytest.skip(f"{NEW_VERSION} does not name a Megatron-LM 0.20 checkout")
    return path


@pytest.fixture(scope="session", params=["installed", "0.20"])
def two_megatron_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks with each version of Megatron-Core."""
    pytest.importorskip("megatron.core")
    with ranks(2, _path(request.param)) as group:
        yield group


@pytest.fixture(scope="session", params=["installed", "0.20"])
def four_megatron_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four ranks with each version of Megatron-Core."""
    pytest.importorskip("megatron.core")
    with ranks(4, _path(request.param)) as group:
        yield group


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks without a framework."""
    with ranks(2) as group:
        yield group
