"""The hooks in DeepSpeed's own `_exec_schedule`, over its own schedules."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.hooks import Row, added_us, await_applied
from examples.demo import free_port, remove_shared_memory
from kareus_pp.plan import Plan
from kareus_pp.runtime.session import Session
from kareus_pp.schedule import Instruction, Kind, Schedule
from kareus_pp.setting import Setting

STAGES, MICROBATCHES = 4, 16


def measure() -> Iterator[Row]:
    """One row for each training schedule that this DeepSpeed has."""
    import deepspeed
    from deepspeed.runtime.pipe import schedule

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    port = free_port()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(place, MASTER_ADDR="localhost", MASTER_PORT=str(port))
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    remove_shared_memory(port)
    kinds = [("1f1b", schedule.TrainSchedule, deepspeed.PipelineModule)]
    if hasattr(schedule, "DualPipeVSchedule"):
        kinds.append(("dualpipev", schedule.DualPipeVSchedule, deepspeed.DualPipeVModule))
    for name, kind, module in kinds:
        engine = _idle_engine(deepspeed, module)
        yield Row(
            framework=f"deepspeed {deepspeed.__version__}",
            schedule=name,
            added_us_median=_added_us(engine, kind(MICROBATCHES, 1, 0), name),
            stream_equal=all(
                _recorded(engine, kind(MICROBATCHES, STAGES, stage))
                == _own_order(kind(MICROBATCHES, STAGES, stage))
                for stage in range(STAGES)
            ),
        )


def _idle_engine(deepspeed: Any, module_class: Any) -> Any:
    """A real engine of one stage whose instructions do nothing."""
    import torch
    from deepspeed.runtime.pipe import schedule

    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    module = module_class(layers, num_stages=1, loss_fn=torch.nn.MSELoss())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "kareus": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    }
    engine, _, _, _ = deepspeed.initialize(
        model=module, config=config, model_parameters=module.parameters()
    )

    def nothing(engine: Any, *args: Any, **kwargs: Any) -> None:
        return None

    commands = [c for c in vars(schedule).values() if isinstance(c, type)]
    commands = [c for c in commands if issubclass(c, schedule.PipeInstruction)]
    idle = dict.fromkeys(commands, nothing)
    engine.__class__ = type("IdleEngine", (type(engine),), {"_INSTRUCTION_MAP": idle})
    return engine


def _added_us(engine: Any, schedule: Any, name: str) -> float:
    """The engine's own loop around the instance's hooks, and through them."""
    from kareus_pp.integrations.deepspeed import attach, detach

    order = tuple(Instruction(0, kind, m, chunk) for kind, m, chunk in _own_order(schedule))
    chunks = 1 + max(instruction.chunk for instruction in order)
    built = Schedule((order,), tuple((0, chunk) for chunk in range(chunks)), name=name)
    settings = tuple(Setting((1410, 1200)[step % 2]) for step, _ in enumerate(order))
    idle_map = type(engine)._INSTRUCTION_MAP
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        Plan(built, (settings,)).save(plan)
        config = {"mode": "apply", "device": "dry-run", "output": folder, "plan": str(plan)}
        session = attach(engine, config)
        hooked_map = engine._INSTRUCTION_MAP

        def bare() -> None:
            engine._INSTRUCTION_MAP = idle_map
            type(engine)._exec_schedule(engine, schedule)

        def hooked() -> None:
            engine._INSTRUCTION_MAP = hooked_map
            engine._exec_schedule(schedule)

        await_applied(session, hooked)
        try:
            return added_us(bare, hooked, len(order))
        finally:
            detach(engine)


def _own_order(schedule: Any) -> list[tuple[Kind, int, int]]:
    """Kind, microbatch and chunk in the order of the framework's own steps.

    A buffer belongs to the microbatch of its last forward, so that no count of ours is involved.
    """
    order, held, seen = [], {}, {}
    for commands in schedule.steps():
        for command in commands:
            chunk = getattr(command, "phase", 0)
            if type(command).__name__ == "ForwardPass":
                held[chunk, command.buffer_id] = seen[chunk] = seen.get(chunk, -1) + 1
                order.append((Kind.FORWARD, seen[chunk], chunk))
            elif type(command).__name__ == "BackwardPass":
                order.append((Kind.BACKWARD, held[chunk, command.buffer_id], chunk))
    return order


def _recorded(engine: Any, schedule: Any) -> list[tuple[Kind, int, int]]:
    from kareus_pp.integrations.deepspeed import attach, detach

    stream: list[tuple[Kind, int, int]] = []

    def begin(self: Session, kind: Kind, microbatch: int, chunk: int = 0, *_: object) -> None:
        stream.append((kind, microbatch, chunk))

    with tempfile.TemporaryDirectory() as folder:
        # The hooks take the session's methods when they are set.
        with mock.patch.object(Session, "instruction_begin", begin):
            attach(engine, {"mode": "observe", "device": "dry-run", "output": folder})
        engine._exec_schedule(schedule)
        detach(engine)
    return stream
