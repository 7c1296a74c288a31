"""The hooks in Megatron-Core's own schedules, over steps that do nothing."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.hooks import Row, added_us, await_applied
from kareus_pp.plan import Plan
from kareus_pp.schedule import Instruction, Kind, Schedule
from kareus_pp.setting import Setting

STAGES, MICROBATCHES, CHUNKS = 4, 16, 2


def measure() -> Iterator[Row]:
    """One row for each schedule: 1F1B and interleaved, of the first of four stages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core
        from megatron.core.pipeline_parallel import schedules

    for name, chunks in (("1f1b", 1), ("interleaved", CHUNKS)):
        yield Row(
            framework=f"megatron-core {megatron.core.__version__}",
            schedule=name,
            added_us_median=_added_us(schedules, chunks),
            stream_equal=all(
                _recorded(schedules, stage, chunks) == _own_order(schedules, stage, chunks)
                for stage in range(STAGES)
            ),
        )


@contextmanager
def _idle_step(schedules: Any, stage: int, chunks: int) -> Iterator[Callable[[], None]]:
    """A step of Megatron's own loop: no peer is there, and forward and backward do nothing."""
    import torch

    models = [torch.nn.Identity() for _ in range(chunks)]
    config = _Config(
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=STAGES,
        pipeline_model_parallel_size=STAGES,
        hidden_size=1,
        variable_seq_lengths=False,
    )
    group = SimpleNamespace(size=lambda: STAGES, rank=lambda: stage)
    output = torch.zeros(1)

    def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return torch.empty_like(output), 0

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        return output

    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=group, dp_cp=one)
    with ExitStack() as stack:
        replaced = {
            "forward_step": forward_step,
            "backward_step": backward_step,
            "get_model_config": lambda model: config,
            "get_model_type": lambda model: None,
            "get_attr_wrapped_model": lambda model, name, **_: None,
            "deallocate_output_tensor": lambda *_: None,
        }
        for name, value in replaced.items():
            if hasattr(schedules, name):
                stack.enter_context(mock.patch.object(schedules, name, value))
        communicator = schedules.P2PCommunicator
        stack.enter_context(mock.patch.object(communicator, "_communicate", _communicate))
        stack.enter_context(mock.patch.object(torch, "zeros", _on_cpu(torch.zeros)))
        arguments = {
            "forward_step_func": None,
            "data_iterator": [None] * chunks if chunks > 1 else None,
            "model": models if chunks > 1 else models[0],
            "num_microbatches": MICROBATCHES,
            "seq_length": 1,
            "micro_batch_size": 1,
            "p2p_communicator": _peers(schedules, group, config),
            "pg_collection": groups,
        }
        name = f"forward_backward_pipelining_with{'' if chunks > 1 else 'out'}_interleaving"
        yield lambda: getattr(schedules, name)(**arguments)


class _Config:
    """A model configuration in which everything is off that is not named."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return None


def _peers(schedules: Any, group: Any, config: Any) -> Any:
    """Megatron's communicator, without peers."""
    communicator = schedules.P2PCommunicator.__new__(schedules.P2PCommunicator)
    communicator.pp_group = group
    communicator.config = config
    communicator.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
    return communicator


def _communicate(self: Any, **_: Any) -> tuple[None, None, None]:
    """Nothing is sent, None is received."""
    return None, None, None


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: make(*args, **{**kwargs, "device": "cpu"})


def _own_order(schedules: Any, stage: int, chunks: int) -> list[tuple[Kind, int, int]]:
    """The order by Megatron's own generators: its schedule table and its warm-up count."""
    group = SimpleNamespace(size=lambda: STAGES, rank=lambda: stage)
    peers = SimpleNamespace(
        pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    total, _, warmup, _ = schedules.get_pp_rank_microbatches(
        MICROBATCHES, chunks, STAGES, p2p_communicator=peers
    )
    table = schedules.get_schedule_table(MICROBATCHES, chunks, STAGES)
    forwards = [(Kind.FORWARD, m, c) for m, c in table]
    backwards = [(Kind.BACKWARD, m, chunks - 1 - c) for m, c in table]
    steady = itertools.chain(*zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[total - warmup :]]


def _recorded(schedules: Any, stage: int, chunks: int) -> list[tuple[Kind, int, int]]:
    """What the hooks record of one stage."""
    from kareus_pp.integrations import megatron

    stream: list[tuple[Kind, int, int]] = []
    session = mock.MagicMock()
    session.instruction_begin = lambda kind, microbatch, chunk, _: stream.append(
        (kind, microbatch, chunk)
    )
    with _idle_step(schedules, stage, chunks) as step:
        with mock.patch.object(megatron, "_start", return_value=session):
            megatron.attach({})
            step()
        megatron.detach()
    return stream


def _added_us(schedules: Any, chunks: int) -> float:
    """Megatron's own loop without hooks, and with hooks and a session that applies a plan."""
    from kareus_pp.integrations import megatron

    order = tuple(Instruction(0, kind, m, c) for kind, m, c in _own_order(schedules, 0, chunks))
    schedule = Schedule((order,), tuple((0, chunk) for chunk in range(chunks)))
    settings = tuple(Setting((1410, 1200)[step % 2]) for step, _ in enumerate(order))
    with tempfile.TemporaryDirectory() as folder, _idle_step(schedules, 0, chunks) as step:
        plan = Path(folder, "plan.json")
        Plan(schedule, (settings,)).save(plan)
        config = {"mode": "apply", "device": "dry-run", "output": folder, "plan": str(plan)}
        names = [name for name in vars(schedules) if name in megatron.HOOKED]
        idle = {name: getattr(schedules, name) for name in names}
        megatron.attach(config)
        hooks = {name: getattr(schedules, name) for name in names}
        communicator = schedules.P2PCommunicator
        communicate = communicator._communicate

        def bare() -> None:
            vars(schedules).update(idle)
            communicator._communicate = _communicate
            step()

        def hooked() -> None:
            vars(schedules).update(hooks)
            communicator._communicate = communicate
            step()

        def start(*_: Any) -> Any:
            from kareus_pp.config import parse_config
            from kareus_pp.runtime.session import Session
            from kareus_pp.runtime.topology import Topology

            return Session(parse_config(config), Topology(0, 1, schedule.model_order))

        try:
            with mock.patch.object(megatron, "_start", start):
                hooked()
            session = megatron.session()
            assert session is not None
            await_applied(session, hooked)
            return added_us(bare, hooked, len(order))
        finally:
            vars(schedules).update(hooks)
            megatron.detach()
