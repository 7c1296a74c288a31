"""DeepSpeed pipeline engines, 0.14 to 0.19, unmodified.

Importing this module is enough: every `PipelineEngine` that is made from then on is attached with
the `kareus` object of its DeepSpeed config. Hooks are set on the engine instance, never on its
class: engines that bring their own instruction map or `_exec_schedule` are served as well.

A DeepSpeed instruction names a buffer, not a microbatch; microbatches of a training schedule are
counted by instruction type and phase (a phase is a model chunk of DualPipeV). Gradients are reduced
by an instruction of their own at the end of the step, so that no backward communicates.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from kareus_pp.integrations._activation import effective_config
from kareus_pp.integrations._import_hook import on_import
from kareus_pp.integrations._start import Config, configuration, start_or_go_on, start_session
from kareus_pp.integrations._work import count_forward, instruction_works

from kareus_pp.config import KareusConfig, OverlapConfig
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.runtime.session import Session
from kareus_pp.runtime.topology import Topology
from kareus_pp.schedule import InstructionClass, Kind, looped_model_order
from kareus_pp.simulate.gpu_model import Work

ENGINE_MODULE = "deepspeed.runtime.pipe.engine"
_HOOKS = "_kareus_hooks"
_PAUSES = {
    "eval_batch": "evaluation",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
}


def attach(engine: Any, config: Config | None = None) -> Session | None:
    """Hook a pipeline engine and start its session; every rank must call it.

    Args:
        engine: A `deepspeed.runtime.pipe.engine.PipelineEngine`, made by `deepspeed.initialize`.
        config: The configuration, as a model, as a mapping or as the path of a YAML or JSON file;
            None for the `kareus` object of the engine's DeepSpeed config, overridden by the file
            given to the launcher.

    Returns:
        The session; the one that is there if the engine is already attached and `config` is None
        or the same. None where the configuration says `enabled: false`.

    Raises:
        KareusError: The configuration, or a file that it names, is malformed.
        DeviceError: The device that was asked for cannot be used.
        TypeError: The engine is not a pipeline engine.
    """
    if not hasattr(engine, "_INSTRUCTION_MAP"):
        raise TypeError(f"attach needs a DeepSpeed PipelineEngine and got {type(engine).__name__}")
    present: _EngineHooks | None = engine.__dict__.get(_HOOKS)
    if present is not None and config is None:
        return present.session
    wanted = _configuration(engine, config)
    if present is not None:
        if present.config == wanted:
            return present.session
        detach(engine)
    if not wanted.enabled:
        return None
    session = start_session(
        wanted,
        topology_of(engine),
        fingerprint_of(engine),
        torch.device(engine.device),
        lambda stage: _works(engine, wanted),
        lambda overlap: _attach_overlap(engine, overlap),
    )
    engine.__dict__[_HOOKS] = _EngineHooks(engine, wanted, session)
    return session


def _attach_overlap(engine: Any, overlap: OverlapConfig) -> OverlapExecutor:
    from kareus_pp.integrations import overlap_deepspeed

    return overlap_deepspeed.attach(engine.module, overlap.levels, overlap.timeout_s)


def detach(engine: Any) -> None:
    """Take the hooks off an engine and close its session; default clocks come back."""
    hooks: _EngineHooks | None = engine.__dict__.pop(_HOOKS, None)
    if hooks is not None:
        hooks.remove()


def install(module: ModuleType) -> None:
    """Have every engine of the module `deepspeed.runtime.pipe.engine` attached when it is made."""
    engine_class = module.PipelineEngine
    original = engine_class.__init__
    if hasattr(original, _HOOKS):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        start_or_go_on(lambda: attach(self), int(self.global_rank))

    setattr(__init__, _HOOKS, True)
    engine_class.__init__ = __init__


def _configuration(engine: Any, config: Config | None) -> KareusConfig:
    if config is not None:
        return configuration(config)
    values = engine._config._param_dict.get("kareus")
    return effective_config(values, "the 'kareus' object of the DeepSpeed config")


def topology_of(engine: Any) -> Topology:
    """Where this rank stands; copies of a stage are its data- and tensor-parallel ranks."""
    stage, stages, rank = int(engine.stage_id), int(engine.num_stages), int(engine.global_rank)
    copies = sorted(engine.grid.topology().filter_match(pipe=stage))
    return Topology(
        stage=stage,
        stages=stages,
        model_order=_model_order(engine),
        replica=copies.index(rank),
        replicas=len(copies),
        rank=rank,
        world_size=stages * len(copies),
        local_rank=int(engine.local_rank),
    )


def _model_order(engine: Any) -> tuple[tuple[int, int], ...]:
    """Plain pipelines hold one chunk a stage; DualPipeV two, the second on the way back."""
    there = looped_model_order(int(engine.num_stages))
    if not hasattr(engine.module, "phase_bounds"):
        return there
    return there + tuple((stage, 1) for stage, _ in reversed(there))


def _works(engine: Any, config: KareusConfig) -> dict[InstructionClass, Work]:
    """The work of a stage, counted from its modules; for the emulated device only."""
    module = engine.module
    length = config.emulated.sequence_length
    phases = getattr(module, "phase_funcs", None)
    works: dict[InstructionClass, Work] = {}
    for chunk, layers in enumerate([[module]] if phases is None else phases):
        forward = count_forward(
            [layer for layer in layers if isinstance(layer, torch.nn.Module)],
            tokens=int(engine.train_micro_batch_size_per_gpu()) * length,
            sequence_length=length,
        )
        works |= instruction_works(
            int(engine.stage_id),
            forward,
            chunk=chunk,
            recompute=module.activation_checkpoint_interval > 0,
        )
    return works


def fingerprint_of(engine: Any) -> dict[str, str]:
    """What a profile depends on, the same on every rank: model, partition and effective modes."""
    module, grid = engine.module, engine.grid
    layers = "\n".join(_layer_text(layer) for layer in module._layer_specs)
    return {
        "framework": "deepspeed",
        "layers": hashlib.sha256(layers.encode()).hexdigest()[:16],
        "partition": " ".join(str(bound) for bound in module.parts),
        "microbatch_size": str(engine.train_micro_batch_size_per_gpu()),
        "precision": _precision(engine),
        "zero_stage": str(int(engine.zero_optimization_stage())),
        "recompute_interval": str(module.activation_checkpoint_interval),
        "data_parallel": str(grid.data_parallel_size),
        "tensor_parallel": str(grid.model_parallel_size),
    }


def _precision(engine: Any) -> str:
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def _layer_text(layer: Any) -> str:
    """A layer or layer specification, without anything that differs between runs."""
    kind = getattr(layer, "typename", None)
    if kind is None:
        return type(layer).__qualname__
    plain = (str, int, float, bool)
    arguments = [repr(a) for a in layer.module_args if isinstance(a, plain)]
    named = sorted(layer.module_kwargs.items())
    arguments += [f"{key}={a!r}" for key, a in named if isinstance(a, plain)]
    return f"{getattr(kind, '__qualname__', kind)}({', '.join(arguments)})"


class _EngineHooks:
    """The hooks on one engine instance.

    Args:
        engine: The pipeline engine.
        config: The configuration that the session was started with.
        session: Receives steps and instructions.
    """

    def __init__(self, engine: Any, config: KareusConfig, session: Session) -> None:
        self.config = config
        self.session = session
        self._engine = engine
        self._in_batch = self._in_step = self._training = False
        self._pauses = 0
        self._counters: list[defaultdict[int, int]] = []
        self._replaced: list[str] = []
        self._replace("_INSTRUCTION_MAP", self._instruction_map())
        self._replace("_exec_schedule", self._schedule(engine._exec_schedule))
        self._replace("train_batch", self._batch(engine.train_batch))
        for name, reason in _PAUSES.items():
            self._replace(name, self._paused(getattr(engine, name), reason))
        self._replace("destroy", self._destroy(engine.destroy))

    def remove(self) -> None:
        """Give the engine back what its class says, and close the session."""
        for name in self._replaced:
            self._engine.__dict__.pop(name, None)
        self._in_step = self._training = False
        self.session.close()

    def _replace(self, name: str, value: Any) -> None:
        self._engine.__dict__[name] = value
        self._replaced.append(name)

    def _instruction_map(self) -> dict[type, Callable[..., Any]]:
        from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

        kinds = ((ForwardPass, Kind.FORWARD), (BackwardPass, Kind.BACKWARD))
        hooked = dict(type(self._engine)._INSTRUCTION_MAP)
        for base, kind in kinds:
            for command in [c for c in hooked if issubclass(c, base)]:
                hooked[command] = self._instruction(kind, hooked[command])
        return hooked

    def _instruction(self, kind: Kind, execute: Callable[..., Any]) -> Callable[..., Any]:
        counter: defaultdict[int, int] = defaultdict(int)
        self._counters.append(counter)
        begin, end = self.session.instruction_begin, self.session.instruction_end

        @functools.wraps(execute)
        def instruction(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._training:
                return execute(engine, *args, **kwargs)
            chunk = kwargs.get("phase", 0)
            microbatch = counter[chunk]
            counter[chunk] = microbatch + 1
            begin(kind, microbatch, chunk)
            result = execute(engine, *args, **kwargs)
            end()
            return result

        return instruction

    def _schedule(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def exec_schedule(pipe_schedule: Any, *args: Any, **kwargs: Any) -> Any:
            # Training and evaluation may use the same schedule class; autograd tells them apart.
            if not torch.is_grad_enabled():
                with self._pause("evaluation"):
                    return execute(pipe_schedule, *args, **kwargs)
            for counter in self._counters:
                counter.clear()
            self.session.step_begin(int(pipe_schedule.micro_batches))
            self._in_step = self._training = True
            try:
                result = execute(pipe_schedule, *args, **kwargs)
            except BaseException:
                self._abort_step()
                raise
            finally:
                self._training = False
            if not self._in_batch:
                self._end_step()
            return result

        return exec_schedule

    def _batch(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        """Has the step last until the loss is with every stage: the iteration, on all of them.

        Late stages have their last backward done early; they wait for that loss, and their GPUs
        draw power while they do.
        """

        @functools.wraps(execute)
        def train_batch(*args: Any, **kwargs: Any) -> Any:
            self._in_batch = True
            try:
                result = execute(*args, **kwargs)
            except BaseException:
                self._abort_step()
                raise
            finally:
                self._in_batch = False
            self._end_step()
            return result

        return train_batch

    def _end_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self.session.step_end()

    def _abort_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self.session.step_abort()

    def _paused(self, execute: Callable[..., Any], reason: str) -> Callable[..., Any]:
        @functools.wraps(execute)
        def paused(*args: Any, **kwargs: Any) -> Any:
            with self._pause(reason):
                return execute(*args, **kwargs)

        return paused

    @contextmanager
    def _pause(self, reason: str) -> Iterator[None]:
        self._pauses += 1
        if self._pauses == 1:
            self.session.suspend(reason)
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self.session.resume()

    def _destroy(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def destroy(*args: Any, **kwargs: Any) -> Any:
            detach(self._engine)
            return execute(*args, **kwargs)

        return destroy


on_import(ENGINE_MODULE, install)
