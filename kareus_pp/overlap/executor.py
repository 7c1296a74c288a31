"""The executor: which setting applies to which instruction, and the blocks that follow it.

An integration attaches blocks, tells the setting of every instruction before it runs, and asks at
the beginning of every step whether all ranks agree. Everything else happens inside the block's own
forward and backward.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.agreement import Agreement
from kareus_pp.overlap.boundary import Tasks
from kareus_pp.overlap.communicators import CommunicatorPool
from kareus_pp.overlap.observe import Recorder
from kareus_pp.overlap.partitions import Partition, Program
from kareus_pp.overlap.run import BACKWARD, FORWARD, Run, Swap
from kareus_pp.overlap.scheduler import Scheduler
from kareus_pp.overlap.search import Candidate, joint_candidates
from kareus_pp.overlap.swaps import RandomState
from kareus_pp.schedule import Instruction, Kind
from kareus_pp.setting import SEQUENTIAL, OverlapSetting, Setting

if TYPE_CHECKING:
    from kareus_pp.overlap.block import OverlapBlock

_logger = logging.getLogger(__name__)


class OverlapExecutor:
    """Executes the blocks of one rank as nanobatches where the settings say so.

    Not thread-safe: instructions of a rank run one after the other.

    Args:
        groups: Tensor-parallel process groups whose collectives are overlapped.
        swaps: State that the framework keeps in globals; random state is always swapped.
        agreement: Agreement of the ranks of the group, without which nothing overlaps; none: the
            caller sees to it that all ranks do the same.
        pool: Communicators by number of SMs; none: the framework's own for all.

    Attributes:
        launches: Launches by (phase, partition kind, slot); slot -1 is the end of a partition.
        executed: Block executions by (phase, `split`, `sequential`, `observed` or `serial`);
            serial is a split microbatch whose backward has a sequential setting.
        reasons: Every reason why a block ran sequentially against its setting, or could not be
            observed, with its count.
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
        # What the ranks agreed on for this step; None before the first one.
        self._allowed: frozenset[OverlapSetting] | None = None
        self._agreed = agreement is None
        self._settings = {FORWARD: SEQUENTIAL, BACKWARD: SEQUENTIAL}
        self._said: set[str] = set()
        self.scheduler = Scheduler([RandomState(), *swaps])

    # What the session calls.

    def begin_step(self, step: int, settings: Iterable[OverlapSetting] = ()) -> bool:
        """Agree on a step before it starts; without agreement the whole step is sequential.

        The step begins sequential: what was set before it counts no more.

        Args:
            step: Number of the step, the same on all ranks and above those of all steps before.
            settings: Settings of all instructions of the step, in order: the step can have these
                and the sequential one. None: without an agreement it can have any.

        Returns:
            Whether overlap settings apply in this step.

        Raises:
            OverlapError: A step is no number, a setting is none, or the executor is closed.
        """
        self._refuse_closed()
        used = _settings_of(settings)
        number = _number(step)
        self._allowed = frozenset(used) if used or self._agreement is not None else None
        self._settings = {FORWARD: SEQUENTIAL, BACKWARD: SEQUENTIAL}
        self._agreed = True
        if self._agreement is not None:
            facts = [*map(str, used), f"levels {self.pool.levels}"]
            facts += [f"{block.name}: {block.refusal}" for block in self.blocks]
            self._agreed = self._agreement.agree(number, facts)
        if self._agreed:
            for block in self.blocks:
                if used:
                    block.hook_for(used)
                else:
                    block.unhook()
        return self._agreed

    def skip_step(self, step: int) -> None:
        """Run a step sequentially, and tell the ranks that would overlap in it; waits for none.

        Args:
            step: Number of the step, the same on all ranks.

        Raises:
            OverlapError: The step is no number.
        """
        if self._agreement is not None:
            self._agreement.decline(_number(step))
        self._agreed, self._allowed = False, frozenset()
        for block in self.blocks:
            block.unhook()

    def on_setting(self, instruction: Instruction, setting: Setting) -> None:
        """Take the setting of an instruction that is about to run.

        Raises:
            OverlapError: It is not among the settings of the step.
        """
        if instruction.kind is Kind.FORWARD:
            self._set(FORWARD, setting.overlap)
        elif instruction.kind is Kind.BACKWARD:
            self._set(BACKWARD, setting.overlap)
        elif not setting.overlap.is_sequential:
            self.refuse(f"a {instruction.kind.word} instruction cannot be split")

    def set_next(self, phase: str, setting: OverlapSetting) -> None:
        """Set the overlap setting of the next forwards or backwards.

        Args:
            phase: `forward` or `backward`.
            setting: The setting; it stays until another one is set or another step begins. In a
                step that was refused or skipped it is of no effect.

        Raises:
            OverlapError: The phase or the setting is none, the executor is closed, a block that
                was observed lacks the partition or slot, or the setting is not among those of
                the step.
        """
        self._refuse_closed()
        self.check(phase, setting)
        self._set(phase, setting)

    def _set(self, phase: str, setting: OverlapSetting) -> None:
        # Sequential is what follows a step, so it is always taken.
        if not setting.is_sequential:
            if self._allowed is None and self._agreement is not None:
                raise OverlapError(
                    f"the ranks have not agreed on '{setting}' yet; call begin_step with all "
                    f"settings of a step before it"
                )
            if self._agreed and self._allowed is not None and setting not in self._allowed:
                raise OverlapError(
                    f"'{setting}' is not among the settings of this step, which are "
                    f"{', '.join(sorted(map(str, self._allowed))) or 'none'}; give begin_step all "
                    f"settings of the step"
                )
        self._settings[phase] = setting

    def _refuse_closed(self) -> None:
        if self.scheduler.closing:
            raise OverlapError("the overlap executor is closed; attach a new one")

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
        _setting(setting)
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

        Raises:
            OverlapError: The count is no number from 0.
        """
        if not isinstance(count, int) or count < 0:
            raise OverlapError(f"{count!r} candidates cannot be given; ask for 0 or more")
        programs = [block.programs for block in self.blocks if not block.hindrance]
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
        """Detach all blocks, end the threads, give communicators back.

        Raises:
            OverlapError: A block is running.
        """
        if self.scheduler.is_running:
            raise OverlapError(
                "the overlap executor cannot be closed from within a block; close it between two "
                "steps"
            )
        self._agreed = False
        for block in self.blocks:
            block.detach()
        self.blocks.clear()
        self.scheduler.close()
        self.pool.close()

    # What the blocks call.

    def setting_for(self, phase: str) -> OverlapSetting:
        """The setting of the instruction that runs now."""
        return self._settings[phase] if self._agreed else SEQUENTIAL

    def refuse(self, reason: str) -> None:
        """Count a reason why something runs sequentially, and say it the first time."""
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


def _number(step: object) -> int:
    if not isinstance(step, Integral) or step < 0:
        raise OverlapError(f"the step {step!r} is no number; count steps from 0")
    return int(step)


def _settings_of(value: object) -> tuple[OverlapSetting, ...]:
    several = isinstance(value, Iterable) and not isinstance(value, (str, OverlapSetting))
    return tuple(map(_setting, value if several else (value,)))  # type: ignore[call-overload]


def _setting(value: object) -> OverlapSetting:
    if not isinstance(value, OverlapSetting):
        raise OverlapError(f"{value!r} is no overlap setting; use OverlapSetting.parse('mlp@1:8')")
    return value
