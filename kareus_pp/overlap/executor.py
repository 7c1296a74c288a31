"""The executor: which setting applies to which instruction, and the blocks that follow it.

An integration attaches blocks, tells the setting of every instruction before it runs, and asks at
the beginning of every step whether all ranks agree. Everything else happens inside the block's own
forward and backward.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.agreement import Agreement
from kareus_pp.overlap.boundary import BlockCall, Tasks, apply_boundary
from kareus_pp.overlap.communicators import CommunicatorPool
from kareus_pp.overlap.observe import Recorder
from kareus_pp.overlap.partitions import Partition, Program
from kareus_pp.overlap.run import Run, Swap
from kareus_pp.overlap.scheduler import Scheduler, is_nanobatch_thread
from kareus_pp.overlap.search import Candidate, joint_candidates
from kareus_pp.overlap.shadow import ShadowTree
from kareus_pp.overlap.slots import SlotHooks
from kareus_pp.overlap.swaps import RandomState
from kareus_pp.schedule import Instruction, Kind
from kareus_pp.setting import SEQUENTIAL, OverlapSetting, Setting

_logger = logging.getLogger(__name__)
FORWARD, BACKWARD = "forward", "backward"


class OverlapExecutor:
    """Executes the blocks of one rank as nanobatches where the settings say so.

    Not thread-safe: instructions of a rank run one after the other.

    Args:
        groups: Tensor-parallel process groups whose collectives are overlapped.
        swaps: State that the framework keeps in globals; random state is always swapped.
        agreement: Agreement of the ranks of the group; none: the caller sees to it.
        pool: Communicators by number of SMs; none: the framework's own for all.

    Attributes:
        launches: Launches by (phase, partition kind, slot); slot -1 is the end of a partition.
        executed: Block executions by (phase, `split`, `sequential`, `observed` or `serial`);
            serial is a split microbatch whose backward has a sequential setting.
        reasons: Every reason why a block ran sequentially against its setting, with its count.
    """

    def __init__(
        self,
        groups: Iterable[ProcessGroup],
        swaps: Sequence[Swap] = (),
        agreement: Agreement | None = None,
        pool: CommunicatorPool | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.launches: Counter[tuple[str, str, int]] = Counter()
        self.executed: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.pool = pool or CommunicatorPool()
        self.blocks: list[OverlapBlock] = []
        self._agreement = agreement
        self._agreed = True
        self._settings = {FORWARD: SEQUENTIAL, BACKWARD: SEQUENTIAL}
        self._said: set[str] = set()
        self.scheduler = Scheduler([RandomState(), *swaps])

    # What the session calls.

    def begin_step(self, step: int, settings: Iterable[OverlapSetting] = ()) -> bool:
        """Agree on a step before it starts; without agreement the whole step is sequential.

        Args:
            step: Number of the step, the same on all ranks.
            settings: Settings of all instructions of the step, in order.

        Returns:
            Whether overlap settings apply in this step.
        """
        used = tuple(settings)
        self._agreed = True
        if self._agreement is not None:
            facts = [*map(str, used), f"levels {self.pool.levels}"]
            facts += [f"{block.name}: {block.refusal}" for block in self.blocks]
            self._agreed = self._agreement.agree(step, facts)
        if self._agreed and used:
            for block in self.blocks:
                block.hook_for(used)
        return self._agreed

    def skip_step(self, step: int) -> None:
        """Run a step sequentially, and tell the ranks that would overlap in it; waits for none.

        Args:
            step: Number of the step, the same on all ranks.
        """
        if self._agreement is not None:
            self._agreement.decline(step)
        self._agreed = False
        for block in self.blocks:
            block.unhook()

    def on_setting(self, instruction: Instruction, setting: Setting) -> None:
        """Take the setting of an instruction that is about to run."""
        if instruction.kind is Kind.FORWARD:
            self._settings[FORWARD] = setting.overlap
        elif instruction.kind is Kind.BACKWARD:
            self._settings[BACKWARD] = setting.overlap
        elif not setting.overlap.is_sequential:
            self._refuse(f"a {instruction.kind.word} instruction cannot be split")

    def set_next(self, phase: str, setting: OverlapSetting) -> None:
        """Set the overlap setting of the next forwards or backwards.

        Args:
            phase: `forward` or `backward`.
            setting: The setting; it stays until another one is set.

        Raises:
            OverlapError: The phase or the setting is none, the executor is closed, or a block that
                was observed lacks the partition or slot.
        """
        if self.scheduler.closing:
            raise OverlapError("the overlap executor is closed; attach a new one")
        self.check(phase, setting)
        self._settings[phase] = setting

    def check(self, phase: str, setting: OverlapSetting) -> None:
        """Check a setting against the blocks that have been observed.

        Args:
            phase: `forward` or `backward`.
            setting: The setting.

        Raises:
            OverlapError: The phase or the setting is none, or a block does not have the partition
                or slot.
        """
        if phase not in self._settings:
            raise OverlapError(f"{phase!r} is no phase; use 'forward' or 'backward'")
        if not isinstance(setting, OverlapSetting):
            raise OverlapError(
                f"{setting!r} is no overlap setting; use OverlapSetting.parse('mlp@1:8')"
            )
        for block in self.blocks:
            program = block.programs.get(phase)
            if program is not None:
                program.check(setting)

    def candidates(self, count: int) -> tuple[Candidate, ...]:
        """Overlap settings to measure against each other and against sequential execution.

        Args:
            count: Most candidates.

        Returns:
            Settings of a forward and of its backward; none before all blocks were observed.
        """
        programs = [block.programs for block in self.blocks if not block.refusal]
        return joint_candidates(programs, self.pool.levels, count)

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions of all blocks observed so far, forward before backward."""
        found: dict[tuple[str, str], Partition] = {}
        for phase in (FORWARD, BACKWARD):
            for block in self.blocks:
                program = block.programs.get(phase)
                for partition in program.partitions if program else ():
                    found.setdefault((phase, partition.kind), partition)
        return tuple(found.values())

    def close(self) -> None:
        """Detach all blocks, end the threads, give communicators back."""
        for block in self.blocks:
            block.detach()
        self.blocks.clear()
        self.scheduler.close()
        self.pool.close()

    # What the blocks call.

    def setting_for(self, phase: str) -> OverlapSetting:
        """The setting of the instruction that runs now."""
        return self._settings[phase] if self._agreed else SEQUENTIAL

    def _refuse(self, reason: str) -> None:
        self.reasons[reason] += 1
        if reason not in self._said:
            self._said.add(reason)
            _logger.warning("overlap: running sequentially, because %s", reason)

    def run(
        self,
        phase: str,
        tasks: Tasks,
        program: Program | None,
        setting: OverlapSetting,
        recorder: Recorder | None = None,
    ) -> list[Any]:
        """Run the tasks of one phase of one block."""
        return self.scheduler.run(
            Run(
                phase=phase,
                groups=self.groups,
                program=program,
                setting=setting,
                select=self.pool.select,
                launches=self.launches,
                listener=recorder,
            ),
            tasks,
        )


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
                where the setting wants nanobatches.
        """
        executor = self._executor
        wanted = not executor.setting_for(FORWARD).is_sequential
        if not torch.is_grad_enabled() or not self.module.training:
            if wanted:
                executor._refuse(f"{self.name}: evaluation wants no backward")
            return False
        if is_nanobatch_thread():
            return False
        if not wanted and FORWARD in self.programs:
            executor.executed[FORWARD, "sequential"] += 1
            return False
        why = self.refusal or reason()
        if not why:
            return True
        if wanted:
            executor._refuse(f"{self.name}: {why}")
        executor.executed[FORWARD, "sequential"] += 1
        return False

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
        """
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
            return apply_boundary(call, self._observe_forward, self._observe_backward)
        return apply_boundary(call, self._run_forward, self._run_backward)

    def _run_forward(self, tasks: Tasks) -> list[Any]:
        executor = self._executor
        executor.executed[FORWARD, "split"] += 1
        setting = executor.setting_for(FORWARD)
        return executor.run(FORWARD, tasks, self.programs.get(FORWARD), setting)

    def _run_backward(self, tasks: Tasks) -> list[Any]:
        executor = self._executor
        setting = executor.setting_for(BACKWARD)
        how = "serial" if setting.is_sequential else "split"
        executor.executed[BACKWARD, how] += 1
        if setting.is_sequential:
            executor._refuse(
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

        results = executor.run(phase, [observed], None, SEQUENTIAL, recorder)
        self.programs[phase] = recorder.program(phase)
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
        self._hooks.remove()
        self._shadow = None


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward of one instance; returns a function that puts the old one back."""
    previous = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]

    def undo() -> None:
        if previous is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = previous  # type: ignore[method-assign]

    return undo
