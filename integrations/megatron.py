"""Megatron-Core schedules, 0.12 to 0.20, unmodified.

`attach` replaces functions of the module `megatron.core.pipeline_parallel.schedules`, which the
schedules look up by name at every call: the forward and backward step are the instructions, the
three `forward_backward_*` functions the step boundary. The session starts with the first training
step, when model and process groups are there.

A forward knows its microbatch and its model chunk; a backward is told neither and takes those of
the forward whose output it gets. Where the schedule runs a forward and a backward as one
(`overlap_moe_expert_parallel_comm`), the layers of both interleave and no boundary lies between
them: both are recorded, the forward without a duration of its own, the backward with the time of
the pair and the clock that holds for it. Both count as communicating, so that they are instruction
classes apart from forwards and backwards that run alone.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from kareus_pp.integrations._import_hook import on_import
from kareus_pp.integrations._megatron_job import (
    fingerprint,
    instruction_work,
    pipeline_ranks,
    refuse_full_iteration_graphs,
)
from kareus_pp.integrations._start import (
    Config,
    configuration,
    pipeline_topology,
    start_or_go_on,
    start_session,
)

from kareus_pp.config import KareusConfig, OverlapConfig
from kareus_pp.errors import ConfigError
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.runtime.session import Session
from kareus_pp.schedule import Kind, looped_model_order

SCHEDULES_MODULE = "megatron.core.pipeline_parallel.schedules"
_INTERLEAVED = "forward_backward_pipelining_with_interleaving"
_STEPS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    _INTERLEAVED,
)
_BACKWARDS = ("backward_step", "backward_step_multimodule")
_COMMUNICATE = "_communicate"
# Arguments of `_communicate`, and what they are called in an exchange.
_MESSAGES = (
    *(("tensor_send_next", "N"), ("tensor_send_prev", "P")),
    *(("recv_prev", "p"), ("recv_next", "n")),
)
_FUSED = "combined_forward_backward_step"
HOOKED = ("forward_step", *_BACKWARDS, *_STEPS)
"""Functions of the schedules' module that are replaced, as far as a version has them."""


def attach(config: Config | None = None) -> None:
    """Hook Megatron-Core's schedules; one line in a training script, before the first step.

    Args:
        config: The configuration, as a model, as a mapping, or as the path of a YAML or JSON file;
            None for the `--kareus-*` arguments, or defaults where there are none.

    Raises:
        ConfigError: The configuration is malformed, or this Megatron-Core has no hooks to offer.
    """
    from kareus_pp.integrations import megatron_training as loop
    from megatron.core.pipeline_parallel import schedules

    wanted = None if config is None else configuration(config)
    if wanted is not None and not wanted.enabled:
        return
    hook_schedules(schedules, wanted)
    on_import(loop.CHECKPOINTING_MODULE, loop.hook_checkpointing)
    on_import(loop.TRAINING_MODULE, loop.hook_training)


def detach() -> None:
    """Take all hooks off and close the session; default clocks come back."""
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)
    _hooks.reset()


def session() -> Session | None:
    """The session of this rank; None before the first training step and where it is off."""
    return _hooks.session


def pause(reason: str) -> None:
    """Default clocks until the next training step, as while a checkpoint is written."""
    _hooks.pause(reason)


def hook_schedules(module: ModuleType, config: KareusConfig | None = None) -> None:
    """Hook the module `megatron.core.pipeline_parallel.schedules`, once.

    Raises:
        ConfigError: The module lacks a function that is needed.
    """
    needed = ("forward_step", "backward_step", *_STEPS)
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"this Megatron-Core has no {', '.join(missing)} in {SCHEDULES_MODULE}; "
            f"use megatron-core 0.12 to 0.20"
        )
    _hooks.config = config if config is not None else _hooks.config
    replace(module, "forward_step", _hooks.forward)
    for name in _BACKWARDS:
        if hasattr(module, name):
            replace(module, name, _hooks.backward)
    for name in _STEPS:
        replace(module, name, _hooks.step)
    communicator = getattr(module, "P2PCommunicator", getattr(module, "p2p_communication", None))
    if hasattr(communicator, _COMMUNICATE):
        replace(communicator, _COMMUNICATE, _hooks.communicate)
    fused = inspect.getmodule(getattr(module, "combined_1f1b_schedule_for_no_pipelining", None))
    if fused is not None:
        replace(fused, _FUSED, _hooks.fused)


def replace(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function of a module or class by its wrapped form, once, until `detach`."""
    if any(entry[:2] == (owner, name) for entry in _replaced):
        return
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))
    _replaced.append((owner, name, original))


class _Hooks:
    """The hooks of this process: Megatron's schedules are functions, there is one of each."""

    def __init__(self) -> None:
        self.config: KareusConfig | None = None
        self.reset()

    def reset(self) -> None:
        """Close the session and forget everything."""
        found = getattr(self, "session", None)
        if found is not None:
            found.close()
        self.config = None
        self.session: Session | None = None
        self.started = False
        self.training = False
        self._paused = False
        self._chunk_of: dict[int, int] = {}
        self._forward_of: dict[int, tuple[int, int]] = {}
        self._forwards: Counter[int] = Counter()
        self._last_microbatch = -1
        self._reduces = self._gathers = self._exchanges = False

    def pause(self, reason: str) -> None:
        """Default clocks until the next training step."""
        if self.session is not None and not self._paused and not self.training:
            self._paused = True
            self.session.suspend(reason)

    def step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a `forward_backward_*` function."""

        def step(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("forward_only", False):
                self.pause("evaluation")
                return original(*args, **kwargs)
            models = kwargs["model"]
            models = models if isinstance(models, list) else [models]
            if not self.started:
                self.started = True
                self.session = _start(self.config, models, kwargs)
            session = self.session
            if session is None:
                return original(*args, **kwargs)
            self._prepare(models, kwargs["num_microbatches"])
            if self._paused:
                self._paused = False
                session.resume()
            session.step_begin(
                kwargs["num_microbatches"], f"{kwargs['micro_batch_size']}x{kwargs['seq_length']}"
            )
            self._exchanges = original.__name__ == _INTERLEAVED and session.observes
            self.training = True
            try:
                result = original(*args, **kwargs)
            except BaseException:
                session.step_abort()
                raise
            finally:
                self.training = False
                self._forward_of.clear()
            session.step_end()
            return result

        return step

    def _prepare(self, models: list[Any], microbatches: int) -> None:
        self._chunk_of = {id(model): chunk for chunk, model in enumerate(models)}
        self._forwards.clear()
        self._last_microbatch = microbatches - 1
        ddp = getattr(models[0], "ddp_config", None)
        self._reduces = bool(getattr(ddp, "overlap_grad_reduce", False))
        self._gathers = bool(getattr(ddp, "overlap_param_gather", False))

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward_step`."""

        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if not self.training or self.session is None:
                return original(*args, **kwargs)
            model = args[2] if len(args) > 2 else kwargs["model"]
            place = self._begin_forward(self.session, model, kwargs.get("current_microbatch"))
            result = original(*args, **kwargs)
            self.session.instruction_end()
            self._forward_of[_identity(result[0])] = place
            return result

        return forward_step

    def _begin_forward(
        self, session: Session, model: Any, microbatch: int | None, fused: bool = False
    ) -> tuple[int, int]:
        """Begin a forward; returns its microbatch and chunk."""
        chunk = self._chunk_of.get(id(model), 0)
        if microbatch is None:
            microbatch = self._forwards[chunk]
        self._forwards[chunk] += 1
        # Parameters are gathered before each chunk's first forward.
        gathers = self._gathers and microbatch == 0
        session.instruction_begin(Kind.FORWARD, microbatch, chunk, fused or gathers)
        return microbatch, chunk

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `backward_step` and its relatives."""

        def backward_step(*args: Any, **kwargs: Any) -> Any:
            if not self.training or self.session is None:
                return original(*args, **kwargs)
            output = args[1] if len(args) > 1 else kwargs["output_tensor"]
            known = self._begin_backward(self.session, output)
            result = original(*args, **kwargs)
            if known:
                self.session.instruction_end()
            return result

        return backward_step

    def _begin_backward(self, session: Session, output: Any, fused: bool = False) -> bool:
        """Begin the backward of an output; False where no forward is known that returned it."""
        place = self._forward_of.pop(_identity(output), None)
        if place is None:
            self.training = False
            session.stand_down("a backward got an output that no recorded forward returned")
            return False
        microbatch, chunk = place
        # Gradients are reduced bucket by bucket during each chunk's last backward.
        reduces = self._reduces and microbatch == self._last_microbatch
        session.instruction_begin(Kind.BACKWARD, microbatch, chunk, fused or reduces)
        return True

    def communicate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `_communicate`, which exchanges messages with the neighbouring stages.

        Only interleaved schedules are listened to: in 1F1B what a stage waits for beyond its data
        changes no prediction (docs/megatron.md).
        """

        def communicate(*args: Any, **kwargs: Any) -> Any:
            if self._exchanges and self.training and self.session is not None:
                messages = "".join(
                    message
                    for name, message in _MESSAGES
                    if kwargs.get(name) is not None and kwargs[name] is not False
                )
                if messages:
                    self.session.exchange(messages, kwargs.get("wait_on_reqs", True))
            return original(*args, **kwargs)

        return communicate

    def fused(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `combined_forward_backward_step`."""
        names = list(inspect.signature(original).parameters)
        wanted = ("f_model", "b_model", "b_output_tensor", "current_microbatch")
        places = {name: names.index(name) for name in wanted}

        def combined_forward_backward_step(*args: Any, **kwargs: Any) -> Any:
            if not self.training or self.session is None:
                return original(*args, **kwargs)
            forward_model, backward_model, output, microbatch = (
                args[place] if place < len(args) else kwargs.get(name)
                for name, place in places.items()
            )
            fused = forward_model is not None and backward_model is not None
            place = None
            known = True
            if forward_model is not None:
                place = self._begin_forward(self.session, forward_model, microbatch, fused)
            if fused:
                self.session.instruction_end()
            if backward_model is not None:
                known = self._begin_backward(self.session, output, fused)
            result = original(*args, **kwargs)
            if known:
                self.session.instruction_end()
            if place is not None:
                self._forward_of[_identity(result[0])] = place
            return result

        return combined_forward_backward_step


_hooks = _Hooks()
_replaced: list[tuple[Any, str, Any]] = []


def _identity(output: Any) -> int:
    """Identity of a forward's output, which the schedule keeps until its backward."""
    while isinstance(output, (list, tuple)):
        output = output[0]
    return id(next(iter(output.values())) if isinstance(output, dict) else output)


def _start(
    config: KareusConfig | None, models: list[Any], kwargs: Mapping[str, Any]
) -> Session | None:
    """Start the session with the first training step."""
    import torch.distributed as dist
    from megatron.core.utils import get_model_config

    def start() -> Session | None:
        wanted = config if config is not None else _configured()
        if not wanted.enabled:
            return None
        model_config = get_model_config(models[0])
        refuse_full_iteration_graphs(model_config)
        pipeline = pipeline_ranks(kwargs)
        return start_session(
            wanted,
            pipeline_topology(pipeline, looped_model_order(len(pipeline), len(models))),
            fingerprint(models, model_config),
            next(models[0].parameters()).device,
            lambda stage: instruction_work(stage, models, model_config, kwargs),
            lambda overlap: _attach_overlap(models, overlap),
        )

    return start_or_go_on(start, dist.get_rank() if dist.is_initialized() else 0)


def _attach_overlap(models: list[Any], overlap: OverlapConfig) -> OverlapExecutor:
    from kareus_pp.integrations import overlap_megatron

    return overlap_megatron.attach(
        models, overlap.levels, overlap.allow_untested, overlap.timeout_s
    )


def _configured() -> KareusConfig:
    """The configuration from Megatron's arguments, defaults where there are none."""
    from kareus_pp.integrations.megatron_arguments import config_of_arguments

    return config_of_arguments()
