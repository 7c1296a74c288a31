"""Torch pipelining jobs evaluate and fail as they would without the plugin; what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kareus_pp.integrations import torch_pipelining

from kareus_pp.errors import ConfigError
from tests.integrations.world import run_world


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("life")
    return run_world("tests.integrations.torch_life:life", 2, folder=str(folder))


def test_evaluation_is_no_step(lived: list[dict[str, Any]]) -> None:
    for rank in lived:
        assert rank["equal"]
        seen = sorted(rank["events"][:2]), sorted(rank["events"])
        assert seen[1] == ["evaluation", "resume", "step", "step"]


def test_attaching_twice_is_attaching_once(lived: list[dict[str, Any]]) -> None:
    assert all(rank["same"] for rank in lived)


def test_detaching_leaves_nothing_behind(lived: list[dict[str, Any]]) -> None:
    assert all(rank["traces"] == [] for rank in lived)


def test_an_exception_of_the_users_passes_through(lived: list[dict[str, Any]]) -> None:
    for rank in lived:
        assert rank["exception"] == [
            *("step_begin 4", "step_abort", "raised"),
            *("step_begin 4", "step_end", "close"),
        ]


def test_what_is_no_schedule_is_named() -> None:
    with pytest.raises(TypeError, match="got int"):
        torch_pipelining.attach(3, {})


def test_a_torch_without_the_hooks_is_refused() -> None:
    stage = SimpleNamespace(
        stage_index=0, forward_one_chunk=lambda fwd_chunk_id: 0, backward_one_chunk=lambda loss: 0
    )
    schedule = SimpleNamespace(_stage=stage, step=lambda: 0)
    with pytest.raises(ConfigError, match=r"no backward_one_chunk with .*use torch 2\.\d or newer"):
        torch_pipelining.attach(schedule, {})


def test_switched_off_nothing_is_hooked() -> None:
    schedule = SimpleNamespace(_stage=SimpleNamespace(stage_index=0), step=lambda: 0)
    before = dict(schedule.__dict__)
    assert torch_pipelining.attach(schedule, {"enabled": False}) is None
    assert schedule.__dict__ == before
