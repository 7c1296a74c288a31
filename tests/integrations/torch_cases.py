"""What ranks of a `torch.distributed.pipelining` world do in tests; see `world.run_world`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kareus_pp.integrations import torch_pipelining
from torch.distributed.pipelining import PipelineStage, schedules

from tests.integrations.modes import off_observe_apply
from tests.integrations.recorder import Recorder

WIDTH = 8
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def build(name: str, chunks: int, microbatches: int) -> Any:
    """A schedule of a small model with its stages on this rank."""
    torch.manual_seed(7)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        for _ in range(ranks * chunks)
    ]
    mine = [rank + ranks * chunk for chunk in range(chunks)]
    if name in V_SHAPED:
        mine = [rank, 2 * ranks - 1 - rank]
    stages = [PipelineStage(layers[i], i, len(layers), torch.device("cpu")) for i in mine]
    kind = getattr(schedules, name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    loss = torch.nn.functional.mse_loss
    return kind(stages[0] if single else stages, microbatches, loss_fn=loss)


def stages_of(schedule: Any) -> list[Any]:
    return getattr(schedule, "_stages", None) or [schedule._stage]


def batch(microbatches: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2 * microbatches, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def step(
    schedule: Any, microbatches: int, seed: int = 0, rate: float = 0.0
) -> tuple[list[float], list[str]]:
    """One iteration with plain gradient descent; returns losses and a digest of every gradient."""
    stages = stages_of(schedule)
    inputs, target = batch(microbatches, seed)
    losses: list[torch.Tensor] = []
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    schedule.step(
        *([inputs] if has_first else []),
        **({"target": target, "losses": losses} if has_last else {}),
    )
    digests = []
    for stage in stages:
        for parameter in stage.submod.parameters():
            digests.append(hashlib.sha256(parameter.grad.numpy().tobytes()).hexdigest())
            with torch.no_grad():
                parameter -= rate * parameter.grad
            parameter.grad = None
    return [float(loss) for loss in losses], digests


def own_order(schedule: Any, microbatches: int) -> list[str]:
    """This rank's order: torch's own generator, or a tap on the loss calls around each chunk."""
    if isinstance(schedule, schedules.PipelineScheduleSingle):
        return tapped_order(schedule, microbatches)
    actions: list[Any] = []
    for action in schedule.pipeline_order[dist.get_rank()]:
        if action is not None:
            actions += getattr(action, "sub_actions", None) or [action]
    return [
        text_of(schedule, a.stage_index, LETTERS[a.computation_type.name], a.microbatch_index)
        for a in actions
        if a.computation_type.name in LETTERS
    ]


def tapped_order(schedule: Any, microbatches: int) -> list[str]:
    """Single-stage schedules have no (1F1B: a wrong) list of actions: note their own calls.

    They compute the loss right after a forward and fetch it right before a backward.
    """
    seen: list[str] = []
    after_forward, before_backward = schedule._maybe_compute_loss, schedule._maybe_get_loss

    def forward(stage: Any, output: Any, target: Any, microbatch: int, *more: Any) -> Any:
        seen.append(text_of(schedule, stage.stage_index, "F", microbatch))
        return after_forward(stage, output, target, microbatch, *more)

    def backward(stage: Any, microbatch: int) -> Any:
        seen.append(text_of(schedule, stage.stage_index, "B", microbatch))
        return before_backward(stage, microbatch)

    taps = {"_maybe_compute_loss": forward, "_maybe_get_loss": backward}
    with mock.patch.multiple(schedule, **taps):
        step(schedule, microbatches)
    return seen


LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def text_of(schedule: Any, stage_index: int, letter: str, microbatch: int) -> str:
    """Our text form of one of torch's actions."""
    chunk = sorted(stage.stage_index for stage in stages_of(schedule)).index(stage_index)
    return f"{dist.get_rank()}{letter}{microbatch}" + (f".{chunk}" if chunk else "")


def orders(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case the recorded stream, torch's own order, and what the hooks changed."""
    results = []
    for case in cases:
        schedule = build(case["name"], case["chunks"], case["microbatches"])
        plain = step(schedule, case["microbatches"])
        own = own_order(schedule, case["microbatches"])
        recorder = Recorder()
        with mock.patch.object(torch_pipelining, "start_session", recorder.start):
            torch_pipelining.attach(schedule, {})
            hooked = step(schedule, case["microbatches"])
            torch_pipelining.detach(schedule)
        after = step(schedule, case["microbatches"])
        results.append(
            {
                "recorded": recorder.stream(),
                "exchanges": recorder.exchanges,
                "own": own,
                "equal": plain == hooked == after,
                "gradients": len(plain[1]),
                "finite": all(map(math.isfinite, plain[0])),
                "steps": len(recorder.steps),
                "topology": recorder.topology,
                "calls": recorder.calls,
            }
        )
    return results


class Training:
    """A small model under a schedule of torch; see `modes.Training`."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._case = case

    def restart(self) -> None:
        self._schedule = build(**self._case)

    def step(self, seed: int) -> tuple[list[float], list[str]]:
        return step(self._schedule, self._case["microbatches"], seed, rate=0.1)

    def attach(self, config: dict[str, Any]) -> None:
        self._session = torch_pipelining.attach(self._schedule, config)

    def session(self) -> Any:
        return self._session

    def detach(self) -> None:
        torch_pipelining.detach(self._schedule)


def modes(cases: Sequence[dict[str, Any]], folder: str, work_scale: float) -> list[dict[str, Any]]:
    """For each case: off, observing, applying."""
    return [
        off_observe_apply(Training(case), Path(folder, str(number)), work_scale)
        for number, case in enumerate(cases)
    ]
