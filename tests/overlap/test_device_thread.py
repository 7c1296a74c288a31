"""On an accelerator the autograd engine has a thread of its own for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils import backend_registration

from tests.overlap import device_thread_case
from tests.overlap.ranks import Ranks, ranks

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot have an accelerator written in Python",
)
NANOBATCHES = {"kareus-nanobatch-0", "kareus-nanobatch-1"}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """Ranks of their own: the backend stays registered in its process."""
    with ranks(2) as group:
        yield group


@pytest.mark.parametrize("recompute", [False, True])
def test_every_backward_runs_on_its_nanobatch_thread(two_ranks: Ranks, recompute: bool) -> None:
    for found in two_ranks.run(device_thread_case.overlapped, recompute):
        assert found["max_rel_error"] <= 1e-12
        assert found["launches_as_planned"]
        assert found["backward_launches"] > 0
        assert found["threads"] == NANOBATCHES
        assert len(found["engine_threads"]) == 1
        assert "MainThread" not in found["engine_threads"], "the engine has a device thread"


@pytest.mark.parametrize("recompute", [False, True])
def test_with_the_engine_s_threads_it_would_hang(recompute: bool) -> None:
    with ranks(2) as group:
        found = group.run(device_thread_case.without_protection, recompute)
    assert found == [(True, True)] * 2
