"""Whole jobs of two stages under the real DeepSpeed launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from kareus_pp.builders import build_1f1b
from kareus_pp.plan import Plan
from kareus_pp.runtime.events import read_events
from kareus_pp.setting import Setting
from tests.integration.launcher import JOBS, ROOT, deepspeed, ours

pytest.importorskip("deepspeed")
STAGES = 2
EXAMPLE = str(ROOT / "examples" / "train_gpt_deepspeed.py")


def write_plan(path: Path, microbatches: int = 4) -> Plan:
    """A plan that changes the clock at every instruction."""
    schedule = build_1f1b(STAGES, microbatches)
    clocks = (1200, 1005)
    plan = Plan(
        schedule,
        tuple(
            tuple(Setting(clocks[step % 2]) for step, _ in enumerate(row)) for row in schedule.order
        ),
    )
    plan.save(path)
    return plan


class Lifecycle:
    """One run of jobs/lifecycle.py, looked at by several tests."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.plan = write_plan(folder / "plan.json")
        kareus = {
            "device": "emulated",
            "mode": "apply",
            "plan": str(folder / "plan.json"),
            "output": str(folder / "kareus"),
            "emulated": {"work_scale": 100},
        }
        (folder / "config.json").write_text(json.dumps({"kareus": kareus}))
        self.done = deepspeed(
            *("--module", "kareus_pp.launch", str(JOBS / "lifecycle.py")),
            *(str(folder / "config.json"), str(folder)),
            folder=folder,
            python=python,
        )
        self.ranks = [self._result(folder / f"rank{rank}.json") for rank in range(STAGES)]
        self.events = [
            read_events(folder / "kareus" / f"events-rank{rank}.jsonl") for rank in range(STAGES)
        ]

    def _result(self, path: Path) -> dict[str, Any]:
        assert path.is_file(), self.done.stdout + self.done.stderr
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def steps(self, rank: int) -> list[dict[str, Any]]:
        return [event for event in self.events[rank] if event["event"] == "step"]


@pytest.fixture(scope="module")
def lifecycle(tmp_path_factory: pytest.TempPathFactory) -> Lifecycle:
    return Lifecycle(tmp_path_factory.mktemp("lifecycle"))


def check_calls(lifecycle: Lifecycle) -> None:
    for rank, result in enumerate(lifecycle.ranks):
        four, six = (["step " + n, *result["own"][n], "end"] for n in "46")
        expected = [four, ["suspend evaluation", "resume"], four, six, six, six, four]
        expected.append(["suspend checkpoint", "resume", "step 4"])
        calls = list(chain(*expected))
        assert result["calls"][: len(calls)] == calls, rank
        rest = result["calls"][len(calls) :]
        # Rank 0 fails at the third load; rank 1 may have been killed before or after it noticed.
        assert rest[:2] == ["F0", "F1"][: len(rest)] or rank == 1
        if rank == 0:
            assert rest[-1] == "abort"
            assert "end" not in rest


def test_the_hooks_see_every_step_of_training_and_no_other(lifecycle: Lifecycle) -> None:
    check_calls(lifecycle)


def test_evaluation_does_not_move_the_plan(lifecycle: Lifecycle) -> None:
    for rank in range(STAGES):
        applied = [step for step in lifecycle.steps(rank) if step["phase"] == "apply"]
        assert len(applied) >= 3
        row = zip(lifecycle.plan.schedule.order[rank], lifecycle.plan.settings[rank], strict=True)
        planned = [f"{instruction} {setting.clock_mhz}" for instruction, setting in row]
        assert all(step["instructions"] == planned for step in applied)
        assert {step["key"] for step in applied} == {"4:"}


def test_another_number_of_microbatches_runs_at_default_clocks(lifecycle: Lifecycle) -> None:
    for rank in range(STAGES):
        changed = [step for step in lifecycle.steps(rank) if step["key"] == "6:"]
        assert len(changed) == 3
        assert {step["plan"] for step in changed} == {"default"}
        assert all(text.endswith(" default") for step in changed for text in step["instructions"])


def test_a_user_exception_ends_the_job_with_its_own_traceback(lifecycle: Lifecycle) -> None:
    assert lifecycle.done.returncode != 0
    assert "OSError: the disk with the data has gone" in lifecycle.done.stderr
    reasons = [e["reason"] for e in lifecycle.events[0] if e["event"] == "suspend"]
    assert reasons[-1] == "a step was aborted by an exception"
    assert lifecycle.events[0][-1]["event"] == "end"


def test_a_misspelt_key_ends_the_job_before_it_trains(tmp_path: Path) -> None:
    done = refused(tmp_path, {"modee": "observe"})
    (line,) = ours(done)
    assert line == (
        "kareus-pp: the 'kareus' object of the DeepSpeed config has an unknown key 'modee'; did "
        "you mean 'mode'? known keys: " + line.partition("known keys: ")[2]
    )


def test_a_malformed_plan_file_ends_the_job_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "kareus-pp/plan", "version": 1, "sett')
    done = refused(tmp_path, {"mode": "apply", "plan": str(tmp_path / "plan.json")})
    lines = [line for line in ours(done) if "dry-run" not in line]
    assert len(lines) == 1
    assert "plan.json' is not a plan file: it is not valid JSON" in lines[0]


def test_a_rank_without_its_device_stands_down_and_training_goes_on(tmp_path: Path) -> None:
    done = start_example(
        tmp_path, {"device": "emulated", "emulated": {"time_factors": [1.0]}}, "--steps", "10"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "loss.jsonl").read_text().splitlines()) == 10
    lines = ours(done)
    assert len([line for line in lines if line.startswith("[rank 1]")]) == 1
    told = "emulated.time_factors has 1 values and there is a stage 1"
    assert all(told in line for line in lines), lines
    reasons = [
        event["reason"]
        for event in read_events(tmp_path / "kareus" / "events-rank0.jsonl")
        if event["event"] == "stand-down"
    ]
    assert len(reasons) == 1
    assert told in reasons[0]


def refused(folder: Path, kareus: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Start the example with a `kareus` object that is wrong; no step may have run."""
    done = start_example(folder, kareus)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert not (folder / "loss.jsonl").exists()
    return done


def start_example(
    folder: Path, kareus: dict[str, Any], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run the example with a `kareus` object, in a folder of its own."""
    config = json.loads((ROOT / "configs" / "deepspeed_demo.json").read_text())
    config["kareus"] = {"output": str(folder / "kareus"), **kareus}
    (folder / "config.json").write_text(json.dumps(config))
    return deepspeed(
        *("--module", "kareus_pp.launch", EXAMPLE, "--backend", "gloo", "--stages", str(STAGES)),
        *("--deepspeed_config", str(folder / "config.json"), "--log", str(folder / "loss.jsonl")),
        *("--layers", "2", "--width", "16", "--length", "16"),
        *arguments,
        folder=folder,
    )
