"""The hooks in torch's own pipeline runtime, over stages that do nothing."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.hooks import Row, added_us, await_applied
from kareus_pp.plan import Plan
from kareus_pp.schedule import Instruction, Kind, Schedule
from kareus_pp.setting import Setting

MICROBATCHES = 16
SCHEDULES = {
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
_KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUT_GRADIENT,
    "BACKWARD_WEIGHT": Kind.WEIGHT_GRADIENT,
}
_IDLE = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def measure() -> Iterator[Row]:
    """One row for each schedule with two stages on one rank."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(place, MASTER_ADDR="localhost", MASTER_PORT=port)
        dist.init_process_group("gloo")
    for name, kind in SCHEDULES.items():
        schedule = _idle_schedule(kind)
        yield Row(
            framework=f"torch {torch.__version__}",
            schedule=name,
            added_us_median=_added_us(schedule),
            stream_equal=_recorded(schedule) == _own_order(schedule),
        )


def _idle_schedule(kind: str) -> Any:
    """A real schedule on one rank whose stages do nothing; nothing is sent."""
    import torch
    from torch.distributed.pipelining import PipelineStage, schedules

    stages = [PipelineStage(torch.nn.Identity(), i, 2, torch.device("cpu")) for i in range(2)]
    for stage in stages:
        for name in (*_IDLE, "set_local_fwd_input", "set_local_bwd_input", "get_local_bwd_output"):
            setattr(stage, name, _named(name))
    schedule = getattr(schedules, kind)(stages, MICROBATCHES, loss_fn=lambda *_: 0)
    schedule._initialize_stages = lambda *_: None
    schedule._maybe_compute_loss = schedule._maybe_get_loss = lambda *_: None
    schedule._update_losses = lambda *_: None
    for stage in stages:
        stage.perform_reduce_grad = lambda *_: None
    schedule.step = lambda: schedule._step_microbatches(target_mbs=None)
    return schedule


def _named(name: str) -> Any:
    """A method that does nothing, with the parameters that the hooks look for."""

    def forward(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> None: ...

    def backward(
        bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None: ...

    if name == "forward_one_chunk":
        return forward
    return backward if name in _IDLE else lambda *_, **__: None


def _own_order(schedule: Any) -> list[tuple[Kind, int, int]]:
    """Kind, microbatch and chunk of torch's own compute actions."""
    actions: list[Any] = []
    for action in schedule.pipeline_order[0]:
        if action is not None:
            actions += getattr(action, "sub_actions", None) or [action]
    return [
        (_KINDS[a.computation_type.name], a.microbatch_index, a.stage_index)
        for a in actions
        if a.computation_type.name in _KINDS
    ]


def _recorded(schedule: Any) -> list[tuple[Kind, int, int]]:
    from kareus_pp.integrations import torch_pipelining

    stream: list[tuple[Kind, int, int]] = []
    session = mock.MagicMock()
    session.instruction_begin = lambda kind, microbatch, chunk, *_: stream.append(
        (kind, microbatch, chunk)
    )
    own = dict(schedule.__dict__), [dict(stage.__dict__) for stage in schedule._stages]
    with mock.patch.object(torch_pipelining, "start_session", return_value=session):
        torch_pipelining.attach(schedule, {})
    schedule.step()
    _restore(schedule, own)
    return stream


def _restore(schedule: Any, own: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    """Idle methods live on the objects, where the hooks were: put them back."""
    schedule.__dict__.clear()
    schedule.__dict__.update(own[0])
    for stage, values in zip(schedule._stages, own[1], strict=True):
        stage.__dict__.clear()
        stage.__dict__.update(values)


def _added_us(schedule: Any) -> float:
    """Torch's own loop without hooks, and with hooks and a session that applies a plan."""
    from kareus_pp.integrations import torch_pipelining

    order = tuple(Instruction(0, kind, m, chunk) for kind, m, chunk in _own_order(schedule))
    built = Schedule((order,), ((0, 0), (0, 1)))
    settings = tuple(Setting((1410, 1200)[step % 2]) for step, _ in enumerate(order))
    objects = [schedule, *schedule._stages]
    names = ("step", *_IDLE)

    def methods() -> list[dict[str, Any]]:
        return [{n: o.__dict__[n] for n in names if n in o.__dict__} for o in objects]

    own = dict(schedule.__dict__), [dict(stage.__dict__) for stage in schedule._stages]
    idle = methods()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        Plan(built, (settings,)).save(plan)
        session = torch_pipelining.attach(
            schedule, {"mode": "apply", "device": "dry-run", "output": folder, "plan": str(plan)}
        )
        assert session is not None
        hooks = methods()

        def run(which: list[dict[str, Any]]) -> None:
            for owner, values in zip(objects, which, strict=True):
                owner.__dict__.update(values)
            schedule.step()

        await_applied(session, lambda: run(hooks))
        try:
            return added_us(lambda: run(idle), lambda: run(hooks), len(order))
        finally:
            session.close()
            _restore(schedule, own)
