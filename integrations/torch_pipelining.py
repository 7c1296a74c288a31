"""Schedules of `torch.distributed.pipelining`, unmodified.

`attach` hooks one schedule object and its stages, never a class: the chunk computations of a stage
are the instructions, `step` is the step boundary. The loss is computed between the last stage's
forward and backward and belongs to neither. Actions that overlap a forward and a backward
(DualPipeV) are executed one after the other by torch's runtime, and recorded so.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from kareus_pp.integrations._start import (
    Config,
    configuration,
    pipeline_topology,
    start_session,
)

from kareus_pp.errors import ConfigError
from kareus_pp.runtime.session import Session
from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.simulate.gpu_model import Work

_HOOKS = "_kareus_hooks"
_FORWARD, _BACKWARD, _WEIGHT = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
)
_NEEDED = {
    _FORWARD: ("fwd_chunk_id",),
    _BACKWARD: ("bwd_chunk_id", "full_backward", "last_backward"),
    _WEIGHT: ("bwd_chunk_id", "last_backward"),
}


def attach(schedule: Any, config: Config, *, tokens: int = 1) -> Session | None:
    """Hook a pipeline schedule and start its session; every rank must call it.

    Args:
        schedule: A schedule of `torch.distributed.pipelining`, with its stages.
        config: The configuration, as a model, as a mapping, or as the path of a YAML or JSON file.
        tokens: Rows of a microbatch; only the emulated device counts work by them.

    Returns:
        The session; the one that is there if the schedule is already attached. None where the
        configuration says `enabled: false`.

    Raises:
        ConfigError: The configuration is malformed, or this torch has no hooks to offer.
        KareusError: A file that the configuration names is malformed.
        DeviceError: The device that was asked for cannot be used.
        TypeError: The object is not a pipeline schedule.
    """
    stages = _stages(schedule)
    present: _ScheduleHooks | None = schedule.__dict__.get(_HOOKS)
    if present is not None:
        return present.session
    wanted = configuration(config)
    if not wanted.enabled:
        return None
    _check_features(stages)
    rank_of_stage = _rank_of_stage(schedule, stages[0])
    pipeline = list(dist.get_process_group_ranks(stages[0].group)) if dist.is_initialized() else [0]
    session = start_session(
        wanted,
        pipeline_topology(pipeline, _model_order(rank_of_stage)),
        _fingerprint(schedule, stages),
        torch.device(stages[0].device),
        lambda stage: _works(stage, stages, tokens),
    )
    schedule.__dict__[_HOOKS] = _ScheduleHooks(schedule, stages, session)
    return session


def detach(schedule: Any) -> None:
    """Take the hooks off a schedule and close its session; default clocks come back."""
    hooks: _ScheduleHooks | None = schedule.__dict__.pop(_HOOKS, None)
    if hooks is not None:
        hooks.remove()


class _ScheduleHooks:
    """The hooks on one schedule object.

    Args:
        schedule: The pipeline schedule.
        stages: Its stages on this rank.
        session: Receives steps and instructions.
    """

    def __init__(self, schedule: Any, stages: Sequence[Any], session: Session) -> None:
        self.session = session
        self._schedule = schedule
        self._training = False
        self._replaced: list[tuple[Any, str]] = []
        self._replace(schedule, "step", self._step(schedule.step))
        for chunk, stage in enumerate(stages):
            communicates = _reduces_gradients(stage.submod)
            self._replace(stage, _FORWARD, self._forward(getattr(stage, _FORWARD), chunk))
            for name, kind in ((_BACKWARD, Kind.BACKWARD), (_WEIGHT, Kind.WEIGHT_GRADIENT)):
                execute = getattr(stage, name)
                self._replace(stage, name, self._backward(execute, kind, chunk, communicates))

    def remove(self) -> None:
        """Give the objects back what their classes say, and close the session."""
        for owner, name in self._replaced:
            owner.__dict__.pop(name, None)
        self._training = False
        self.session.close()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        owner.__dict__[name] = functools.wraps(getattr(owner, name))(value)
        self._replaced.append((owner, name))

    def _step(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        session, schedule = self.session, self._schedule

        def step(*args: Any, **kwargs: Any) -> Any:
            # Evaluation comes through `step` too, with the backward switched off.
            if not schedule._has_backward:
                session.suspend("evaluation")
                try:
                    return execute(*args, **kwargs)
                finally:
                    session.resume()
            session.step_begin(schedule._n_microbatches)
            self._training = True
            try:
                result = execute(*args, **kwargs)
            except BaseException:
                session.step_abort()
                raise
            finally:
                self._training = False
            session.step_end()
            return result

        return step

    def _forward(self, execute: Callable[..., Any], chunk: int) -> Callable[..., Any]:
        begin, end = self.session.instruction_begin, self.session.instruction_end

        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if not self._training:
                return execute(fwd_chunk_id, *args, **kwargs)
            begin(Kind.FORWARD, fwd_chunk_id, chunk)
            result = execute(fwd_chunk_id, *args, **kwargs)
            end()
            return result

        return forward_one_chunk

    def _backward(
        self, execute: Callable[..., Any], kind: Kind, chunk: int, communicates: bool
    ) -> Callable[..., Any]:
        begin, end = self.session.instruction_begin, self.session.instruction_end

        def backward_one_chunk(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if not self._training:
                return execute(bwd_chunk_id, *args, **kwargs)
            what = kind if kwargs.get("full_backward", True) else Kind.INPUT_GRADIENT
            begin(what, bwd_chunk_id, chunk, communicates and kwargs.get("last_backward", False))
            result = execute(bwd_chunk_id, *args, **kwargs)
            end()
            return result

        return backward_one_chunk


def _stages(schedule: Any) -> list[Any]:
    """The stages on this rank, in model order: their positions are the chunks."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if stages[0] is None or not hasattr(schedule, "step"):
        raise TypeError(
            f"attach needs a schedule of torch.distributed.pipelining and got "
            f"{type(schedule).__name__}"
        )
    return sorted(stages, key=lambda stage: int(stage.stage_index))


def _works(stage: int, stages: Sequence[Any], tokens: int) -> dict[InstructionClass, Work]:
    """Work of every instruction class of this rank, for the emulated device."""
    from kareus_pp.integrations._work import count_forward, instruction_works

    works: dict[InstructionClass, Work] = {}
    for chunk, part in enumerate(stages):
        works |= instruction_works(stage, count_forward([part.submod], tokens), chunk=chunk)
    return works


def _check_features(stages: Sequence[Any]) -> None:
    """Refuse a torch whose stages lack what the hooks need."""
    for name, parameters in _NEEDED.items():
        method = getattr(stages[0], name, None)
        found = inspect.signature(method).parameters if method is not None else {}
        missing = [parameter for parameter in parameters if parameter not in found]
        if missing:
            raise ConfigError(
                f"torch {torch.__version__} has no {name} with {', '.join(missing)} in its "
                f"pipeline stages; use torch 2.6 or newer, or switch kareus-pp off with "
                f"'enabled: false'"
            )


def _rank_of_stage(schedule: Any, stage: Any) -> list[int]:
    """Pipeline rank of every stage, in model order; not looped for V-shaped schedules."""
    mapping = getattr(schedule, "stage_index_to_group_rank", None) or getattr(
        stage, "stage_index_to_group_rank", {}
    )
    return [mapping.get(index, index % stage.group_size) for index in range(stage.num_stages)]


def _model_order(rank_of_stage: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Pipeline rank and chunk of every torch stage: torch numbers stages in model order."""
    order: list[tuple[int, int]] = []
    for position, rank in enumerate(rank_of_stage):
        order.append((rank, list(rank_of_stage[:position]).count(rank)))
    return tuple(order)


def _reduces_gradients(module: Any) -> bool:
    """Whether gradients are reduced during the module's last backward."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or hasattr(
        module, "set_requires_gradient_sync"
    )


def _fingerprint(schedule: Any, stages: Sequence[Any]) -> dict[str, str]:
    """What a profile depends on: model and precision of the stages, and the modes of torch."""
    submodules = [stage.submod for stage in stages]
    parameters = [parameter for module in submodules for parameter in module.parameters()]
    text = "\n".join(str(module) for module in submodules)
    return {
        "framework": "torch",
        "schedule": type(schedule).__name__,
        "stages": str(stages[0].num_stages),
        "layers": hashlib.sha256(text.encode()).hexdigest()[:16],
        "precision": " ".join(sorted({str(parameter.dtype) for parameter in parameters})),
    }
