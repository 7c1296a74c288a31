"""A small pipeline and a session that notes the calls it gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import kareus_pp.integrations._start as starting
import torch
from deepspeed.pipe import PipelineModule

from kareus_pp.runtime.session import Session
from kareus_pp.schedule import Kind

WIDTH = 8


class NotingSession(Session):
    """A real session that also notes the calls of the hooks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[str] = []
        super().__init__(*args, **kwargs)

    def step_begin(self, microbatches: int, shape: str = "") -> None:
        self.calls.append(f"step {microbatches}")
        super().step_begin(microbatches, shape)

    def instruction_begin(
        self, kind: Kind, microbatch: int, chunk: int = 0, communicates: bool = False
    ) -> None:
        self.calls.append(f"{kind.value}{microbatch}")
        super().instruction_begin(kind, microbatch, chunk, communicates)

    def step_end(self) -> None:
        self.calls.append("end")
        super().step_end()

    def step_abort(self) -> None:
        self.calls.append("abort")
        super().step_abort()

    def suspend(self, reason: str) -> None:
        self.calls.append(f"suspend {reason}")
        super().suspend(reason)

    def resume(self) -> None:
        self.calls.append("resume")
        super().resume()

    def close(self) -> None:
        self.calls.append("close")
        super().close()


starting.Session = NotingSession  # type: ignore[misc]


class Layer(torch.nn.Module):
    """A linear layer that can be told to fail."""

    failure: Exception | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Layer.failure is not None:
            raise Layer.failure
        return torch.relu(self.linear(x))


def start(stages: int, config: dict[str, Any]) -> Any:
    """An engine of `stages` stages with two layers each, made the ordinary way."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    return make_engine(stages, config)


def make_engine(stages: int, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module = PipelineModule(
        [Layer() for _ in range(2 * stages)],
        num_stages=stages,
        loss_fn=torch.nn.MSELoss(),
        activation_checkpoint_interval=config.pop("recompute", 0),
    )
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
        **config,
    }
    engine, _, _, _ = deepspeed.initialize(
        model=module, config=whole, model_parameters=module.parameters()
    )
    return engine


def data(failing_after: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless microbatches; with `failing_after`, the one after so many raises."""
    generator = torch.Generator().manual_seed(0)
    given = 0
    while failing_after is None or given < failing_after:
        x = torch.randn(2, WIDTH, generator=generator)
        yield x, x.flip(0)
        given += 1
    raise OSError("the disk with the data has gone")


def own_stream(engine: Any, microbatches: int) -> list[str]:
    """The order of DeepSpeed's own schedule; a buffer holds its last forward's microbatch."""
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    order, held, forwards = [], {}, 0
    for commands in TrainSchedule(microbatches, engine.num_stages, engine.stage_id).steps():
        for command in commands:
            if isinstance(command, ForwardPass):
                held[command.buffer_id] = forwards
                order.append(f"F{forwards}")
                forwards += 1
            elif isinstance(command, BackwardPass):
                order.append(f"B{held[command.buffer_id]}")
    return order
