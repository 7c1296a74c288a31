"""The life of a Megatron job on its ranks: evaluate, save, ramp up, resume, fail."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kareus_pp.integrations import megatron
from megatron.core import dist_checkpointing

from examples.megatron_on_cpu import megatron_on_cpu
from kareus_pp.builders import build_1f1b
from kareus_pp.plan import Plan
from kareus_pp.runtime.events import read_events
from tests.integrations import megatron_cases as cases
from tests.integrations.modes import all_ready, striped_plan

PP, MICROBATCHES, RAMPED_UP = 2, 4, 6
EMULATED = {"device": "emulated", "emulated": {"work_scale": 1e3}}


class Job:
    """Trains, and notes what it did so that the same can be done without the plugin."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.losses: list[list[float]] = []
        self.log: list[tuple[str, int]] = []
        self.restart()

    def restart(self) -> None:
        self.models = cases.build(PP)

    def train(self, microbatches: int, steps: int = 1) -> None:
        for _ in range(steps):
            seed = len(self.log)
            self.losses.append(cases.one_step(self.models, microbatches, seed)[0])
            cases.update(self.models)
            self.log.append(("train", microbatches))

    def small(self, _: int = 0) -> None:
        """A step of microbatches of another shape."""
        with mock.patch.object(cases, "BATCH", 1):
            seed = len(self.log)
            self.losses.append(cases.one_step(self.models, MICROBATCHES, seed)[0])
            cases.update(self.models)
            self.log.append(("small", 0))

    def train_until_applied(self) -> None:
        deadline = time.monotonic() + 60.0
        while not all_ready(megatron.session() is not None and megatron.session().phase == "apply"):
            assert time.monotonic() < deadline, "the plan was not applied in time"
            self.train(MICROBATCHES)

    def evaluate(self, _: int = 0) -> None:
        for seed in (100, 101):
            self.losses.append(cases.run_step(self.models, 3, seed, forward_only=True))
        self.log.append(("evaluate", 0))

    def save(self, _: int = 0) -> None:
        self._checkpoint.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(self.models[0].sharded_state_dict(), str(self._checkpoint))
        self.log.append(("save", 0))

    def load(self, _: int = 0) -> None:
        self.restart()
        state = dist_checkpointing.load(self.models[0].sharded_state_dict(), str(self._checkpoint))
        self.models[0].load_state_dict(state)
        self.log.append(("load", 0))

    @property
    def _checkpoint(self) -> Path:
        return self._folder / "checkpoint"

    def replay(self, log: list[tuple[str, int]]) -> None:
        for what, number in log:
            getattr(self, what)(number)


def life(folder: str) -> dict[str, Any]:
    """Train, evaluate, save, ramp up and resume with a plan; the same without the plugin."""
    place = Path(folder)
    cases.parallel(PP)
    plan_file = place / "plan.json"
    if dist.get_rank() == 0:
        striped_plan(build_1f1b(PP, MICROBATCHES)).save(plan_file)
    dist.barrier()
    config = {**EMULATED, "mode": "apply", "plan": str(plan_file)}
    with megatron_on_cpu():
        job = Job(place / "on")
        megatron.attach({**config, "output": str(place / "first")})
        job.train_until_applied()
        job.train(MICROBATCHES, 2)
        job.evaluate()
        job.train(MICROBATCHES, 2)
        job.save()
        job.train(MICROBATCHES, 2)
        job.train(RAMPED_UP, 5)
        job.small()
        job.train(MICROBATCHES, 3)
        megatron.detach()
        megatron.attach({**config, "output": str(place / "resumed")})
        job.load()
        job.train_until_applied()
        job.train(MICROBATCHES, 2)
        megatron.detach()
        off = Job(place / "off")
        off.replay(job.log)
    plan = Plan.load(plan_file)
    stage = cases.parallel_state.get_pipeline_model_parallel_rank()
    row = zip(plan.schedule.order[stage], plan.settings[stage], strict=True)
    rank = dist.get_rank()
    return {
        "equal": off.losses == job.losses,
        "planned": [f"{instruction} {setting.clock_mhz}" for instruction, setting in row],
        **{
            name: read_events(place / name / f"events-rank{rank}.jsonl")
            for name in ("first", "resumed")
        },
    }


class UserError(Exception):
    """Raised by a user's forward step."""


def trouble(folder: str) -> dict[str, Any]:
    """A user's exception, an output that nobody knows, and CUDA graphs of full iterations."""
    cases.parallel(1)
    with megatron_on_cpu():
        return {
            "exception": user_exception(Path(folder, "exception")),
            "unknown": unknown_output(Path(folder, "unknown")),
            "graphs": full_iteration_graphs(Path(folder, "graphs")),
        }


def attached(folder: Path) -> None:
    output = folder / str(dist.get_rank())
    megatron.attach({"device": "dry-run", "mode": "observe", "output": str(output)})


def user_exception(folder: Path) -> dict[str, Any]:
    models = cases.build(1)
    plain = cases.one_step(models, 3)
    count = itertools.count()

    def failing(data: Any, model: Any) -> Any:
        if next(count) == 4:
            raise UserError
        return own(data, model)

    own = cases.forward_step
    attached(folder)
    with mock.patch.object(cases, "forward_step", failing):
        first = cases.one_step(models, 3)
        try:
            cases.one_step(models, 3)
            raised = False
        except UserError:
            raised = True
        again = cases.one_step(models, 3)
    megatron.detach()
    events = read_events(next(folder.glob(f"{dist.get_rank()}/events-*.jsonl")))
    return {
        "raised": raised,
        "equal": plain == first == again,
        "instructions": [len(e["instructions"]) for e in events if e["event"] == "step"],
        "suspended": [e["reason"] for e in events if e["event"] == "suspend"],
    }


def unknown_output(folder: Path) -> dict[str, Any]:
    models = cases.build(1)
    plain = cases.one_step(models, 3)
    attached(folder)
    with mock.patch.object(megatron, "_identity", side_effect=itertools.count()):
        hooked = cases.one_step(models, 3)
    after = cases.one_step(models, 3)
    session = megatron.session()
    down = session.standing_down if session is not None else "no session"
    megatron.detach()
    return {"equal": plain == hooked == after, "down": down}


def full_iteration_graphs(folder: Path) -> dict[str, Any]:
    models = cases.build(1)
    models[0].config.cuda_graph_impl = "full_iteration"
    attached(folder)
    try:
        cases.one_step(models, 3)
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    megatron.detach()
    return {"status": status}
