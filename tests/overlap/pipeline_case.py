"""PP 2 x TP 2 under Megatron's own schedules, with another overlap setting on every instruction."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.schedule import Instruction, Kind
from kareus_pp.setting import SEQUENTIAL, Launch, OverlapSetting, Setting
from tests.overlap import megatron_cpu
from tests.overlap.cases import expected_launches

Plan = Mapping[Instruction, Setting]


class Job:
    """The chunks of a rank and its schedule."""

    def __init__(self, virtual: int | None, microbatches: int, dtype: torch.dtype) -> None:
        megatron_cpu.layout(tensor=2, pipeline=2, virtual=virtual)
        from megatron.core import parallel_state

        config = megatron_cpu.config(dtype, num_layers=4, deallocate_pipeline_outputs=True)
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.microbatches = microbatches
        self.chunks = [
            megatron_cpu.model(config, vp_stage=chunk if virtual else None)
            for chunk in range(virtual or 1)
        ]

    def step(self, seed: int) -> dict[str, torch.Tensor]:
        """One iteration; losses of the last stage and all gradients."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.grad = None
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[
                megatron_cpu.batches(self.microbatches, 4, seed=seed) for _ in self.chunks
            ],
            model=self.chunks,
            num_microbatches=self.microbatches,
            seq_length=megatron_cpu.SEQUENCE,
            micro_batch_size=4,
            forward_only=False,
        )
        found = {f"loss {i}": loss for i, loss in enumerate(losses)}
        for number, chunk in enumerate(self.chunks):
            for name, grad in megatron_cpu.gradients(chunk).items():
                found[f"{number} {name}"] = grad
        return found


def _forward_step(data: Iterator[Any], model: Any) -> tuple[Any, Any]:
    microbatch = dict(next(data))
    labels = microbatch.pop("labels")
    output = model(**microbatch, labels=labels)

    def loss(value: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return value.mean(), value.mean().detach().clone()

    return output, loss


@contextlib.contextmanager
def told(job: Job, executor: OverlapExecutor, plan: Plan) -> Iterator[list[Instruction]]:
    """Tell the executor the setting of every instruction that Megatron's schedule executes."""
    from megatron.core.pipeline_parallel import schedules

    forward, backward = schedules.forward_step, schedules.backward_step
    seen: list[Instruction] = []
    pending: dict[int, tuple[int, int]] = {}

    def begin(kind: Kind, microbatch: int, chunk: int) -> None:
        instruction = Instruction(job.stage, kind, microbatch, chunk)
        seen.append(instruction)
        executor.on_setting(instruction, plan.get(instruction, Setting()))

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model", args[2] if len(args) > 2 else None)
        chunk = next(i for i, c in enumerate(job.chunks) if c is model)
        begin(Kind.FORWARD, kwargs["current_microbatch"], chunk)
        result = forward(*args, **kwargs)
        output = result[0][0] if isinstance(result[0], list) else result[0]
        pending[id(output)] = (kwargs["current_microbatch"], chunk)
        return result

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        output = args[1][0] if isinstance(args[1], list) else args[1]
        begin(Kind.BACKWARD, *pending.pop(id(output)))
        return backward(*args, **kwargs)

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    try:
        yield seen
    finally:
        schedules.forward_step, schedules.backward_step = forward, backward


def pipeline(
    case: str,
    virtual: int | None = None,
    microbatches: int = 4,
    steps: int = 20,
    dtype: torch.dtype = torch.float64,
    sequential_share: float = 0.0,
) -> dict[str, Any]:
    """Steps with a plan that differs from instruction to instruction.

    Args:
        case: Name of the row.
        virtual: Model chunks per rank; none: 1F1B without interleaving.
        microbatches: Microbatches of a step.
        steps: Steps; each with its own data and plan.
        dtype: Data type.
        sequential_share: Share of microbatches that run sequentially.
    """
    job = Job(virtual, microbatches, dtype)
    from kareus_pp.integrations import overlap_megatron

    references = [job.step(step) for step in range(steps)]
    executor = overlap_megatron.attach(job.chunks, timeout_s=60.0)
    try:
        with told(job, executor, {}):
            job.step(0)
        executor.launches.clear()
        error, loss_error = 0.0, 0.0
        wanted: Counter[tuple[str, str, int]] = Counter()
        for step, reference in enumerate(references):
            plan = _plan(job, executor, step, sequential_share)
            for instruction, setting in plan.items():
                if not setting.overlap.is_sequential:
                    phase = instruction.kind.word
                    program = executor.blocks[instruction.chunk].programs[phase]
                    wanted += expected_launches(program, setting.overlap)
            assert executor.begin_step(step, [s.overlap for s in plan.values()])
            with told(job, executor, plan) as seen:
                found = job.step(step)
            assert sorted(seen) == sorted(plan), "every instruction is told once"
            for name in reference:
                if name.startswith("loss"):
                    loss_error = max(loss_error, float((found[name] - reference[name]).abs()))
            error = max(error, megatron_cpu.relative_error(found, reference))
        launches = Counter({k: n for k, n in executor.launches.items() if k[1] != "tail"})
        return {
            "case": case,
            "version": f"megatron-core {megatron_cpu.version()}",
            "max_rel_error": largest(error),
            "loss_error": largest(loss_error),
            "slots_hit": f"{len(launches)}/{len(wanted)}",
            "all_slots_hit": True,
            "launches_as_planned": launches == wanted,
            "reasons": dict(executor.reasons),
        }
    finally:
        executor.close()


def largest(value: float) -> float:
    """The largest value over all ranks."""
    everywhere = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    return float(everywhere)


def _plan(
    job: Job, executor: OverlapExecutor, step: int, sequential_share: float
) -> dict[Instruction, Setting]:
    """A random setting for every instruction, the same on the ranks of a tensor-parallel group."""
    chooser = random.Random(1000 * step + job.stage)
    plan: dict[Instruction, Setting] = {}
    for chunk in range(len(job.chunks)):
        programs = executor.blocks[chunk].programs
        for microbatch in range(job.microbatches):
            sequential = chooser.random() < sequential_share
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                partitions: Sequence[Any] = programs[kind.word].partitions
                launches = tuple(
                    Launch(partition.kind, chooser.randrange(len(partition.slots)))
                    for partition in partitions
                )
                overlap = SEQUENTIAL if sequential else OverlapSetting(launches)
                plan[Instruction(job.stage, kind, microbatch, chunk)] = Setting(None, overlap)
    return plan
