"""A DeepSpeed job whose GPUs are the stub's: real engine, real session, real guards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kareus_pp.runtime.events import read_events
from tests.device.conftest import machine as machine
from tests.integration.launcher import ROOT, deepspeed
from tests.stub.crash import plugin_processes
from tests.stub.nvml import LOCK, RESET, StubMachine


@pytest.mark.slow
def test_a_profiling_job_sets_clocks_through_its_guards(
    machine: StubMachine, tmp_path: Path
) -> None:
    config = json.loads((ROOT / "configs" / "deepspeed_demo.json").read_text())
    config["gradient_accumulation_steps"] = 4
    profiling = {"plans": 4, "iterations_per_plan": 2}
    config["kareus"] = {"device": "nvml", "output": "out", "profiling": profiling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = str(ROOT / "examples" / "train_gpt_deepspeed.py")
    arguments = ["--deepspeed_config", "config.json", "--stages", "2", "--steps", "250"]
    done = deepspeed("--module", "kareus_pp.launch", script, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        locked = {event.first for event in machine.events(operation=LOCK, device=rank)}
        assert len(locked) > 2, "the profile phase tries several clocks"
        assert machine.lock_mhz(rank) == 0
        steps = [
            event
            for event in read_events(tmp_path / "out" / f"events-rank{rank}.jsonl")
            if event["event"] == "step"
        ]
        assert {event["source"] for event in steps} == {"counter"}
        assert any(event["energy_j"] for event in steps)
    assert {event.operation for event in machine.events()} == {LOCK, RESET}
    assert not plugin_processes(tmp_path / "run")
