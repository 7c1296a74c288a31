"""The losses of 50 steps are the same bits, whatever the plugin does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kareus_pp.runtime.events import read_events
from tests.integration.launcher import ROOT, deepspeed
from tests.integration.test_deepspeed_launcher import EXAMPLE, STAGES, write_plan

pytest.importorskip("deepspeed")
STEPS = 50


def train(folder: Path, kareus: dict[str, Any] | None) -> tuple[list[str], set[str]]:
    """The lines of the loss log, and the phases that the steps were in; None: plugin off."""
    folder.mkdir()
    config = json.loads((ROOT / "configs" / "deepspeed_demo.json").read_text())
    config["gradient_accumulation_steps"] = 4
    config["kareus"] = {"output": str(folder / "kareus"), "device": "emulated", **(kareus or {})}
    (folder / "config.json").write_text(json.dumps(config))
    launch = [] if kareus is None else ["--module", "kareus_pp.launch"]
    done = deepspeed(
        *(*launch, EXAMPLE, "--backend", "gloo", "--stages", str(STAGES), "--layers", "2"),
        *("--width", "32", "--deepspeed_config", str(folder / "config.json")),
        *("--steps", str(STEPS), "--log", str(folder / "loss.jsonl")),
        folder=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = folder / "kareus" / "events-rank0.jsonl"
    phases = {e["phase"] for e in read_events(events) if e["event"] == "step"} if kareus else set()
    return (folder / "loss.jsonl").read_text().splitlines(), phases


def test_losses_are_bit_identical(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json")
    # Steps of about a quarter of a second, so that some frequency plans are tried in 50 of them.
    slow = {"work_scale": 300000, "sequence_length": 64}
    profiling = {"plans": 2, "iterations_per_plan": 1}
    off, _ = train(tmp_path / "off", None)
    applying, applied = train(
        tmp_path / "applying", {"mode": "apply", "plan": str(tmp_path / "plan.json")}
    )
    profiling_losses, profiled = train(
        tmp_path / "profiling", {"mode": "profile", "profiling": profiling, "emulated": slow}
    )
    assert len(off) == STEPS
    assert json.loads(off[-1])["loss"] < json.loads(off[0])["loss"]
    assert applied == {"observe", "apply"}
    assert profiled >= {"observe", "profile"}
    assert applying == off
    assert profiling_losses == off
