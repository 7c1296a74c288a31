"""A block: a module whose forward and backward run as nanobatches where the settings say so."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.boundary import BlockCall, Tasks, apply_boundary
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.overlap.observe import Recorder
from kareus_pp.overlap.partitions import Program
from kareus_pp.overlap.run import BACKWARD, FORWARD
from kareus_pp.overlap.scheduler import is_nanobatch_thread
from kareus_pp.overlap.shadow import ShadowTree
from kareus_pp.overlap.slots import SlotHooks
from kareus_pp.setting import SEQUENTIAL, OverlapSetting


class OverlapBlock:
    """A module whose forward and backward run as nanobatches where the settings say so.

    Args:
        executor: The executor it belongs to; registers the block there.
        module: The module.
        name: Name in messages.
        output_dimension: Batch dimension of its outputs.
        hidden: Attributes of the module that its shadow does not get.
        refusal: Why this block always runs sequentially; empty where it need not.
        undo: Called when the block is detached.
        complete_shadow: Called with the shadow whenever it was refreshed, to replace modules that
            the block names in other ways than as submodules.

    Attributes:
        programs: What was observed, by phase.
        refusal: Why this block always runs sequentially; empty where it need not.
        hindrance: Why it runs sequentially, or could not be observed so far; empty where neither.
    """

    def __init__(
        self,
        executor: OverlapExecutor,
        module: nn.Module,
        name: str,
        output_dimension: int,
        hidden: tuple[str, ...] = (),
        refusal: str = "",
        undo: Callable[[], None] = lambda: None,
        complete_shadow: Callable[[ShadowTree], None] = lambda tree: None,
    ) -> None:
        self.name = name
        self.refusal = refusal
        self.module = module
        self.programs: dict[str, Program] = {}
        self.hindrance = refusal
        self._fitting: dict[str, OverlapSetting] = {}
        self._executor = executor
        self._output_dimension = output_dimension
        self._hooks = SlotHooks(module)
        self._shadow: ShadowTree | None = None
        self._hidden = hidden
        self._undo = undo
        self._complete_shadow = complete_shadow
        executor.blocks.append(self)

    def decide(self, reason: Callable[[], str]) -> bool:
        """Whether the forward that begins now is to run through the boundary.

        The first training forward of a block is observed, whatever its setting.

        Args:
            reason: Gives the reason against it in words, empty where there is none; asked only
                where the setting wants nanobatches and where the block is to be observed.
        """
        executor = self._executor
        wanted = not executor.setting_for(FORWARD).is_sequential
        observes = FORWARD not in self.programs
        if is_nanobatch_thread():
            return False
        if not torch.is_grad_enabled() or not self.module.training:
            if wanted:
                executor.refuse(
                    f"{self.name}: no gradient is recorded, as in evaluation and before a "
                    f"reentrant recomputation"
                )
            return False
        if torch._C._current_graph_task_id() >= 0:
            # Within a backward: it must run as the forward did that it repeats.
            if wanted or observes:
                self._hinder("it is recomputed as a whole, from outside")
            return False
        if not wanted and not observes:
            executor.executed[FORWARD, "sequential"] += 1
            return False
        why = self.refusal or _reason_around() or reason() or self._lacks(FORWARD)
        if not why:
            return True
        self._hinder(why)
        executor.executed[FORWARD, "sequential"] += 1
        return False

    def _hinder(self, why: str) -> None:
        if FORWARD not in self.programs:
            self.hindrance = why
        self._executor.refuse(f"{self.name}: {why}")

    def _refuse_for_good(self, why: str) -> None:
        self.refusal = self.hindrance = self.refusal or why

    def _lacks(self, phase: str) -> str:
        """What a setting asks for that the block does not have, in words.

        A setting can be taken before the block was observed, when nothing could be checked.
        """
        program, setting = self.programs.get(phase), self._executor.setting_for(phase)
        if program is None or self._fitting.get(phase) == setting:
            return ""
        try:
            program.check(setting)
        except OverlapError as error:
            return str(error)
        self._fitting[phase] = setting
        return ""

    def shadow_of(self, module: nn.Module) -> nn.Module:
        """The module that nanobatch 1 uses in place of one of the block's."""
        assert self._shadow is not None
        return self._shadow.of(module)

    def execute(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dimensions: list[int | None],
        batch: int,
    ) -> Any:
        """Run a forward through the boundary.

        Args:
            function: Called with the number of the nanobatch, then as the block's forward.
            args: Positional arguments of the whole microbatch.
            kwargs: Keyword arguments.
            dimensions: Batch dimension of every leaf of the arguments, in the order of torch's
                pytree; None where both nanobatches share it whole.
            batch: Batch size of the microbatch, at least 2.

        Returns:
            What the block returns for the whole microbatch.

        Raises:
            OverlapError: Its outputs cannot be put together, see `BlockCall.join`; or, where it is
                observed, it changes in place an input whose gradient is wanted.
        """
        executor = self._executor
        if self._shadow is None:
            self._shadow = ShadowTree(self.module, self._hidden)
        else:
            self._shadow.refresh()
        self._complete_shadow(self._shadow)
        leaves, spec = tree_flatten((args, kwargs))
        observes = FORWARD not in self.programs
        if observes or not self._hooks.installed:
            self._hooks.install()
        call = BlockCall(
            function=function,
            leaves=leaves,
            spec=spec,
            dimensions=dimensions,
            output_dimension=self._output_dimension,
            sizes=(batch,) if observes else (batch - batch // 2, batch // 2),
        )
        if observes:
            versions = _versions(leaves)
            outputs = apply_boundary(call, self._observe_forward, self._observe_backward)
            changed = "it changes its input in place" if _versions(leaves) != versions else ""
            why = call.unjoinable or changed
            if why:
                self._refuse_for_good(why)
                executor.refuse(f"{self.name}: {why}")
            return outputs
        return apply_boundary(call, self._run_forward, self._run_backward)

    def _run_forward(self, tasks: Tasks) -> list[Any]:
        executor = self._executor
        executor.executed[FORWARD, "split"] += 1
        setting = executor.setting_for(FORWARD)
        return executor.run(FORWARD, tasks, self.programs.get(FORWARD), setting)

    def _run_backward(self, tasks: Tasks) -> list[Any]:
        executor = self._executor
        setting = executor.setting_for(BACKWARD)
        lacking = self._lacks(BACKWARD)
        if lacking:
            executor.refuse(f"{self.name}: {lacking}")
            setting = SEQUENTIAL
        how = "serial" if setting.is_sequential else "split"
        executor.executed[BACKWARD, how] += 1
        if setting.is_sequential:
            executor.refuse(
                f"{self.name}: the forward of a microbatch was split and its backward is not to "
                f"overlap, so its halves run one after the other"
            )
        return executor.run(BACKWARD, tasks, self.programs.get(BACKWARD), setting)

    def _observe_forward(self, tasks: Tasks) -> list[Any]:
        return self._observe(FORWARD, tasks)

    def _observe_backward(self, tasks: Tasks) -> list[Any]:
        return self._observe(BACKWARD, tasks)

    def _observe(self, phase: str, tasks: Tasks) -> list[Any]:
        executor, recorder = self._executor, Recorder()
        executor.executed[phase, "observed"] += 1
        (task,) = tasks

        def observed() -> Any:
            with recorder.operations():
                return task()

        try:
            results = executor.run(phase, [observed], None, SEQUENTIAL, recorder)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise OverlapError(
                f"{self.name} changes an input in place, which cannot be overlapped; give it a "
                f"copy, or do not attach to it"
            ) from error
        self.programs[phase] = recorder.program(phase)
        self.hindrance = self.refusal
        if phase == BACKWARD and not any(p.partitions for p in self.programs.values()):
            why = (
                "no collective of its process group was seen (those of DTensor and of functional "
                "collectives cannot be)"
            )
            self._refuse_for_good(why)
            executor.refuse(f"{self.name}: {why}")
        return results

    def hook_for(self, settings: Iterable[OverlapSetting]) -> None:
        """Hook only the boundaries at which the settings of a step launch, between two steps."""
        if self.refusal or len(self.programs) < 2:
            return
        launches = {launch for setting in settings for launch in setting.launches}
        events = {
            program.event_at(position, launch.slot)
            for program in self.programs.values()
            for position, kind in enumerate(program.sequence)
            for launch in launches
            if launch.partition == kind
        }
        self._hooks.install(frozenset(event for event in events if event is not None))

    def unhook(self) -> None:
        """Take the hooks away between two steps; the next split forward sets them again."""
        self._hooks.remove()

    def detach(self) -> None:
        """Take the hooks away and leave the module as it was."""
        self._undo()
        self._refuse_for_good("the overlap executor is closed")
        self._hooks.remove()
        self._shadow = None


def _versions(leaves: Iterable[Any]) -> list[int]:
    return [
        leaf._version
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    ]


# Not in torch before 2.8: there a checkpoint around a block that is split recomputes nothing.
_saved_tensor_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)


def _reason_around() -> str:
    """Why a block cannot be split where it is called from, in words; empty where it can."""
    if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
        return "torch's DistributedDataParallel counts one gradient of each parameter"
    if _saved_tensor_hooks(True) is not None:
        return (
            "saved-tensor hooks, such as those of torch.utils.checkpoint and save_on_cpu, do not "
            "reach its halves"
        )
    return ""


class _Forward:
    """Stands in for the forward of one module.

    A copy of the module, deep or through a file, has the forward that the module had: it is not
    attached.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function
        self._previous = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._previous, MethodType):
            return MethodType, (self._previous.__func__, self._module)
        # The copy has no attributes yet when this is called, so that it is the class that answers.
        return getattr, (self._module, "forward")


_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_attached(module: nn.Module) -> bool:
    """Whether a module's forward is replaced by `replace_forward`."""
    return module in _attached


def is_within_attached(module: nn.Module) -> bool:
    """Whether a module is part of one whose forward is replaced, or is such a one."""
    return any(inner is module for outer in _attached for inner in outer.modules())


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward of one instance; returns a function that puts the old one back."""
    previous = module.__dict__.get("forward")
    replaced = _Forward(module, forward)
    module.forward = replaced  # type: ignore[method-assign]
    _attached.add(module)

    def undo() -> None:
        _attached.discard(module)
        if module.__dict__.get("forward") is not replaced:
            return  # Somebody's wrapper is around it, and goes on calling it.
        if previous is None:
            module.__dict__.pop("forward")
        else:
            module.forward = previous  # type: ignore[method-assign]

    return undo
