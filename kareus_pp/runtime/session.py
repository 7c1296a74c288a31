"""The session of one rank: the calls that an integration makes on the training thread.

Nothing here blocks: instructions are noted, the next clock is requested when the device reaches the
end of an instruction, and everything else happens on the coordinator's thread. Any failure restores
default clocks, is logged once, and the session stands down; training goes on.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping
from typing import Any

from kareus_pp.config import KareusConfig
from kareus_pp.device.base import DEFAULT_CLOCK
from kareus_pp.device.select import Opened, open_controller
from kareus_pp.errors import ConfigError
from kareus_pp.plan import Plan
from kareus_pp.profile import Profile
from kareus_pp.runtime.boundaries import Boundaries, InlineBoundaries
from kareus_pp.runtime.coordinator import Coordinator
from kareus_pp.runtime.events import EventLog
from kareus_pp.runtime.messages import step_key
from kareus_pp.runtime.overlap import Executor, OverlapFollower
from kareus_pp.runtime.steps import StepTracker
from kareus_pp.runtime.store import LocalStore, Store
from kareus_pp.runtime.topology import Topology
from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.simulate.gpu_model import Work


class Session:
    """Observes, profiles, plans and applies on one rank.

    Args:
        config: The configuration.
        topology: Where the rank stands.
        work: Work of every instruction class of the stage; needed by the emulated device only.
        fingerprint: Effective model, precision, recompute, ... settings, as text.
        store: Shared by all ranks; None for a job of one rank.
        logger: Where lines for the user go.
        opened: An opened device; None opens the one that the configuration names.
        boundaries: How device boundaries are found; None for a host that executes the work itself.
            A callable gets the error handler and returns the boundaries.

    Raises:
        DeviceError: The device that the configuration names by name cannot be opened.
        ConfigError: The mode is apply and neither plan nor profile is named.
        KareusError: A plan or profile file that the configuration names is malformed.
    """

    def __init__(
        self,
        config: KareusConfig,
        topology: Topology,
        *,
        work: Mapping[InstructionClass, Work] | None = None,
        fingerprint: Mapping[str, str] | None = None,
        store: Store | None = None,
        logger: logging.Logger | None = None,
        opened: Opened | None = None,
        boundaries: Callable[[Callable[[BaseException], None]], Boundaries] | None = None,
    ) -> None:
        _check_files(config)
        self.config = config
        self.topology = topology
        self._log = logger or logging.getLogger("kareus_pp")
        self._opened = opened or open_controller(
            config, stage=topology.stage, local_rank=topology.local_rank, work=work
        )
        self._controller = self._opened.controller
        self._pacer = self._opened.pacer
        self._boundaries: Boundaries = (
            boundaries(self._fail) if boundaries is not None else InlineBoundaries()
        )
        self._mark = self._boundaries.mark
        self._classes: dict[tuple[Kind, int], InstructionClass] = {}
        self._tracker: StepTracker | None = None
        self._overlap: OverlapFollower | None = None
        self._step = 0
        self._closed = False
        self.events = EventLog(config.output, topology.rank)
        try:
            self._coordinator = Coordinator(
                config,
                topology,
                opened=self._opened,
                fingerprint=fingerprint or {},
                store=store or LocalStore(),
                events=self.events,
                logger=self._log,
            )
        except BaseException:
            self._controller.close()
            self.events.close()
            raise
        self._coordinator.start()
        atexit.register(self.close)

    @property
    def standing_down(self) -> str:
        """Why the session does nothing any more; empty while it works."""
        return self._coordinator.down

    @property
    def phase(self) -> str:
        """The present phase: observe, profile, apply or stopped."""
        return self._coordinator.phase

    def energy_read(self) -> tuple[float, int]:
        """Joules of this rank's GPU over all steps whose energy was read, and their number."""
        return self._coordinator.energy_read

    def follow_overlap(self, executor: Executor) -> None:
        """Hand the overlap settings of plans to an executor from the next step on.

        The session closes it with itself. Every rank of a tensor-parallel group does this before
        the same step.

        Args:
            executor: An executor with the blocks of this rank attached.
        """
        self._overlap = OverlapFollower(executor, self.topology.stage)
        self._coordinator.overlap = self._overlap

    def step_begin(self, microbatches: int, shape: str = "") -> None:
        """A training step begins; evaluation is not a step."""
        row = None
        try:
            if not self._coordinator.down:
                key = step_key(microbatches, shape)
                row = self._coordinator.row_for(self._step, key)
                self._tracker = StepTracker(self._step, key, row, self._controller.request)
                self._mark(self._tracker.on_start)
        except Exception as error:
            self._fail(error)
        if self._overlap is not None:
            try:
                self._overlap.step_begin(row)
            except Exception as error:
                self._fail(error)

    def instruction_begin(
        self, kind: Kind, microbatch: int, chunk: int = 0, communicates: bool = False
    ) -> None:
        """An instruction begins.

        Args:
            kind: What it does.
            microbatch: Index within the step.
            chunk: Model chunk on the stage.
            communicates: Whether gradients or parameters are communicated during it.
        """
        tracker = self._tracker
        if tracker is not None:
            try:
                tracker.expect(kind, microbatch, chunk, communicates)
                self._mark(tracker.on_begin)
            except Exception as error:
                self._fail(error)
        overlaps = False
        if self._overlap is not None:
            # Where the session has stood down, too: the group has agreed on the whole step.
            try:
                overlaps = self._overlap.instruction_begin(kind, microbatch, chunk)
            except Exception as error:
                self._fail(error)
        if self._pacer is not None:
            factor = self.config.emulated.overlap_factor if overlaps else 1.0
            self._pacer.begin_instruction(self._class_of(kind, chunk), factor)

    def instruction_end(self) -> None:
        """The instruction that began last has ended on the host."""
        if self._pacer is not None:
            self._pacer.end_instruction()
        tracker = self._tracker
        if tracker is not None:
            try:
                self._mark(tracker.on_end)
            except Exception as error:
                self._fail(error)

    @property
    def observes(self) -> bool:
        """Whether the present step follows no settings, so that its exchanges may be needed."""
        return self._tracker is not None and self._tracker.row is None

    def exchange(self, messages: str, blocking: bool = True) -> None:
        """The stage hands over messages to other stages, and takes messages of theirs.

        Needed in steps that are observed; elsewhere it may be left out.

        Args:
            messages: `N`, `P`, `n` and `p` as in `kareus_pp.exchanges.Exchange`.
            blocking: Whether it goes on only when all of them are through.
        """
        if self._tracker is not None:
            self._tracker.exchange(messages, blocking)

    def step_end(self) -> None:
        """The training step has ended on the host."""
        self._end_overlap()
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        try:
            tracker.finish()
            self._step += 1

            def ended(at_s: float) -> None:
                tracker.ended_s = at_s
                self._coordinator.step_done(tracker)

            self._mark(ended)
        except Exception as error:
            self._fail(error)

    def step_abort(self) -> None:
        """An exception of the user's passed through the step: default clocks, nothing recorded."""
        self._tracker = None
        self._end_overlap()
        self._restore("a step was aborted by an exception")

    def suspend(self, reason: str) -> None:
        """Default clocks until the next training step: evaluation, checkpoint saving, ..."""
        if not self._coordinator.down:
            self._restore(reason)

    def resume(self) -> None:
        """The interruption is over; the next step takes the plan up again."""
        self.events.write("resume", step=self._step)

    def stand_down(self, reason: str) -> None:
        """Default clocks for good, said once to the user and to the other ranks."""
        self._tracker = None
        self._coordinator.stand_down(reason)

    def close(self) -> None:
        """Restore default clocks, write what is left and end; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._tracker = None
        self._boundaries.close()
        try:
            if self._overlap is not None:
                self._overlap.close()
        finally:
            self._coordinator.close()
            self._controller.close()
            self.events.close()
        if self.events.error:
            self._log.warning("kareus-pp: %s; the event log is incomplete", self.events.error)

    def _end_overlap(self) -> None:
        if self._overlap is not None:
            try:
                self._overlap.step_end()
            except Exception as error:
                self._fail(error)

    def _class_of(self, kind: Kind, chunk: int) -> InstructionClass:
        found = self._classes.get((kind, chunk))
        if found is None:
            found = InstructionClass(self.topology.stage, kind, chunk)
            self._classes[kind, chunk] = found
        return found

    def _restore(self, reason: str) -> None:
        self.events.write("suspend", step=self._step, reason=reason)
        try:
            self._mark(lambda _: self._controller.request(DEFAULT_CLOCK))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stand down: default clocks, one line for the user, the other ranks are told."""
        self.stand_down(f"{type(error).__name__}: {error}")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _check_files(config: KareusConfig) -> None:
    """Every rank checks what the user names, so that all end alike where it is malformed."""
    if config.plan is not None:
        Plan.load(config.plan)
    if config.profile is not None:
        Profile.load(config.profile)
    if config.mode == "apply" and config.plan is None and config.profile is None:
        raise ConfigError(
            "the kareus config has mode = 'apply' and neither 'plan' nor 'profile'; name a plan or "
            "profile file, or use mode 'auto'"
        )
