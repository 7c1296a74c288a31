"""One training step on one rank: what ran, when, and the clock requested for every instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from kareus_pp.device.base import DEFAULT_CLOCK
from kareus_pp.exchanges import Exchange
from kareus_pp.runtime.messages import Assignment
from kareus_pp.schedule import Instruction, Kind
from kareus_pp.setting import Setting

Place = tuple[Kind, int, int]
"""Kind, microbatch and chunk: an instruction of a known stage."""


@dataclass(frozen=True)
class StageAssignment:
    """The part of an assignment that one stage follows, prepared for the hooks.

    Attributes:
        assignment: The whole assignment.
        expected: Text-free keys of the instructions, `(kind, microbatch, chunk)`, in order.
        settings: The setting of every instruction.
        words: The clock to request for every instruction in MHz; fixed instructions repeat their
            neighbour's, so that they keep the clock they find.
    """

    assignment: Assignment
    expected: tuple[Place, ...]
    settings: tuple[Setting, ...]
    words: tuple[int, ...]

    @classmethod
    def prepare(
        cls, assignment: Assignment, stage: int, instructions: tuple[Instruction, ...]
    ) -> StageAssignment:
        """Prepare the row of one stage; raises `FormatError` where a setting is malformed."""
        settings = tuple(Setting.parse(text) for text in assignment.settings[stage].split())
        if len(settings) != len(instructions):
            raise ValueError(f"{len(settings)} settings for {len(instructions)} instructions")
        return cls(
            assignment,
            tuple((i.kind, i.microbatch, i.chunk) for i in instructions),
            settings,
            clock_words(instructions, settings),
        )

    @cached_property
    def overlapped(self) -> dict[Place, Setting]:
        """The settings that are not sequential, by their instruction."""
        pairs = zip(self.expected, self.settings, strict=True)
        return {place: setting for place, setting in pairs if not setting.overlap.is_sequential}


def clock_words(
    instructions: tuple[Instruction, ...], settings: tuple[Setting, ...]
) -> tuple[int, ...]:
    """Clock requests in MHz of a row of settings; fixed instructions keep the clock they find."""
    words: list[int] = []
    leading = 0
    for instruction, setting in zip(instructions, settings, strict=True):
        if not instruction.kind.is_fixed:
            words.append(setting.clock_mhz or DEFAULT_CLOCK)
        elif len(words) > leading:
            words.append(words[-1])
        else:
            words.append(DEFAULT_CLOCK)
            leading += 1
    if leading < len(words):
        words[:leading] = [words[leading]] * leading
    return tuple(words)


class StepTracker:
    """Collects one step. Host-side methods run on the training thread, `on_*` at the boundaries.

    Attributes:
        number: Number of the training step, from 0.
        key: Number of microbatches and shape.
        row: What the stage follows in this step; None for default clocks.
        stream: `(kind, microbatch, chunk, communicates)` in execution order.
        exchanges: Exchanges of messages with other stages, in order.
        begin_s: Device time of every instruction's begin.
        end_s: Device time of every instruction's end.
        clocks_mhz: Clock requested while each instruction ran.
        mismatch: The first instruction that the plan did not expect; empty for none.
    """

    def __init__(
        self, number: int, key: str, row: StageAssignment | None, request: Callable[[int], None]
    ) -> None:
        self.number = number
        self.key = key
        self.row = row
        self.stream: list[tuple[Kind, int, int, bool]] = []
        self.exchanges: list[Exchange] = []
        self.begin_s: list[float] = []
        self.end_s: list[float] = []
        self.clocks_mhz: list[int] = []
        self.mismatch = ""
        self.started_s = 0.0
        self.ended_s = 0.0
        self.switches_total = 0
        self._request = request
        self._words: tuple[int, ...] = row.words if row is not None else ()
        self._expected = row.expected if row is not None else ()

    def expect(self, kind: Kind, microbatch: int, chunk: int, communicates: bool) -> Setting | None:
        """Note the next instruction; the setting that the plan has for it, None without one."""
        position = len(self.stream)
        self.stream.append((kind, microbatch, chunk, communicates))
        if self.row is None or self.mismatch:
            return None
        if position >= len(self._expected) or self._expected[position] != (kind, microbatch, chunk):
            self.mismatch = f"step {self.number}, position {position}: {kind.value}{microbatch}"
            self._words = ()
            return None
        return self.row.settings[position]

    def exchange(self, messages: str, blocking: bool) -> None:
        """Note an exchange of messages after the instructions up to now."""
        self.exchanges.append(Exchange(len(self.stream), messages, blocking))

    def finish(self) -> None:
        """Note on the host that the step is over; fewer instructions than planned mismatch too."""
        if self.row is not None and not self.mismatch and len(self.stream) < len(self._expected):
            self.mismatch = f"step {self.number}: only {len(self.stream)} instructions"

    def on_start(self, at_s: float) -> None:
        """The device begins the step: request the first clock."""
        self.started_s = at_s
        self._request(self._words[0] if self._words else DEFAULT_CLOCK)

    def on_begin(self, at_s: float) -> None:
        """The device begins an instruction."""
        position = len(self.begin_s)
        self.begin_s.append(at_s)
        words = self._words
        self.clocks_mhz.append(words[position] if position < len(words) else DEFAULT_CLOCK)

    def on_end(self, at_s: float) -> None:
        """The device ends an instruction: request the clock of the next one.

        The switch then hides in the wait for the peer.
        """
        self.end_s.append(at_s)
        words = self._words
        position = len(self.end_s)
        if position < len(words):
            self._request(words[position])
        elif not words and self.row is not None:
            self._request(DEFAULT_CLOCK)

    @property
    def durations_s(self) -> tuple[float, ...]:
        """Duration of every instruction in seconds."""
        return tuple(end - begin for begin, end in zip(self.begin_s, self.end_s, strict=False))

    def instructions(self, stage: int) -> tuple[Instruction, ...]:
        """The instructions in execution order."""
        return tuple(Instruction(stage, kind, m, chunk) for kind, m, chunk, _ in self.stream)

    def communicating(self, stage: int) -> tuple[Instruction, ...]:
        """The instructions during which gradients or parameters were communicated."""
        return tuple(
            Instruction(stage, kind, m, chunk) for kind, m, chunk, comm in self.stream if comm
        )
