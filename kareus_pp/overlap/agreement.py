"""All ranks of a tensor-parallel group take the same overlap settings, or all none.

Ranks that split differently, or use different communicators, issue different collectives and hang.
So before a step every rank publishes a digest of what it is about to do, reads the others' and
takes the decision that the store records first: whoever times out first makes all refuse. A rank
that has nothing to overlap in a step says so and waits for nobody.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

from torch.distributed.distributed_c10d import Store

from kareus_pp.errors import OverlapError

_logger = logging.getLogger(__name__)
_AGREED, _REFUSED, _DECLINED = "agreed", "refused", "declined"
_LONGEST_S = 86400.0
_PATIENCE = 3
"""Time-outs in a row after which a rank gives up: another one does not take part any more."""


class Agreement:
    """Agreement of the ranks of one group, step by step, through a key-value store.

    The ranks of a group make their agreements in the same order: each has keys of its own, so that
    what was said through a former one, of a step of the same number, is never taken for an answer.

    Args:
        store: A store that all ranks of the group reach, such as the job's TCPStore. The rank
            that hosts it must outlive the others' steps.
        group: Name that this group and no other has, the same on all of its ranks.
        rank: Rank within the group.
        size: Number of ranks of the group.
        timeout_s: Longest wait for the other ranks at the beginning of a step.

    Raises:
        OverlapError: The timeout is no number of seconds from above 0 to a day.
    """

    _made: ClassVar[Counter[tuple[str, int]]] = Counter()

    def __init__(
        self, store: Store, group: str, rank: int, size: int, timeout_s: float = 10.0
    ) -> None:
        if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= _LONGEST_S:
            raise OverlapError(
                f"the timeout of an agreement is {timeout_s!r}; give a number of seconds above 0 "
                f"and up to {_LONGEST_S:g}, as 10.0"
            )
        self._store = store
        self._prefix = f"kareus/overlap/{group}/{self._made[group, rank]}"
        self._made[group, rank] += 1
        self._last = -1
        self._rank, self._size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        self._said = False
        self._timeouts = 0

    def agree(self, step: int, facts: Sequence[str]) -> bool:
        """Whether all ranks state the same facts for a step.

        All ranks that reach the store get the same answer. Never raises: where the store fails,
        the answer is no.

        Args:
            step: Number of the step, above those of all steps before.
            facts: What must be the same: settings, communicator levels, reasons against overlap.
        """
        reason = self.reason_against(step, facts)
        if reason:
            self._say(reason)
        return not reason

    def reason_against(self, step: int, facts: Sequence[str]) -> str:
        """As `agree`, without a word in the log.

        Args:
            step: Number of the step, above those of all steps before.
            facts: What must be the same.

        Returns:
            Why the ranks do not agree, in words; empty where they do.
        """
        if self._size == 1:
            return ""
        if step <= self._last:
            return f"step {step} does not come after step {self._last}, which was asked for"
        self._last = step
        if self._timeouts >= _PATIENCE:
            self.decline(step)
            return f"a rank did not answer in {_PATIENCE} steps in a row"
        try:
            return self._decide(step, digest(facts))
        except Exception as error:
            return f"the store cannot be reached ({' '.join(str(error).split()):.120})"

    def decline(self, step: int) -> None:
        """Say that this rank overlaps nothing in a step, and go on; never raises."""
        if self._size == 1:
            return
        try:
            self._store.set(f"{self._prefix}/{step}/{self._rank}", _DECLINED)
            self._forget(step - 2)
        except Exception as error:
            self._say(f"the store cannot be reached ({' '.join(str(error).split()):.120})")

    def _decide(self, step: int, own: str) -> str:
        prefix = f"{self._prefix}/{step}"
        others = [f"{prefix}/{rank}" for rank in range(self._size) if rank != self._rank]
        self._store.set(f"{prefix}/{self._rank}", own)
        reason = ""
        try:
            self._store.wait(others, self._timeout)
            self._timeouts = 0
            if any(self._store.get(key).decode() != own for key in others):
                reason = "the ranks have different settings"
        except Exception:
            self._timeouts += 1
            reason = f"a rank did not answer within {self._timeout.total_seconds():g} s"
        wish = _REFUSED if reason else _AGREED
        decision: str = self._store.compare_set(f"{prefix}/decision", "", wish).decode()
        self._forget(step - 2)
        return "" if decision == _AGREED else reason or "another rank refused"

    def _forget(self, step: int) -> None:
        """Delete what was said of a step that all ranks have left behind."""
        if step >= 0:
            for name in (self._rank, "decision") if self._rank == 0 else (self._rank,):
                self._store.delete_key(f"{self._prefix}/{step}/{name}")

    def _say(self, reason: str) -> None:
        if not self._said:
            self._said = True
            _logger.warning("overlap: all ranks run sequentially, because %s", reason)


def digest(facts: Sequence[str]) -> str:
    """A short hash of facts, the same in every process."""
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
