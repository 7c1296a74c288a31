r"""Train a small model with a zero-bubble schedule of torch.distributed.pipelining.

One line hooks kareus-pp in (`attach`). Where there is no GPU it runs on the CPU, over gloo:

    torchrun --nproc-per-node 4 examples/train_torch_pipelining.py \
        --kareus-config configs/torch_emulated.yaml
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from kareus_pp.integrations.torch_pipelining import attach, detach
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

ROWS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedule", default="ScheduleInterleavedZeroBubble")
    parser.add_argument("--chunks", type=int, default=2, help="model chunks on a rank")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kareus-config", required=True, help="YAML or JSON file")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    schedule = build_schedule(arguments, device)
    attach(schedule, arguments.kareus_config, tokens=ROWS)
    train(schedule, arguments, device)
    detach(schedule)
    dist.destroy_process_group()


def build_schedule(
    arguments: argparse.Namespace, device: torch.device
) -> schedules._PipelineSchedule:
    """The schedule with this rank's stages; every second stage is twice as deep: unbalanced."""
    torch.manual_seed(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    total = ranks * arguments.chunks
    width = arguments.width
    layers = [
        nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))
        for depth in (2 + 2 * (index % 2) for index in range(total))
    ]
    if arguments.schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        mine = [rank, total - 1 - rank]
    else:
        mine = [rank + ranks * chunk for chunk in range(arguments.chunks)]
    stages = [PipelineStage(layers[i].to(device), i, total, device) for i in mine]
    kind = getattr(schedules, arguments.schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(
        stages[0] if single else stages, arguments.microbatches, loss_fn=nn.functional.mse_loss
    )


def train(schedule, arguments: argparse.Namespace, device: torch.device) -> None:
    """Learn to reproduce the input."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(arguments.steps):
        rows = ROWS * arguments.microbatches
        batch = torch.randn(rows, arguments.width, generator=generator).to(device)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(
            *([batch] if any(stage.is_first for stage in stages) else []),
            **({"target": batch, "losses": losses} if any(s.is_last for s in stages) else {}),
        )
        optimizer.step()
        if losses and step % 10 == 0:
            print(f"step {step}: loss {float(sum(losses)) / len(losses):.3f}", flush=True)


if __name__ == "__main__":
    main()
