"""What stages wait for besides data: messages that are exchanged blockingly.

A framework may send and receive several messages at once and go on only when all of them are
through. A message is through when both sides are there: its sender waits for the receiver's buffer
(gloo: always; NCCL: unless the message fits into its own buffers). Then a stage also waits for
neighbours whose data it does not need yet, and a result leaves no sooner than the exchange it is
part of. Such waits are dependencies between instructions like any other; this module finds them
from the exchanges of all stages, whether recorded or built.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from kareus_pp.errors import FormatError, ScheduleError
from kareus_pp.schedule import Instruction, Schedule, Wait, topological_order

_TEXT = re.compile(r"(\d+)([NPnp]+)(~?)\Z")
# Each message: what its sender notes, what its receiver notes, and how far the receiver is.
_DIRECTIONS = (("N", "p", 1), ("P", "n", -1))


class Exchange(NamedTuple):
    """Messages that a stage hands to the framework at once.

    Text form: the position, the messages, and `~` where the stage goes on at once: `3Np`, `5n~`.

    Attributes:
        position: How many instructions the stage has executed before.
        messages: `N` and `P` sent to the next and the preceding stage, `n` and `p` received from
            them. The last stage's next one is the first.
        blocking: Whether the stage waits until all of them are through.
    """

    position: int
    messages: str
    blocking: bool = True

    def __str__(self) -> str:
        return f"{self.position}{self.messages}{'' if self.blocking else '~'}"

    @classmethod
    def parse(cls, text: str) -> Exchange:
        """Read the text form; raises `FormatError` where it is not one."""
        match = _TEXT.match(text)
        if match is None:
            raise FormatError(
                f"{text!r} is not an exchange; write the position, the messages (N, P, n, p) and, "
                f"where it does not block, '~', as in '3Np' or '5n~'"
            )
        return cls(int(match[1]), match[2], not match[3])


def waits_of(schedule: Schedule, exchanges: Sequence[Sequence[Exchange]]) -> frozenset[Wait]:
    """The waits that the exchanges add to the dependencies of a schedule.

    The `k`-th message that a stage sends to its next one is the `k`-th that this receives from its
    preceding one, and so for the other direction: frameworks match messages by order.

    Args:
        schedule: The schedule without waits.
        exchanges: For each stage its exchanges, in program order.

    Returns:
        Pairs `(before, after)`: `after` starts only when `before` has ended. Pairs that follow
        from others or from the schedule's own dependencies are left out.

    Raises:
        ScheduleError: Messages without a counterpart, or stages that wait for each other.
    """
    partners = _partners(exchanges)
    points: dict[_Point, list[_Point]] = {}
    starts: dict[Instruction, _Point] = {}
    for stage, row in enumerate(schedule.order):
        here: _Point | None = None
        own = list(enumerate(exchanges[stage]))
        for position in range(len(row) + 1):
            while own and own[0][1].position <= position:
                number, exchange = own.pop(0)
                posted, through = (stage, number, False), (stage, number, True)
                points[posted] = [here] if here is not None else []
                others = [(*other, False) for other in partners.get((stage, number), ())]
                points[through] = [posted, *(others if exchange.blocking else ())]
                here = through
            if position < len(row):
                if here is not None:
                    starts[row[position]] = here
                here = row[position]
                points[here] = []
    return _reduced(schedule, _ends_before(points, starts))


_Point = Instruction | tuple[int, int, bool]
"""The end of an instruction, or an exchange (stage, number) when posted or when through."""


def _partners(
    exchanges: Sequence[Sequence[Exchange]],
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each exchange, as stage and number, those at the other ends of its messages."""
    found: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for sent, received, step in _DIRECTIONS:
        for stage in range(len(exchanges)):
            peer = (stage + step) % len(exchanges)
            sends = _with_message(exchanges, stage, sent)
            receives = _with_message(exchanges, peer, received)
            if len(sends) != len(receives):
                raise ScheduleError(
                    f"stage {stage} sends {len(sends)} messages to stage {peer}, which receives "
                    f"{len(receives)} from it; record every send and receive of both"
                )
            for a, b in zip(sends, receives, strict=True):
                found[a].append(b)
                found[b].append(a)
    return found


def _with_message(
    exchanges: Sequence[Sequence[Exchange]], stage: int, message: str
) -> list[tuple[int, int]]:
    return [
        (stage, number)
        for number, exchange in enumerate(exchanges[stage])
        for _ in range(exchange.messages.count(message))
    ]


def _ends_before(
    points: dict[_Point, list[_Point]], starts: dict[Instruction, _Point]
) -> set[Wait]:
    """Which instructions of other stages end before an instruction starts, by exchanges alone."""
    reaching: dict[_Point, frozenset[Instruction]] = {}
    try:
        for point in TopologicalSorter(points).static_order():
            if isinstance(point, Instruction):
                reaching[point] = frozenset([point])
            else:
                reaching[point] = frozenset().union(*(reaching[p] for p in points[point]))
    except CycleError as error:
        stage, number, _ = error.args[1][0]
        raise ScheduleError(
            f"stage {stage}: its exchange number {number} can never be through, the stages wait "
            f"for each other"
        ) from None
    return {
        (before, after)
        for after, point in starts.items()
        for before in reaching[point]
        if before.stage != after.stage
    }


def _reduced(schedule: Schedule, waits: set[Wait]) -> frozenset[Wait]:
    """The waits that follow neither from other waits nor from other dependencies."""
    whole = replace(schedule, waits=frozenset(waits))
    after: list[set[int]] = [set() for _ in whole.instructions]
    for edge in whole.edges:
        after[edge.before].add(edge.after)
    # Bit `n` of `beyond[m]`: instruction `n` is later than `m`.
    beyond = [0] * len(after)
    for node in reversed(topological_order(whole)):
        for follower in after[node]:
            beyond[node] |= beyond[follower] | 1 << follower
    own = {(edge.before, edge.after) for edge in schedule.edges}
    kept = []
    for wait in waits:
        a, b = (whole.index[instruction] for instruction in wait)
        if (a, b) not in own and not any(beyond[c] >> b & 1 for c in after[a]):
            kept.append(wait)
    return frozenset(kept)


def interleaved_exchanges(
    stage: int, stages: int, chunk_of: Sequence[int], warmup: int, overlapped: bool
) -> tuple[Exchange, ...]:
    """Exchanges of one stage in Megatron-Core's interleaved schedule.

    All block, but for those of the steady phase where sends are `overlapped`
    (`--overlap-p2p-communication`). Where they are not, a stage exchanges once after a forward and
    a backward: the output of the forward leaves when the backward has ended, and the next forward
    waits for the gradient that only the next backward needs.

    Args:
        stage: The stage.
        stages: Number of stages.
        chunk_of: Chunk of the `k`-th forward; the `k`-th backward takes the chunks from the last.
        warmup: How many forwards come before a forward and a backward take turns.
        overlapped: Whether the steady phase goes on at once after its sends.
    """
    total, last_chunk = len(chunk_of), max(chunk_of)
    found: list[Exchange] = []

    def arrives(k: int, leads: bool) -> bool:
        """Whether a stage takes an input in with its `k`-th forward, or its `k`-th backward."""
        # The stage that leads takes what the one at the other end, so many behind, hands on.
        behind = k - (stages - 1)
        return not leads or (behind >= 0 and chunk_of[behind] != last_chunk)

    def forward(k: int, receives: bool) -> str:
        sends = stage < stages - 1 or chunk_of[k] != last_chunk
        return "N" * sends + "p" * (receives and arrives(k, stage == 0))

    def backward(k: int, receives: bool = True) -> str:
        sends = stage > 0 or chunk_of[k] != last_chunk
        return "P" * sends + "n" * (receives and arrives(k, stage == stages - 1))

    def exchange(position: int, messages: str, blocking: bool = True) -> None:
        if messages:
            found.append(Exchange(position, messages, blocking))

    steady = total - warmup
    first_gradient = "n" * (stage < stages - 1)
    exchange(0, "p" * (stage > 0))
    for k in range(warmup):
        joined = k == warmup - 1 and steady > 0 and not overlapped
        exchange(k + 1, forward(k, k < total - 1) + first_gradient * joined)
    if not steady or overlapped:
        exchange(warmup, first_gradient, blocking=not steady)
    for k in range(steady):
        sent, returned = forward(warmup + k, k < steady - 1), backward(k)
        if overlapped:
            exchange(warmup + 2 * k + 1, sent, blocking=False)
            exchange(warmup + 2 * k + 2, returned, blocking=False)
        else:
            exchange(warmup + 2 * k + 2, sent + returned)
    for k in range(steady, total):
        exchange(total + k + 1, backward(k, k < total - 1))
    return tuple(found)
