"""Through the real session: every setting reaches its instruction, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.modes import check_modes
from tests.integrations.test_megatron_order import OVERLAPPED
from tests.integrations.world import run_world

WORK_SCALE = 1e3
MEGATRON_CASES = [
    {"pp": 4, "chunks": 2, "microbatches": 8},
    {"pp": 2, "tp": 2, "microbatches": 4},
]
MORE_MEGATRON_CASES = [
    {"pp": 4, "microbatches": 8},
    {"pp": 2, "microbatches": 5},
    {"pp": 2, "chunks": 2, "microbatches": 6, "config": OVERLAPPED},
]
TORCH_CASES = [
    {"name": "ScheduleInterleavedZeroBubble", "chunks": 2, "microbatches": 8},
    {"name": "ScheduleDualPipeV", "chunks": 2, "microbatches": 8},
]
MORE_TORCH_CASES = [
    {"name": "Schedule1F1B", "chunks": 1, "microbatches": 5},
    {"name": "ScheduleInterleaved1F1B", "chunks": 2, "microbatches": 8},
    {"name": "ScheduleZBVZeroBubble", "chunks": 2, "microbatches": 8},
]


def check(function: str, cases: list[dict[str, Any]], folder: Path) -> None:
    check_modes(run_world(function, 4, cases=cases, folder=str(folder), work_scale=WORK_SCALE))


@pytest.mark.parametrize(
    "cases", [MEGATRON_CASES, pytest.param(MORE_MEGATRON_CASES, marks=pytest.mark.slow)]
)
def test_megatron_settings_reach_their_instructions(
    tmp_path: Path, cases: list[dict[str, Any]]
) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    check("tests.integrations.megatron_cases:modes", cases, tmp_path)


@pytest.mark.parametrize(
    "cases", [TORCH_CASES, pytest.param(MORE_TORCH_CASES, marks=pytest.mark.slow)]
)
def test_torch_settings_reach_their_instructions(
    tmp_path: Path, cases: list[dict[str, Any]]
) -> None:
    check("tests.integrations.torch_cases:modes", cases, tmp_path)
