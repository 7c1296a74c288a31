"""The coordinator of one rank: everything that must not happen on the training thread.

It takes finished steps, adds their energy, writes events, tells the leader (rank 0) what it wants
to know, and follows the assignments that the leader publishes.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Mapping

from kareus_pp.config import KareusConfig
from kareus_pp.device.base import DEFAULT_CLOCK, Sample
from kareus_pp.device.select import Opened
from kareus_pp.measure import WindowReading, read_window
from kareus_pp.runtime.events import EventLog
from kareus_pp.runtime.leader import Leader
from kareus_pp.runtime.messages import (
    APPLY,
    DOWN_KEY,
    OBSERVE,
    PROFILE,
    STOPPED,
    Assignment,
    Record,
    Stream,
    decode,
    encode,
)
from kareus_pp.runtime.overlap import OverlapFollower
from kareus_pp.runtime.steps import StageAssignment, StepTracker
from kareus_pp.runtime.store import Store
from kareus_pp.runtime.topology import Topology
from kareus_pp.runtime.windows import TICK_WAIT_S, ceiling_mhz, next_window, share_of
from kareus_pp.schedule import Instruction

_POLL_S = 0.05
_IDLE_POLL_S = 0.5
# Readings are kept for this long before the first step that still needs them.
_MARGIN_S = 2.0
_VERIFIED_STEPS = 20


class Coordinator:
    """Follower of one rank, and on rank 0 host of the leader.

    Attributes:
        down: Why the rank stands down; empty while it works.
        phase: The present phase.
        energy_read: Joules of this rank's GPU over all steps that were read, and their number.
        overlap: Knows what the blocks of the rank can overlap; None where nothing is.
    """

    def __init__(
        self,
        config: KareusConfig,
        topology: Topology,
        *,
        opened: Opened,
        fingerprint: Mapping[str, str],
        store: Store,
        events: EventLog,
        logger: logging.Logger,
    ) -> None:
        self.down = ""
        self.phase = OBSERVE
        self.energy_read = (0.0, 0)
        self.overlap: OverlapFollower | None = None
        self._config = config
        self._topology = topology
        self._controller = opened.controller
        self._facts = opened.facts
        self._pacer = opened.pacer
        self._store = store
        self._events = events
        self._log = logger
        self._inbox: queue.SimpleQueue[StepTracker | str | None] = queue.SimpleQueue()
        self._closing = False
        self._rows: tuple[StageAssignment, ...] = ()
        self._stop_from: int | None = None
        self._stop_reason = ""
        self._next_assignment = 0
        self._observed: dict[str, list[StepTracker]] = {}
        self._streams: dict[str, tuple[Instruction, ...]] = {}
        self._warned: set[str] = set()
        self._waiting: list[StepTracker] = []
        self._settled_s = -math.inf
        self._top_mhz = max(self._facts.clocks_mhz, default=None)
        self._samples: list[Sample] = []
        self._sampling = False
        self._applied_steps = 0
        self._switches = 0
        self._leader = (
            Leader(config, topology, store, fingerprint, events, logger)
            if topology.rank == 0
            else None
        )
        self._thread = threading.Thread(target=self._run, name="kareus-coordinator", daemon=True)

    def start(self) -> None:
        """Begin to work in the background."""
        self._sample(True)
        self._thread.start()

    def row_for(self, step: int, key: str) -> StageAssignment | None:
        """What the stage follows in a step; None for default clocks. Costs no system call."""
        if self._stop_from is not None and step >= self._stop_from:
            return None
        for row in reversed(self._rows):
            if row.assignment.key == key and row.assignment.first_step <= step:
                return row
        return None

    def step_done(self, tracker: StepTracker) -> None:
        """A step is over on the device."""
        tracker.switches_total = self._controller.applied().switches
        self._inbox.put(tracker)

    def stand_down(self, reason: str) -> None:
        """Default clocks from now on; said once, to the user and to the other ranks."""
        if self.down:
            return
        self.down = reason
        self.phase = STOPPED
        self._controller.request(DEFAULT_CLOCK)
        self._log.warning(
            "kareus-pp: rank %d stands down, training goes on at default clocks: %s",
            self._topology.rank,
            reason,
        )
        self._events.write("stand-down", reason=reason)
        self._inbox.put(reason)

    def close(self) -> None:
        """Finish what is in hand and end."""
        self._closing = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)
        if self._leader is not None:
            self._leader.close()

    # The background thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._finish()
        except Exception as error:
            self.stand_down(f"{type(error).__name__}: {error}")
            self._tell_down()

    def _turn(self) -> None:
        settled = self.phase == APPLY and self._applied_steps > _VERIFIED_STEPS
        self._take(_IDLE_POLL_S if settled or self.down else _POLL_S)
        if self.down:
            return
        if error := self._controller.applied().error:
            self.stand_down(error)
            return
        self._collect()
        self._follow()
        if self._leader is not None:
            self._leader.tick()

    def _take(self, timeout_s: float) -> None:
        """Take one finished step, or wait a little for one."""
        try:
            item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(item, StepTracker):
            self._waiting.append(item)
            # Not when its energy is known: to stand down waits for no reading.
            if self._stop_from is not None and item.number + 1 >= self._stop_from:
                self.stand_down(self._stop_reason)
            if item.row is None and not self.down:
                self._samples.extend(self._controller.drain())
                self._observe(item)
        elif isinstance(item, str):
            self._tell_down()

    def _tell_down(self) -> None:
        try:
            self._store.set(DOWN_KEY, f"rank {self._topology.rank}: {self.down}")
            if self._leader is not None:
                # Our own rank follows nothing any more; the others still follow the leader.
                self._leader.tick()
        except Exception as error:
            self._log.warning("kareus-pp: the other ranks could not be told: %s", error)

    def _collect(self, *, all_now: bool = False) -> None:
        """Add energy to finished steps as soon as the samples reach far enough."""
        self._samples.extend(self._controller.drain())
        now = time.monotonic()
        while window := next_window(self._waiting, self._sampling, None if all_now else now):
            start_s, end_s = window[0].started_s, window[-1].ended_s
            reading = read_window(self._samples, start_s, end_s, self._top_mhz)
            self._waiting = self._waiting[len(window) :]
            self._settled_s = end_s
            for step in window:
                length_s = step.ended_s - step.started_s
                self._settle(step, reading, length_s / max(end_s - start_s, 1e-9))
        # A step that is still running began after the last one that was settled.
        oldest_s = self._settled_s - _MARGIN_S
        self._samples = [sample for sample in self._samples if sample.at_s >= oldest_s]

    def _settle(self, step: StepTracker, reading: WindowReading, share: float) -> None:
        """All is known of a step: write the event, report, observe.

        Args:
            step: The step.
            reading: What was read over the window that the step is part of.
            share: The step's share of that window.
        """
        assignment = step.row.assignment if step.row is not None else None
        record = Record(
            rank=self._topology.rank,
            step=step.number,
            assignment=assignment.number if assignment is not None else -1,
            window_s=step.ended_s - step.started_s,
            duration_s=step.durations_s,
            energy_j=share_of(reading.energy_j, share),
            energy_sd_j=share_of(reading.energy_sd_j, share),
            temperature_c=reading.temperature_c,
            rejected=step.mismatch or (reading.rejected if self._sampling else ""),
        )
        if record.energy_j is not None:
            joules, steps = self.energy_read
            self.energy_read = (joules + record.energy_j, steps + 1)
        switches = step.switches_total - self._switches
        self._switches = step.switches_total
        self._write_step(step, record, switches)
        if step.mismatch:
            self._warn_steps(
                step.key,
                f"the executed instructions do not match the plan ({step.mismatch}); default "
                f"clocks for the rest of such steps",
            )
        every = assignment.report_every if assignment is not None else 0
        if every and step.number % every == 0:
            self._store.set(f"record/{record.rank}/{record.step}", encode(record))
        if assignment is not None and assignment.phase == APPLY:
            self._applied_steps += 1
            if self._applied_steps == _VERIFIED_STEPS and not self._config.sample_always:
                self._sample(False)
        if self._leader is not None:
            self._leader.step_done(step.number, record.window_s)

    def _write_step(self, step: StepTracker, record: Record, switches: int) -> None:
        assignment = step.row.assignment if step.row is not None else None
        self._events.write(
            "step",
            step=step.number,
            phase=assignment.phase if assignment is not None else OBSERVE,
            plan=assignment.name if assignment is not None else "default",
            key=step.key,
            time_s=record.window_s,
            energy_j=record.energy_j,
            energy_sd_j=record.energy_sd_j,
            temperature_c=record.temperature_c,
            switches=switches,
            source=self._facts.source.value,
            rejected=record.rejected,
            instructions=[
                f"{instruction} {clock or 'default'}"
                for instruction, clock in zip(
                    step.instructions(self._topology.stage), step.clocks_mhz, strict=False
                )
            ],
            duration_s=[round(value, 7) for value in record.duration_s],
        )

    def _observe(self, step: StepTracker) -> None:
        """Publish the stream of a key once it was the same in enough steps."""
        planned = {r.assignment.key for r in self._rows if r.assignment.phase == APPLY}
        if planned and step.key not in planned:
            self._warn_steps(step.key, "there is no plan for them; default clocks")
        if step.key in self._streams:
            return
        seen = self._observed.setdefault(step.key, [])
        if seen and seen[0].stream != step.stream:
            self._warn_steps(
                step.key, "the executed instructions differ from step to step; default clocks"
            )
            seen.clear()
        seen.append(step)
        if len(seen) < self._config.observe_steps:
            return
        stage = self._topology.stage
        self._streams[step.key] = step.instructions(stage)
        del self._observed[step.key]
        stream = Stream(
            rank=self._topology.rank,
            stage=stage,
            instructions=" ".join(map(str, step.instructions(stage))),
            communicating=" ".join(map(str, step.communicating(stage))),
            clocks_mhz=self._facts.clocks_mhz,
            ceiling_mhz=ceiling_mhz(self._samples),
            device=self._facts.name,
            source=self._facts.source.value,
            scope=self._facts.scope,
            exchanges=" ".join(map(str, step.exchanges)),
            overlaps=()
            if self.overlap is None
            else self.overlap.candidates(self._config.overlap.candidates),
        )
        self._events.write("observed", key=step.key, instructions=stream.instructions)
        self._store.set(f"stream/{step.key}/{stream.rank}", encode(stream))
        if self._leader is not None:
            self._leader.observed(step.key)

    def _follow(self) -> None:
        """Take up new assignments."""
        while (text := self._store.get(f"assignment/{self._next_assignment}")) is not None:
            assignment = decode(Assignment, text)
            self._next_assignment += 1
            self._events.write(
                "assignment",
                number=assignment.number,
                phase=assignment.phase,
                plan=assignment.name,
                first_step=assignment.first_step,
                predicted_time_s=assignment.time_s,
                predicted_energy_j=assignment.energy_j,
                reason=assignment.reason,
            )
            if assignment.phase == STOPPED:
                self._stop_reason = assignment.reason
                self._stop_from = assignment.first_step
                continue
            instructions = self._streams.get(assignment.key)
            if instructions is None:
                raise ValueError(f"an assignment for steps {assignment.key} that were not observed")
            row = StageAssignment.prepare(assignment, self._topology.stage, instructions)
            if self.overlap is not None:
                note = self.overlap.check(row)
                if note:
                    self._warn_once("split", note)
            elif row.overlapped:
                self._warn_once(
                    "overlap",
                    f"the plan {assignment.name!r} overlaps communication, which this job does not "
                    f"do; sequential instead (overlap.enabled turns it on)",
                )
            kept = [r for r in self._rows if r.assignment.key != assignment.key]
            previous = [r for r in self._rows if r.assignment.key == assignment.key][-1:]
            self._rows = (*kept, *previous, row)
            self.phase = assignment.phase
            if assignment.phase == PROFILE:
                self._applied_steps = 0
            if assignment.phase in (PROFILE, APPLY) and self._applied_steps < _VERIFIED_STEPS:
                self._sample(True)

    def _finish(self) -> None:
        """The job ends: take the last steps, stop sampling, write the summary."""
        while not self._inbox.empty():
            self._take(0.0)
        if self._waiting and self._sampling and not self.down:
            time.sleep(TICK_WAIT_S)
        self._collect(all_now=True)
        self._sample(False)
        applied = self._controller.applied()
        values = {"switches": applied.switches, "device_error": applied.error}
        if self._pacer is not None:
            values |= {
                "overruns": self._pacer.overruns,
                "paced_instructions": self._pacer.instructions,
            }
        self._events.write("end", phase=self.phase, reason=self.down, **values)

    def _sample(self, wanted: bool) -> None:
        if wanted and not self._sampling:
            self._controller.start_sampling(self._config.profiling.sample_period_s)
        elif self._sampling and not wanted:
            self._controller.stop_sampling()
        self._sampling = wanted

    def _warn_steps(self, key: str, text: str) -> None:
        microbatches, _, shape = key.partition(":")
        described = f"{microbatches} microbatches" + (f" of shape {shape}" if shape else "")
        self._warn_once(key, f"steps of {described}: {text}")

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._log.warning("kareus-pp: %s", text)
