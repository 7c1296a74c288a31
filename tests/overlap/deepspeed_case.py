"""DeepSpeed's pipeline engine with its tensor-parallel layers, PP 2 x TP 2."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.plan import Plan
from kareus_pp.schedule import Kind, Schedule
from kareus_pp.setting import SEQUENTIAL, Launch, OverlapSetting, Setting
from tests.overlap.cases import expected_launches
from tests.overlap.negative import log
from tests.overlap.steps import begin_step

HIDDEN, HEADS, SEQUENCE, VOCABULARY = 16, 4, 6, 32


class Block(nn.Module):
    """A transformer block of DeepSpeed's layers, batch first."""

    def __init__(self, group: Any, bias: bool) -> None:
        from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

        super().__init__()
        self.heads = HEADS // group.size()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value = (
            LinearLayer(nn.Linear(HIDDEN, HIDDEN, bias), mp_group=group) for _ in range(3)
        )
        self.project = LinearAllreduce(nn.Linear(HIDDEN, HIDDEN), mp_group=group)
        self.up = LinearLayer(nn.Linear(HIDDEN, 4 * HIDDEN, bias), mp_group=group)
        self.down = LinearAllreduce(nn.Linear(4 * HIDDEN, HIDDEN), mp_group=group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(hidden)
        batch, sequence, _ = normed.shape
        query, key, value = (
            _contiguous_gradient(linear(normed))
            .view(batch, sequence, self.heads, -1)
            .transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attended = torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value
        hidden = hidden + self.project(attended.transpose(1, 2).reshape(batch, sequence, -1))
        return hidden + self.down(torch.relu(self.up(self.norm2(hidden))))


def _contiguous_gradient(value: torch.Tensor) -> torch.Tensor:
    """DeepSpeed's asynchronous layer takes no other."""
    if value.requires_grad:
        value.register_hook(torch.Tensor.contiguous)
    return value


class Embed(nn.Embedding):
    """The first layer: integers in."""


def _engine(group: Any, interval: int, reentrant: bool, zero: int, bias: bool) -> tuple[Any, Any]:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    torch.manual_seed(3)
    checkpoint = checkpointing.checkpoint if reentrant else checkpointing.non_reentrant_checkpoint
    module = PipelineModule(
        layers=[
            LayerSpec(Embed, VOCABULARY, HIDDEN),
            *(LayerSpec(Block, group, bias) for _ in range(4)),
            LayerSpec(nn.Linear, HIDDEN, VOCABULARY),
        ],
        topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1),
        loss_fn=lambda output, target: nn.functional.cross_entropy(
            output.flatten(0, 1), target.flatten()
        ),
        partition_method="uniform",
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=checkpoint,
        checkpointable_layers=["Block"],
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "zero_optimization": {"stage": zero},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10_000,
            # Attached where a case says so, not whenever the integration was imported.
            "kareus": {"enabled": False},
        },
    )
    return engine, module


def _batches(steps: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(VOCABULARY, (4, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _setup(asynchronous: bool = False) -> Any:
    """Set DeepSpeed up; returns the tensor-parallel group of this rank."""
    # DeepSpeed compiles a small operator; other versions of it compile another of the same name.
    folder = f"torch-extensions-deepspeed-{metadata.version('deepspeed')}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(tempfile.gettempdir(), folder))
    import deepspeed
    from deepspeed.module_inject.layers import TensorParallel_Layer, set_autotp_mode

    deepspeed.init_distributed("gloo")
    set_autotp_mode(training=True)
    TensorParallel_Layer.tp_overlap_comm = asynchronous
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


def train(
    case: str,
    interval: int = 0,
    reentrant: bool = True,
    asynchronous: bool = False,
    zero: int = 0,
    steps: int = 4,
) -> dict[str, Any]:
    """Parameters after steps of SGD against those without overlap; float32, as DeepSpeed needs."""
    group = _setup(asynchronous)
    import deepspeed
    from kareus_pp.integrations import overlap_deepspeed

    results = []
    for overlapped in (False, True):
        # DeepSpeed's asynchronous layer has the wrong gradient of the bias for three dimensions.
        engine, module = _engine(group, interval, reentrant, zero, bias=not asynchronous)
        executor = overlap_deepspeed.attach(module, timeout_s=60.0) if overlapped else None
        data = _batches(steps)
        chooser = random.Random(5)
        losses = []
        for step in range(steps):
            if executor is not None and step:
                phases = ("forward", "backward")
                begin_step(executor, {p: _choose(executor, p, chooser) for p in phases})
            losses.append(float(engine.train_batch(data)))
        results.append([p.detach().clone() for p in module.parameters()] + [torch.tensor(losses)])
        if executor is not None:
            found = executor
            executor.close()
    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*results, strict=True))
    launched = {key: n for key, n in found.launches.items() if key[2] >= 0}
    return {
        "case": case,
        "version": f"deepspeed {deepspeed.__version__}",
        "max_rel_error": error,
        "slots_hit": str(len(launched)),
        "executed": dict(found.executed),
        "reasons": dict(found.reasons),
    }


def _choose(executor: OverlapExecutor, phase: str, chooser: random.Random) -> OverlapSetting:
    return OverlapSetting(
        tuple(
            Launch(partition.kind, chooser.randrange(len(partition.slots)))
            for partition in executor.partitions
            if partition.phase == phase
        )
    )


CASES: dict[str, dict[str, Any]] = {
    "column-parallel in order": {},
    "column-parallel asynchronous": {"asynchronous": True},
    "checkpoint, re-entrant": {"interval": 1},
    "checkpoint, not re-entrant": {"interval": 1, "reentrant": False},
    "ZeRO-1": {"zero": 1},
}


# Case: words that its reason must have.
REFUSALS = {
    "": "",
    "tensor parallel 1": "tensor parallel size is 1",
    "Domino": "Domino",
    "mixture of experts": "mixture of experts",
    "partitioned checkpointing": "partitioned, contiguous and CPU checkpointing",
    "contiguous checkpointing": "partitioned, contiguous and CPU checkpointing",
    "CPU checkpointing": "partitioned, contiguous and CPU checkpointing",
    "seed_layers": "seed_layers",
    "DualPipeV": "DualPipeV",
    "ZeRO-3": "ZeRO stage 3",
}
_FLAGS = {
    "partitioned checkpointing": "PARTITION_ACTIVATIONS",
    "contiguous checkpointing": "CONTIGUOUS_CHECKPOINTING",
    "CPU checkpointing": "CPU_CHECKPOINT",
}


def refusals() -> dict[str, str]:
    """Reason against overlap for a module that looks as if a feature were in use, case by case."""
    group = _setup()
    from deepspeed.moe.layer import MoE
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from kareus_pp.integrations import overlap_deepspeed

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = {}
    for case in REFUSALS:
        module: Any = nn.Sequential(Block(group, True), nn.Linear(HIDDEN, HIDDEN))
        flag = _FLAGS.get(case)
        if case == "tensor parallel 1":
            module[0] = Block(alone, True)
        elif case == "Domino":
            name = "deepspeed.runtime.domino.transformer"
            module.append(type("Layer", (nn.Module,), {"__module__": name})())
        elif case == "mixture of experts":
            module.append(type("Experts", (MoE,), {"__init__": nn.Module.__init__})())
        elif flag is not None:
            setattr(checkpointing, flag, True)
        elif case == "seed_layers":
            module.seed_layers = True
        elif case == "DualPipeV":
            module.phase_funcs = []
        elif case == "ZeRO-3":
            module[1].weight.ds_id = 0
        try:
            found[case] = overlap_deepspeed.refusal(module)
        finally:
            if flag is not None:
                setattr(checkpointing, flag, False)
    return found


def without_tensor_parallel_layers() -> str:
    """What is said of a module that has none."""
    from kareus_pp.integrations import overlap_deepspeed

    try:
        overlap_deepspeed.tensor_parallel_group(nn.Linear(2, 2))
    except OverlapError as error:
        return str(error)
    return ""


def refused_training() -> dict[str, Any]:
    """A module with a Domino layer trains sequentially, as it did, and says why once."""
    group = _setup()
    from kareus_pp.integrations import overlap_deepspeed

    messages: list[str] = []
    losses = []
    for attached in (False, True):
        engine, module = _engine(group, interval=0, reentrant=True, zero=0, bias=True)
        name = "deepspeed.runtime.domino.transformer"
        module.unused = type("Layer", (nn.Module,), {"__module__": name})()
        executor = overlap_deepspeed.attach(module, timeout_s=60.0) if attached else None
        data = _batches(2)
        with log(messages):
            for _ in range(2):
                if executor is not None:
                    begin_step(executor, {"forward": OverlapSetting.parse("mlp@0:0")})
                losses.append(float(engine.train_batch(data)))
        if executor is not None:
            split = executor.executed["forward", "split"] + executor.executed["forward", "observed"]
            executor.close()
    return {"equal": losses[:2] == losses[2:], "split": split, "messages": messages}


def planned(folder: str, steps: int = 10) -> dict[str, Any]:
    """A plan file's overlap settings through the session of an engine; every rank calls this.

    Args:
        folder: For the plan and what the session writes.
        steps: Steps that overlap on every rank.
    """
    group = _setup()
    from kareus_pp.integrations import deepspeed as integration

    base = Path(folder)
    engine, module = _engine(group, interval=0, reentrant=True, zero=0, bias=True)
    data = _batches(0)
    common = {"device": "emulated", "overlap": {"enabled": True}}
    first = {**common, "mode": "observe", "output": str(base / "observed")}
    session = integration.attach(engine, first)
    limit = time.monotonic() + _LIMIT_S
    while not _fewest(len(list(base.glob("observed/schedule-*.json")))):
        engine.train_batch(data)
        assert time.monotonic() < limit, "nothing was observed"
    (block,) = session._overlap._executor.blocks
    plan = _write_plan(base, block.programs, int(engine.stage_id))
    integration.detach(engine)

    # From the same parameters, on the same data: without overlap, then by the plan.
    start = [p.detach().clone() for p in module.parameters()]
    outcomes = []
    for config in (None, {**common, "plan": str(base / "plan.json"), "output": str(base / "out")}):
        for parameter, value in zip(module.parameters(), start, strict=True):
            parameter.data.copy_(value)
        session = integration.attach(engine, config) if config else None
        data = _batches(0)
        number, limit = 0, time.monotonic() + _LIMIT_S
        wanted = len(outcomes[0][1]) if outcomes else 4 * steps
        losses = []
        while number < wanted:
            losses.append(float(engine.train_batch(data)))
            number += 1
            assert time.monotonic() < limit
        outcomes.append(([p.detach().clone() for p in module.parameters()], losses))
    (reference, known), (found, losses) = outcomes
    executor = session._overlap._executor
    own = dict(
        zip(plan.schedule.order[engine.stage_id], plan.settings[engine.stage_id], strict=True)
    )
    per_step = sum(i.kind is Kind.FORWARD and not s.overlap.is_sequential for i, s in own.items())
    executed = executor.executed["forward", "split"]
    expected: Counter[tuple[str, str, int]] = Counter()
    for instruction, setting in own.items():
        if not setting.overlap.is_sequential:
            program = executor.blocks[0].programs[instruction.kind.word]
            for _ in range(executed // per_step):
                expected += expected_launches(program, setting.overlap)
    launches = Counter({k: n for k, n in executor.launches.items() if k[1] != "tail"})
    row = {
        "max_rel_error": max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(found, reference, strict=True)
        ),
        "loss_error": max(abs(a - b) for a, b in zip(losses, known, strict=True)),
        "whole_steps": executed % per_step == 0,
        "overlapped_steps": executed // per_step,
        "different": len(set(own.values())),
        "launches_as_planned": launches == expected,
        "reasons": dict(executor.reasons),
    }
    integration.detach(engine)
    return row


_LIMIT_S = 100.0


def _fewest(value: int) -> int:
    everywhere = torch.tensor(value)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return int(everywhere)


def _write_plan(base: Path, programs: Any, stage: int) -> Plan:
    """Another setting on every instruction; the microbatch 1 stays whole."""
    schedule = Schedule.load(next(base.glob("observed/schedule-*.json")))
    chooser = random.Random(stage)
    row = tuple(
        Setting(
            (1410, 1200, 1005)[number % 3],
            SEQUENTIAL
            if instruction.microbatch == 1
            else OverlapSetting(
                tuple(
                    Launch(p.kind, chooser.randrange(len(p.slots)))
                    for p in programs[instruction.kind.word].partitions
                )
            ),
        )
        for number, instruction in enumerate(schedule.order[stage])
    )
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (stage, row))
    plan = Plan(schedule, tuple(found for _, found in sorted(dict(rows).items())))
    if dist.get_rank() == 0:
        plan.save(base / "plan.json")
    dist.barrier()
    return plan
