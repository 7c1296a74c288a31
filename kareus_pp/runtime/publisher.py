"""Publishing of assignments: what all ranks are to do from a step on."""

from __future__ import annotations

import math
from dataclasses import replace

from kareus_pp.plan import Settings
from kareus_pp.runtime.messages import PROFILE, STOPPED, Assignment, encode
from kareus_pp.runtime.store import Store

POLL_S = 0.05
_REPORT_PERIOD_S = 1.0


class Publisher:
    """Numbers assignments and puts them into the store; the leader's half of `Coordinator`.

    Attributes:
        assignments: All that were published.
        step: The last step that the leader's own rank has finished.
        step_s: How long it took, in seconds.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.assignments: list[Assignment] = []
        self.step = -1
        self.step_s = 0.1

    @property
    def last(self) -> Assignment:
        """The last assignment."""
        return self.assignments[-1]

    def publish(
        self,
        phase: str,
        key: str,
        name: str,
        settings: Settings,
        time_s: float | None = None,
        energy_j: float | None = None,
        report_every: int | None = None,
    ) -> Assignment:
        """Publish an assignment that starts late enough for all ranks to have read it.

        Args:
            phase: `profile` or `apply`.
            key: Key of the steps it is for.
            name: Name of the plan.
            settings: Settings of all stages.
            time_s: Predicted iteration time in seconds, where there is one.
            energy_j: Predicted energy of an iteration in joules, where there is one.
            report_every: Steps between reports; None: every step while profiling, else about one
                a second.
        """
        margin = 1 + math.ceil(2 * POLL_S / max(self.step_s, 1e-3))
        stride = 1 if phase == PROFILE else max(1, math.ceil(_REPORT_PERIOD_S / self.step_s))
        every = stride if report_every is None else report_every
        return self._send(
            Assignment(
                number=len(self.assignments),
                phase=phase,
                key=key,
                name=name,
                first_step=self.step + 1 + margin,
                settings=tuple(" ".join(map(str, row)) for row in settings),
                report_every=every,
                time_s=time_s,
                energy_j=energy_j,
            )
        )

    def stop(self, key: str, reason: str) -> Assignment:
        """Tell all ranks to stand down at a named step."""
        return self._send(
            replace(
                Assignment(len(self.assignments), STOPPED, key, "default", 0, ()),
                first_step=self.step + 2,
                report_every=0,
                reason=reason,
            )
        )

    def _send(self, assignment: Assignment) -> Assignment:
        self.assignments.append(assignment)
        self._store.set(f"assignment/{assignment.number}", encode(assignment))
        return assignment
