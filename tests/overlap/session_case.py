"""Megatron-Core under the real session: a plan file whose overlap settings reach the executor."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kareus_pp.measure import load_runs
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.plan import Plan
from kareus_pp.profile import Profile
from kareus_pp.schedule import Instruction, Kind, Schedule
from kareus_pp.setting import SEQUENTIAL, Launch, OverlapSetting, Setting
from tests.overlap import megatron_cpu
from tests.overlap.cases import expected_launches
from tests.overlap.pipeline_case import Job, largest

CLOCKS_MHZ = (1410, 1200, 1005)
_LIMIT_S = 150.0


def planned(
    folder: str, virtual: int | None = None, microbatches: int = 4, steps: int = 20
) -> dict[str, Any]:
    """Observe, write a plan by hand, then train by it; every rank calls this.

    Args:
        folder: For the plan and what the session writes.
        virtual: Model chunks per rank; none: 1F1B without interleaving.
        microbatches: Microbatches of a step.
        steps: Steps that overlap on every rank.
    """
    from kareus_pp.integrations import megatron

    job = Job(virtual, microbatches, torch.float64)
    base = Path(folder)
    reference = job.step(0)
    common = {"device": "emulated", "overlap": {"enabled": True}}
    try:
        megatron.attach({**common, "mode": "observe", "output": str(base / "observed")})
        _until(job, lambda: next(base.glob("observed/schedule-*.json"), None) is not None)
        programs = [block.programs for block in _executor().blocks]
        megatron.detach()
        plan = _agreed_plan(job, base, programs)
        megatron.attach({**common, "plan": str(base / "plan.json"), "output": str(base / "out")})
        error, loss_error = 0.0, 0.0
        limit = time.monotonic() + _LIMIT_S
        while _fewest(_overlapped_steps(job, plan)) < steps:
            assert time.monotonic() < limit, (_session().phase, _session().standing_down)
            found = job.step(0)
            error = max(error, megatron_cpu.relative_error(found, reference))
            losses = [name for name in reference if name.startswith("loss")]
            loss_error = max(
                [loss_error, *(float((found[n] - reference[n]).abs()) for n in losses)]
            )
        executor = _executor()
        wanted = Counter[tuple[str, str, int]]()
        for instruction, setting in _own(job, plan).items():
            if not setting.overlap.is_sequential:
                program = programs[instruction.chunk][instruction.kind.word]
                for _ in range(_overlapped_steps(job, plan)):
                    wanted += expected_launches(program, setting.overlap)
        launches = Counter({k: n for k, n in executor.launches.items() if k[1] != "tail"})
        return {
            "max_rel_error": largest(error),
            "loss_error": largest(loss_error),
            "different": len(set(_own(job, plan).values())),
            "overlapped_steps": _overlapped_steps(job, plan),
            "launches_as_planned": launches == wanted,
            "reasons": dict(executor.reasons),
            "phase": _session().phase,
        }
    finally:
        megatron.detach()


def profiled(folder: str) -> dict[str, Any]:
    """The profile phase tries overlap settings that the blocks offer; every rank calls this.

    Args:
        folder: For what the session writes.
    """
    from kareus_pp.integrations import megatron

    job = Job(None, 4, torch.float64)
    base = Path(folder)
    reference = job.step(0)
    error = 0.0
    try:
        megatron.attach(
            {
                "device": "emulated",
                "mode": "profile",
                "output": str(base),
                "profiling": {"plans": 2, "iterations_per_plan": 2},
                "overlap": {"enabled": True, "candidates": 2},
            }
        )
        limit = time.monotonic() + _LIMIT_S
        while not _fewest(int((base / "profile.json").exists())):
            error = max(error, megatron_cpu.relative_error(job.step(0), reference))
            assert time.monotonic() < limit, (_session().phase, _session().standing_down)
        executor = _executor()
        offered = {setting for pair in executor.candidates(2) for setting in pair}
        tried: Counter[OverlapSetting] = Counter()
        for run in load_runs(base / "runs.json").runs:
            tried.update({s.overlap for s in run.settings[job.stage]} - {SEQUENTIAL})
        known = Profile.load(base / "profile.json").options
        return {
            "max_rel_error": largest(error),
            "offered": len(offered),
            "all_tried": set(tried) == offered,
            "runs_of_each": set(tried.values()),
            "all_known": all(
                {o.setting.overlap for o in options} - {SEQUENTIAL} <= offered
                and len({o.setting.overlap for o in options}) == 3
                for cls, options in known.items()
                if cls.stage == job.stage
            ),
            "split": executor.executed["forward", "split"],
            "serial": executor.executed["backward", "serial"],
            "reasons": dict(executor.reasons),
        }
    finally:
        megatron.detach()


def _session() -> Any:
    from kareus_pp.integrations import megatron

    found = megatron.session()
    assert found is not None
    return found


def _executor() -> OverlapExecutor:
    executor: OverlapExecutor = _session()._overlap._executor
    return executor


def _until(job: Job, ready: Any) -> None:
    limit = time.monotonic() + _LIMIT_S
    while not _fewest(int(ready())):
        assert time.monotonic() < limit, "nothing was observed"
        job.step(0)


def _fewest(value: int) -> int:
    everywhere = torch.tensor(value)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return int(everywhere)


def _own(job: Job, plan: Plan) -> dict[Instruction, Setting]:
    return dict(zip(plan.schedule.order[job.stage], plan.settings[job.stage], strict=True))


def _overlapped_steps(job: Job, plan: Plan) -> int:
    """Steps in which this rank has split what the plan wants split."""
    from kareus_pp.integrations import megatron

    if megatron.session() is None:
        return 0  # it starts with the first step
    split = sum(
        instruction.kind is Kind.FORWARD and not setting.overlap.is_sequential
        for instruction, setting in _own(job, plan).items()
    )
    executed = _executor().executed["forward", "split"]
    assert executed % split == 0, "a step was split in part"
    return executed // split


def _agreed_plan(job: Job, base: Path, programs: list[Any]) -> Plan:
    """A plan with another setting on every instruction; the first rank of each stage chooses."""
    schedule = Schedule.load(next(base.glob("observed/schedule-*.json")))
    chooser = random.Random(job.stage)
    used: set[Setting] = set()
    row = []
    for number, instruction in enumerate(schedule.order[job.stage]):
        overlap = SEQUENTIAL
        # One microbatch stays whole, forwards and backwards.
        while instruction.microbatch != 1 and (overlap in used or overlap.is_sequential):
            overlap = OverlapSetting(
                tuple(
                    Launch(p.kind, chooser.randrange(len(p.slots)))
                    for p in programs[instruction.chunk][instruction.kind.word].partitions
                )
            )
        used.add(overlap)
        row.append(Setting(CLOCKS_MHZ[number % len(CLOCKS_MHZ)], overlap))
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (job.stage, tuple(row)))
    plan = Plan(schedule, tuple(row for _, row in sorted(dict(rows).items())))
    if dist.get_rank() == 0:
        plan.save(base / "plan.json")
    dist.barrier()
    return plan
