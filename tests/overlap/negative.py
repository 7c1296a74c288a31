"""What must fail, fall back, or be as it was: functions that run on the ranks."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.overlap.interception import INTERCEPTED
from kareus_pp.overlap.scheduler import Deferred
from kareus_pp.setting import SEQUENTIAL, OverlapSetting
from tests.overlap import cases, megatron_cpu
from tests.overlap.steps import begin_step

SPLIT = OverlapSetting.parse("attention@1:0,mlp@1:0")


Tamper = Callable[[OverlapExecutor], None]


def _without_swaps(*places: int) -> Tamper:
    def tamper(executor: OverlapExecutor) -> None:
        swaps = executor.scheduler.swaps
        executor.scheduler.swaps = [s for i, s in enumerate(swaps) if i not in places]

    return tamper


def _without_shadow(executor: OverlapExecutor) -> None:
    for block in executor.blocks:
        block.shadow_of = lambda module: module  # type: ignore[method-assign]


@contextlib.contextmanager
def _collectives_that_end_at_once() -> Iterator[None]:
    """Every collective has written its result before its launcher goes on.

    What two nanobatches share is then overwritten for certain: a collective that writes in its own
    time may write too late to do harm, and did.
    """
    launch = Deferred.launch

    def launch_and_wait(deferred: Deferred, group: ProcessGroup) -> None:
        launch(deferred, group)
        deferred.work.wait()

    Deferred.launch = launch_and_wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        Deferred.launch = launch  # type: ignore[method-assign]


@dataclass(frozen=True)
class Control:
    """A case without one of its protections, and how it must fail.

    Attributes:
        case: The case; returns a row.
        arguments: Its arguments.
        tamper: Takes the protection away.
        fault: What the message of the exception must have; empty: the numbers must be wrong.
        conditions: Makes the failure certain instead of likely.
    """

    case: Callable[..., Any]
    arguments: dict[str, Any]
    tamper: Tamper
    fault: str = ""
    conditions: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


CONTROLS = {
    "shadow tree": Control(
        cases.equality,
        {"changes": cases.selective("core_attn", "layernorm")},
        _without_shadow,
        # What is shared between two lines of a layer: in 0.16 the inputs that a checkpoint keeps,
        # in 0.20 the layer's manager of its norm.
        "AttributeError: .*(no attribute 'inputs'|no attribute 'group_offload')",
    ),
    "memory buffer of its own": Control(
        cases.equality,
        {"changes": {"sequence_parallel": True}},
        _without_swaps(1),
        conditions=_collectives_that_end_at_once,
    ),
    "random state of its own": Control(
        cases.dropout, {"changes": cases.FULL_UNIFORM}, _without_swaps(0, 3)
    ),
}
GRAD_REDUCE = Control(
    cases.grad_reduce,
    {},
    _without_swaps(4),
    "AssertionError: Communication call has not been issued for this bucket",
)


def run(control: str) -> tuple[str, str]:
    """How a case fails with all protections, and without one of them; empty: it does not."""
    return fault_of(CONTROLS[control], protected=True), fault_of(CONTROLS[control])


def run_grad_reduce() -> str:
    """How the reduction of gradients fails where nanobatch 0 may call them ready."""
    return fault_of(GRAD_REDUCE)


def fault_of(control: Control, protected: bool = False) -> str:
    """How a control fails: `wrong numbers`, `as it must` by its exception, or not at all.

    Any other exception is raised: it proves nothing about the protection.
    """
    tamper = None if protected else control.tamper
    try:
        with control.conditions():
            row = control.case("negative control", tamper=tamper, **control.arguments)
    except Exception as error:
        if control.fault and re.match(control.fault, f"{type(error).__name__}: {error}"):
            return "as it must"
        raise
    return "wrong numbers" if row["max_rel_error"] > 1e-6 else ""


class _Model:
    """A model with its reference gradients."""

    def __init__(self, tensor: int = 2, batch: int = 4) -> None:
        megatron_cpu.layout(tensor=tensor)
        self.gpt = megatron_cpu.model(megatron_cpu.config())
        (self.data,) = megatron_cpu.batches(1, batch)

    def step(self) -> dict[str, torch.Tensor]:
        return cases._step(self.gpt, self.data)


def _set(executor: OverlapExecutor, setting: OverlapSetting = SPLIT) -> None:
    begin_step(executor, dict.fromkeys(("forward", "backward"), setting))


def detach() -> dict[str, bool]:
    """What closing an executor restores, and what attaching leaves alone."""
    model = _Model()
    reference, state = model.step(), model.gpt.state_dict()
    attributes = {name: set(m.__dict__) for name, m in model.gpt.named_modules()}
    methods = {name: ProcessGroup.__dict__.get(name) for name in INTERCEPTED}
    threads = threading.active_count()
    executor = cases._attach(model.gpt)
    model.step()
    _set(executor)
    model.step()
    attached = model.gpt.state_dict()
    executor.close()
    after = model.step()
    return {
        "gradients": all(torch.equal(after[name], reference[name]) for name in reference),
        "state_dict": state.keys() == attached.keys() == model.gpt.state_dict().keys(),
        "dict": attributes == {name: set(m.__dict__) for name, m in model.gpt.named_modules()},
        "hooks": not any(
            m._forward_pre_hooks or m._forward_hooks for m in model.gpt.decoder.modules()
        ),
        "c10d": methods == {name: ProcessGroup.__dict__.get(name) for name in INTERCEPTED},
        "threads": threading.active_count() == threads,
    }


# Case: words that its reason must have.
FALLBACKS = {
    "batch of 1": "microbatch size is 1",
    "tensor parallel 1": "tensor parallel size is 1",
    "evaluation": "evaluation",
    "cross-attention": "cross-attention",
    "packed sequences": "packed sequences",
    "fp8": "FP8",
    "fp4": "FP4",
    "num_moe_experts": "mixture of experts",
    "cpu_offloading": "CPU offloading",
    "fine_grained_activation_offloading": "fine-grained activation offloading",
    "cuda_graph_impl": "CUDA graphs",
    "tp_comm_overlap": "user buffers",
    "symmetric_ar_type": "symmetric all-reduce",
    "overlap_moe_expert_parallel_comm": "overlap_moe_expert_parallel_comm",
    "distribute_saved_activations": "distribute_saved_activations",
    "context_parallel_size": "context parallelism",
    "FSDP": "FSDP",
    "Transformer Engine": "Transformer Engine",
    "model without its wrapper": "a wrapper that was not attached with it",
    "extract_layer_indices": "extract_layer_indices",
    "gradient of another input": "needs a gradient",
}
_CONFIG_VALUES = {"cuda_graph_impl": "local", "context_parallel_size": 2, "num_moe_experts": 2}


def fallback(case: str) -> tuple[list[str], list[str], bool, bool]:
    """Reasons, log lines, whether anything was split, whether the result is unchanged."""
    model = _Model(
        tensor=1 if case == "tensor parallel 1" else 2, batch=1 if case == "batch of 1" else 4
    )
    block = model.gpt.decoder
    hidden = torch.randn(
        megatron_cpu.SEQUENCE, 1 if case == "batch of 1" else 4, megatron_cpu.HIDDEN
    ).double()
    mask = model.data["attention_mask"]

    def outcome() -> Any:
        extra: dict[str, Any] = {}
        if case == "cross-attention":
            extra["context"] = hidden.clone()
        elif case == "packed sequences":
            extra["packed_seq_params"] = object()
        elif case == "extract_layer_indices":
            extra["extract_layer_indices"] = {0}
        elif case == "gradient of another input":
            extra["attention_bias"] = torch.zeros(1, requires_grad=True)
        block.train(case != "evaluation")
        block.pre_process = True
        try:
            leaf = hidden.clone().requires_grad_()
            output = block(hidden_states=leaf, attention_mask=mask, **extra)
        except Exception as error:
            return type(error)
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
        return leaf.grad

    wanted = outcome()
    messages: list[str] = []
    with log(messages), _pretended(block, case):
        executor = cases._attach(model.gpt)
    try:
        _set(executor)
        with log(messages):
            results = [outcome() for _ in range(3)]
        split = any(how != "sequential" for _, how in executor.executed)
        equal = all(
            torch.equal(r, wanted) if isinstance(wanted, torch.Tensor) else r is wanted
            for r in results
        )
        return list(executor.reasons), messages, split, equal
    finally:
        executor.close()


@contextlib.contextmanager
def _pretended(block: Any, case: str) -> Iterator[None]:
    """Make a block look as if a feature were on, for the time of attaching."""
    if case == "Transformer Engine":
        fake = type("Linear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch"})
        block.fake = fake()
        yield
        del block.fake
    elif case == "FSDP":
        parameter = next(block.parameters())
        parameter.__fsdp_param__ = True
        yield
        del parameter.__fsdp_param__
    elif case == "model without its wrapper":
        parameter = next(block.parameters())
        parameter.main_grad = torch.zeros_like(parameter)
        yield
        del parameter.main_grad
    elif hasattr(block.config, case):
        before = getattr(block.config, case)
        setattr(block.config, case, _CONFIG_VALUES.get(case, True))
        yield
        setattr(block.config, case, before)
    else:
        yield


@contextlib.contextmanager
def log(messages: list[str]) -> Iterator[None]:
    """Collect what overlap logs."""
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kareus_pp.overlap")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class InjectedError(Exception):
    """Raised by a hook of the test."""


def exception(phase: str, nanobatch: int) -> tuple[str, float]:
    """The message of an exception in one nanobatch, and the error of the steps after it."""
    model = _Model()
    reference = model.step()
    executor = cases._attach(model.gpt)
    try:
        model.step()
        _set(executor)
        message = ""
        with injected(model.gpt.decoder.layers[1].mlp, phase, nanobatch):
            try:
                model.step()
            except InjectedError as error:
                message = str(error)
        worst = max(megatron_cpu.relative_error(model.step(), reference) for _ in range(3))
        _set(executor, SEQUENTIAL)
        return message, max(worst, megatron_cpu.relative_error(model.step(), reference))
    finally:
        executor.close()


@contextlib.contextmanager
def injected(module: torch.nn.Module, phase: str, nanobatch: int) -> Iterator[None]:
    """Raise where a module's output is computed, or its gradient, in one nanobatch."""

    def fail(*_: Any) -> None:
        if threading.current_thread().name == f"kareus-nanobatch-{nanobatch}":
            raise InjectedError("injected")

    def after(_: Any, __: Any, output: Any) -> None:
        if phase == "forward":
            fail()
        else:
            (output[0] if isinstance(output, tuple) else output).register_hook(fail)

    handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()
