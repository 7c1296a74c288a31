"""Overlap settings of the plan, handed to the executor instruction by instruction.

All ranks of a tensor-parallel group must split alike, or they hang. So they agree on a whole step
before it begins, and what they agreed on holds to its end, whatever happens to the session of one
of them in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kareus_pp.errors import OverlapError
from kareus_pp.plan import half_split
from kareus_pp.runtime.steps import Place, StageAssignment
from kareus_pp.schedule import Instruction, Kind
from kareus_pp.setting import DEFAULT_SETTING, OverlapSetting, Setting


class Executor(Protocol):
    """What the runtime needs of `kareus_pp.overlap.executor.OverlapExecutor`."""

    def begin_step(self, step: int, settings: Iterable[OverlapSetting] = ()) -> bool:
        """Agree with the other ranks of the group on a step; whether its settings apply."""
        ...

    def skip_step(self, step: int) -> None:
        """Tell the other ranks of the group that this one overlaps nothing in a step."""
        ...

    def on_setting(self, instruction: Instruction, setting: Setting) -> None:
        """Take the setting of an instruction that is about to run."""
        ...

    def candidates(self, count: int) -> tuple[tuple[OverlapSetting, OverlapSetting], ...]:
        """Settings to measure, each of a forward and of its backward."""
        ...

    def check(self, phase: str, setting: OverlapSetting) -> None:
        """Raise `OverlapError` where a setting names what is not there."""
        ...

    def close(self) -> None:
        """Detach."""
        ...


class OverlapFollower:
    """Drives the executor of one rank.

    All calls come from the training thread, but for `check` and `candidates`.

    Args:
        executor: The executor.
        stage: Stage of the rank.
    """

    def __init__(self, executor: Executor, stage: int) -> None:
        self._executor = executor
        self._stage = stage
        self._step = 0
        self._settings: Mapping[Place, Setting] = {}

    def step_begin(self, row: StageAssignment | None) -> None:
        """A step begins; agrees with the group where the row overlaps anything.

        Args:
            row: What the stage follows in the step; None for default settings.
        """
        # Counted here: a session that stands down counts no steps, and its peers go on counting.
        number, self._step = self._step, self._step + 1
        self._settings = {}
        if row is None or not row.overlapped:
            self._executor.skip_step(number)
        elif self._executor.begin_step(number, [setting.overlap for setting in row.settings]):
            self._settings = row.overlapped

    def instruction_begin(self, kind: Kind, microbatch: int, chunk: int) -> bool:
        """An instruction begins; whether it is to overlap, as only the row can say."""
        setting = self._settings.get((kind, microbatch, chunk), DEFAULT_SETTING)
        self._executor.on_setting(Instruction(self._stage, kind, microbatch, chunk), setting)
        return not setting.overlap.is_sequential

    def step_end(self) -> None:
        """The step is over: sequential until the next one, evaluation included."""
        self._settings = {}
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            self.instruction_begin(kind, 0, 0)

    def check(self, row: StageAssignment) -> str:
        """Check the overlap settings of a row against the blocks of this rank.

        Returns:
            What the row asks for that will not run as asked, in words; empty where all will.

        Raises:
            OverlapError: One names a partition or slot that is not there, or an instruction that
                is never split.
        """
        overlapped = {
            Instruction(self._stage, *place): setting for place, setting in row.overlapped.items()
        }
        for instruction, setting in overlapped.items():
            kind = instruction.kind
            try:
                if kind not in (Kind.FORWARD, Kind.BACKWARD):
                    raise OverlapError(
                        f"a {kind.word} instruction is never split; make it sequential"
                    )
                self._executor.check(kind.word, setting.overlap)
            except OverlapError as error:
                raise OverlapError(
                    f"the plan has {instruction} at {setting}, which cannot be done: {error}"
                ) from None
        return half_split(overlapped)

    def candidates(self, count: int) -> tuple[tuple[str, str], ...]:
        """At most `count` settings to measure, each of a forward and of its backward, as text."""
        return tuple((str(f), str(b)) for f, b in self._executor.candidates(count))

    def close(self) -> None:
        """Detach the executor."""
        self._executor.close()
