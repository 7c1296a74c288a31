"""Megatron jobs evaluate, save, ramp up, resume and fail as they would without the plugin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kareus_pp.errors import ConfigError
from tests.integrations.world import run_world

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from kareus_pp.integrations.megatron import refuse_full_iteration_graphs

TRAINED, RAMPED_UP, OTHER_SHAPE = "4:2x8", "6:2x8", "4:1x8"


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("life")
    return run_world("tests.integrations.megatron_life:life", 2, folder=str(folder))


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trouble")
    return run_world("tests.integrations.megatron_life:trouble", 2, folder=str(folder))


def steps(events: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "step" and event["key"] == key]


def test_losses_are_those_of_a_job_without_the_plugin(lived: list[dict[str, Any]]) -> None:
    assert all(rank["equal"] for rank in lived)


def test_evaluation_and_saving_run_at_default_clocks_and_are_no_steps(
    lived: list[dict[str, Any]],
) -> None:
    for rank in lived:
        what = [e["event"] for e in rank["first"] if e["event"] in ("suspend", "resume")]
        assert what == ["suspend", "resume"] * 2
        reasons = [e["reason"] for e in rank["first"] if e["event"] == "suspend"]
        assert reasons == ["evaluation", "checkpoint"]
        keys = {e["key"] for e in rank["first"] if e["event"] == "step"}
        assert keys == {TRAINED, RAMPED_UP, OTHER_SHAPE}


def test_the_plan_holds_after_evaluation_saving_and_ramp_up(lived: list[dict[str, Any]]) -> None:
    for rank in lived:
        applied = [e for e in steps(rank["first"], TRAINED) if e["phase"] == "apply"]
        assert len(applied) >= 9
        assert all(event["instructions"] == rank["planned"] for event in applied)
        last = [e for e in rank["first"] if e["event"] == "step"][-1]
        assert last["key"] == TRAINED
        assert last["phase"] == "apply"


def test_an_unknown_number_of_microbatches_runs_at_default_clocks(
    lived: list[dict[str, Any]],
) -> None:
    for rank in lived:
        ramped = steps(rank["first"], RAMPED_UP)
        assert len(ramped) == 5
        clocks = {text.split()[1] for event in ramped for text in event["instructions"]}
        assert clocks == {"default"}
        assert not [e for e in rank["first"] if e["event"] == "stand-down"]


def test_another_shape_runs_at_default_clocks(lived: list[dict[str, Any]]) -> None:
    for rank in lived:
        (step,) = steps(rank["first"], OTHER_SHAPE)
        assert {text.split()[1] for text in step["instructions"]} == {"default"}


def test_a_resumed_job_takes_the_plan_up_again(lived: list[dict[str, Any]]) -> None:
    for rank in lived:
        applied = [e for e in steps(rank["resumed"], TRAINED) if e["phase"] == "apply"]
        assert len(applied) >= 2
        assert all(event["instructions"] == rank["planned"] for event in applied)


def test_an_exception_of_the_users_passes_through(troubled: list[dict[str, Any]]) -> None:
    for rank in troubled:
        found = rank["exception"]
        assert found["raised"]
        assert found["equal"]
        assert found["instructions"] == [6, 6], "the aborted step is not a step"
        assert found["suspended"] == ["a step was aborted by an exception"]


def test_an_unknown_output_makes_the_rank_stand_down(troubled: list[dict[str, Any]]) -> None:
    for rank in troubled:
        assert rank["unknown"]["equal"]
        assert "no recorded forward" in rank["unknown"]["down"]


def test_full_iteration_graphs_end_the_job_before_it_trains(
    troubled: list[dict[str, Any]],
) -> None:
    assert [rank["graphs"]["status"] for rank in troubled] == [2, 2]


@pytest.mark.parametrize(
    "config",
    [
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [SimpleNamespace(name="full_iteration")]},
        {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"},
    ],
)
def test_full_iteration_graphs_are_refused_however_they_are_written(
    config: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="CUDA graphs of full iterations"):
        refuse_full_iteration_graphs(SimpleNamespace(**config))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cuda_graph_impl": "none", "cuda_graph_scope": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [SimpleNamespace(name="attn")]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": []},
    ],
)
def test_other_graphs_are_not(config: dict[str, Any]) -> None:
    refuse_full_iteration_graphs(SimpleNamespace(**config))
