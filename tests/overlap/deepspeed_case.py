"""DeepSpeed's pipeline engine with its tensor-parallel layers, PP 2 x TP 2."""

from __future__ import annotations

import os
import random
import tempfile
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.setting import Launch, OverlapSetting

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
        },
    )
    return engine, module


def _batches(steps: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(VOCABULARY, (4, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(
    case: str,
    interval: int = 0,
    reentrant: bool = True,
    asynchronous: bool = False,
    zero: int = 0,
    steps: int = 4,
) -> dict[str, Any]:
    """Parameters after steps of SGD against those without overlap; float32, as DeepSpeed needs."""
    # DeepSpeed compiles a small operator; other versions of it compile another of the same name.
    os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(
        tempfile.gettempdir(), f"torch-extensions-deepspeed-{metadata.version('deepspeed')}"
    )
    import deepspeed
    from deepspeed.module_inject.layers import TensorParallel_Layer, set_autotp_mode
    from kareus_pp.integrations import overlap_deepspeed

    deepspeed.init_distributed("gloo")
    set_autotp_mode(training=True)
    TensorParallel_Layer.tp_overlap_comm = asynchronous
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    results = []
    for overlapped in (False, True):
        # DeepSpeed's asynchronous layer has the wrong gradient of the bias for three dimensions.
        engine, module = _engine(group, interval, reentrant, zero, bias=not asynchronous)
        executor = overlap_deepspeed.attach(module) if overlapped else None
        data = _batches(steps)
        chooser = random.Random(5)
        losses = []
        for step in range(steps):
            if executor is not None and step:
                for phase in ("forward", "backward"):
                    executor.set_next(phase, _choose(executor, phase, chooser))
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
