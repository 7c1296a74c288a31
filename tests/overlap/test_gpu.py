"""Overlap on GPUs: streams, events and communicators that limit SMs. Needs two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and there are {GPUS}"),
]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    """What the checks found on rank 0."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*run, "-m", "benchmarks.overlap_gpu_check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, object]] = json.loads(done.stdout[done.stdout.index("{") :])["rows"]
    return found


@pytest.mark.parametrize(
    "part", ["relative error", "thread blocks", "beside compute", "limit SMs", "soak"]
)
def test_what_overlap_needs_of_a_gpu(rows: list[dict[str, object]], part: str) -> None:
    chosen = [row for row in rows if part in str(row["check"])]
    assert chosen
    for row in chosen:
        assert row["ok"], row


def test_transformer_engine(rows: list[dict[str, object]]) -> None:
    (row,) = [row for row in rows if "Transformer Engine" in str(row["check"])]
    if row["ok"] is None:
        pytest.skip(f"Transformer Engine: {row['found']}")
    assert row["ok"], row
