"""Whatever ends a job, its GPUs are unlocked and nothing of the plugin stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stub import crash
from tests.stub.nvml import compiler

FEW = {
    ("kill -9 one rank", "torchrun"),
    ("kill -9 the launcher", "torchrun"),
    ("kill -9 the process groups", "torchrun"),
    ("SIGTERM to the command", "deepspeed"),
}
TABLE = [
    pytest.param(action, launcher, marks=() if (action, launcher) in FEW else (pytest.mark.slow,))
    for launcher in crash.LAUNCHERS
    for action in crash.ACTIONS
]


@pytest.mark.parametrize(("action", "launcher"), TABLE)
def test_every_gpu_is_unlocked_and_no_process_is_left(
    action: str, launcher: str, tmp_path: Path
) -> None:
    if compiler() is None:
        pytest.skip("no C compiler: the stub NVML cannot be built")
    if launcher == "deepspeed":
        pytest.importorskip("deepspeed")
    row = crash.crash(action, launcher, tmp_path / "job")
    assert row.unlocked_s is not None, "a GPU stayed locked"
    assert row.unlocked_s < 1.0
    assert row.left_processes == 0
    assert row.kept_clocks, "a rank that outlived its launcher lost its clocks"
    assert not list((tmp_path / "job" / "run").glob("*.json")), "a lease was left"
    if action in ("kill -9 the launcher",):
        assert row.outlived == crash.RANKS
