"""Trains the same way with the plugin off, observing and applying a plan, through the real session.

What an adapter's tests bring is a `Training`: how to start anew, how to step, how to attach.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from kareus_pp.plan import Plan
from kareus_pp.runtime.events import read_events
from kareus_pp.schedule import Instruction, Schedule
from kareus_pp.setting import Setting

CLOCKS_MHZ = (1410, 1200, 1005)
STEPS = 20
_DEADLINE_S = 60.0


class Training(Protocol):
    """One way to train: a framework, a schedule, a small model."""

    def restart(self) -> None:
        """The model as it was before the first step."""

    def step(self, seed: int) -> tuple[list[float], list[str]]:
        """One step that updates the parameters; losses, and a digest of every gradient."""

    def attach(self, config: dict[str, Any]) -> None: ...

    def session(self) -> Any:
        """The session; None before it is there."""

    def detach(self) -> None: ...


def off_observe_apply(training: Training, folder: Path, work_scale: float) -> dict[str, Any]:
    """Train in all three modes; what was applied at the end, and whether anything else changed."""
    base = {"device": "emulated", "emulated": {"work_scale": work_scale}}
    observed, plan_file = folder / "observe", folder / "plan.json"

    def schedule_is_written() -> bool:
        return dist.get_rank() > 0 or any(observed.glob("schedule-*.json"))

    observing = run(
        training, {**base, "mode": "observe", "output": str(observed)}, schedule_is_written, STEPS
    )
    schedule = None
    if dist.get_rank() == 0:
        schedule = Schedule.load(next(observed.glob("schedule-*.json")))
        striped_plan(schedule).save(plan_file)
    dist.barrier()
    plan = Plan.load(plan_file)
    applied = folder / "apply"

    def is_applied() -> bool:
        found = training.session()
        return found is not None and found.phase == "apply"

    applying = run(
        training,
        {**base, "mode": "apply", "output": str(applied), "plan": str(plan_file)},
        is_applied,
        STEPS,
    )
    steps = min(len(observing), len(applying))
    training.restart()
    off = [training.step(seed) for seed in range(steps)]
    events = read_events(applied / f"events-rank{dist.get_rank()}.jsonl")
    applied_steps = [e for e in events if e["event"] == "step" and e["phase"] == "apply"]
    row = Instruction.parse(applied_steps[0]["instructions"][0].split()[0]).stage
    return {
        "equal": off == observing[:steps] == applying[:steps],
        "steps": steps,
        "changes": off[0][1] != off[-1][1],
        "applied": [event["instructions"] for event in applied_steps],
        "expected": [
            f"{instruction} {setting.clock_mhz}"
            for instruction, setting in zip(
                plan.schedule.order[row], plan.settings[row], strict=True
            )
        ],
        "sources": sorted({event["source"] for event in applied_steps}),
        "warnings": [e for e in events if e["event"] in ("warning", "stand-down")],
    }


def run(
    training: Training, config: dict[str, Any], ready: Callable[[], bool], more: int
) -> list[tuple[list[float], list[str]]]:
    """Train until all ranks are ready, then `more` steps."""
    training.restart()
    training.attach(config)
    results: list[tuple[list[float], list[str]]] = []
    deadline = time.monotonic() + _DEADLINE_S
    try:
        while not all_ready(ready()):
            assert time.monotonic() < deadline, f"{config['mode']}: not ready in time"
            results.append(training.step(len(results)))
        results += [training.step(len(results) + n) for n in range(more)]
    finally:
        training.detach()
    return results


def all_ready(ready: bool) -> bool:
    """Whether this rank and all others are ready."""
    votes = torch.tensor(int(ready))
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes)


def striped_plan(schedule: Schedule) -> Plan:
    """A plan in which neighbouring instructions differ, and stages too."""
    rows = tuple(
        tuple(Setting(CLOCKS_MHZ[(stage + step + step // 3) % 3]) for step, _ in enumerate(row))
        for stage, row in enumerate(schedule.order)
    )
    return Plan(schedule, rows)


def check_modes(results: list[list[dict[str, Any]]]) -> None:
    """What must hold on every rank for every case."""
    for result in (result for rank in results for result in rank):
        assert result["equal"], "losses or gradients differ between off, observing and applying"
        assert result["changes"], "training does not change anything"
        assert result["steps"] > STEPS
        assert len(result["applied"]) >= STEPS
        assert all(step == result["expected"] for step in result["applied"])
        assert len({text.split()[1] for text in result["expected"]}) == len(CLOCKS_MHZ)
        assert result["sources"] == ["emulated"]
        assert not result["warnings"]
