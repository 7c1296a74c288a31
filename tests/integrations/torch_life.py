"""The life of a torch pipelining job on its ranks: evaluate, fail, detach."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kareus_pp.integrations import torch_pipelining

from kareus_pp.runtime.events import read_events
from tests.integrations import torch_cases as cases
from tests.integrations.recorder import Recorder


def life(folder: str) -> dict[str, Any]:
    """Train, evaluate, train; then an exception of the user's."""
    schedule = cases.build("ScheduleInterleaved1F1B", 2, 4)
    plain = cases.step(schedule, 4)
    output = Path(folder, str(dist.get_rank()))
    config = {"device": "dry-run", "mode": "observe", "output": str(output)}
    session = torch_pipelining.attach(schedule, config)
    same = torch_pipelining.attach(schedule, config) is session
    first = cases.step(schedule, 4)
    evaluate(schedule)
    second = cases.step(schedule, 4)
    torch_pipelining.detach(schedule)
    traces = [
        name
        for thing in (schedule, *cases.stages_of(schedule))
        for name in ("step", "forward_one_chunk", "backward_one_chunk", "_kareus_hooks")
        if name in thing.__dict__
    ]
    events = read_events(next(output.glob("events-*.jsonl")))
    return {
        "equal": plain == first == second,
        "same": same,
        "traces": traces,
        "events": [
            e.get("reason", "") or e["event"]
            for e in events
            if e["event"] in ("suspend", "resume", "step")
        ],
        "exception": exception(),
    }


def evaluate(schedule: Any) -> None:
    """Forward only, as torch's `eval` does."""
    stages = cases.stages_of(schedule)
    inputs, target = cases.batch(4)
    with torch.no_grad():
        schedule.eval(
            *([inputs] if any(stage.is_first for stage in stages) else []),
            **({"target": target} if any(stage.is_last for stage in stages) else {}),
        )


def exception() -> list[str]:
    """Every rank fails before it has sent anything."""
    schedule = cases.build("ScheduleInterleaved1F1B", 2, 4)
    recorder = Recorder()
    with mock.patch.object(torch_pipelining, "start_session", recorder.start):
        torch_pipelining.attach(schedule, {})
    with mock.patch.object(schedule, "_step_microbatches", side_effect=KeyError("user")):
        try:
            cases.step(schedule, 4)
        except KeyError:
            recorder.calls.append("raised")
    cases.step(schedule, 4)
    torch_pipelining.detach(schedule)
    return recorder.calls
