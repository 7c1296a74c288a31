"""Adapters synchronise nothing, put nothing on tensors, and say what a profile depends on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.world import run_world

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.fixture(scope="module")
def traced() -> list[dict[str, Any]]:
    return run_world("tests.integrations.megatron_traces:traces", 2)


def test_hooks_call_no_collective_and_no_synchronisation(traced: list[dict[str, Any]]) -> None:
    for rank in traced:
        assert rank["collectives"]["plain"] == rank["collectives"]["hooked"]


def test_hooks_put_nothing_on_tensors(traced: list[dict[str, Any]]) -> None:
    for rank in traced:
        assert rank["outputs"] > 0
        assert rank["on_tensors"] == []
        assert rank["kept"] == 0, "notes end with the step"


def test_effective_settings_are_in_the_fingerprint(traced: list[dict[str, Any]]) -> None:
    for rank in traced:
        plain, changed = rank["fingerprints"]
        assert plain["recompute_granularity"] == "None"
        assert changed["recompute_granularity"] == "full"
        assert {key for key in plain if plain[key] != changed.get(key)} >= {
            *("recompute_granularity", "recompute_method", "recompute_num_layers"),
        }
        needed = {"params_dtype", "bf16", "fp16", "tensor_model_parallel_size", "overlap_p2p_comm"}
        assert needed <= plain.keys()
        assert plain["use_distributed_optimizer"] == "False"
        assert plain["overlap_grad_reduce"] == "True"
