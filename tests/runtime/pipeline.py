"""A pipeline of sessions in one process: a thread for each rank, paced by emulated GPUs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kareus_pp.config import KareusConfig, parse_config
from kareus_pp.exchanges import Exchange
from kareus_pp.runtime.events import read_events
from kareus_pp.runtime.session import Session
from kareus_pp.runtime.store import LocalStore
from kareus_pp.runtime.topology import Topology
from kareus_pp.schedule import Instruction, InstructionClass, Schedule
from kareus_pp.simulate.gpu_model import Work, load_gpu_model

READY_LIMIT_S = 120.0
STEP_LIMIT_S = 60.0


def works_of(schedule: Schedule, forward_s: tuple[float, ...]) -> dict[InstructionClass, Work]:
    """Compute-bound work that takes `forward_s` of each stage at the top clock; backward twice."""
    model = load_gpu_model("a100")
    works = {}
    for cls in schedule.classes:
        unit = Work(flops=1e9, bytes=0.0)
        scale = forward_s[cls.stage] / model.time_s(unit, model.top_mhz)
        works[cls] = unit.scaled(scale * (1 if cls.kind.value == "F" else 2))
    return works


@dataclass
class Pipeline:
    """Runs training steps of a schedule on all ranks at once.

    The exchanges of every stage are told to its session; what they wait for is in the schedule.
    """

    schedule: Schedule
    output: Path
    config: KareusConfig
    works: dict[InstructionClass, Work]
    exchanges: Sequence[Sequence[Exchange]] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)

    def __enter__(self) -> Pipeline:
        store = LocalStore()
        for stage in range(self.schedule.stages):
            topology = Topology(
                stage=stage,
                stages=self.schedule.stages,
                model_order=self.schedule.model_order,
                rank=stage,
                world_size=self.schedule.stages,
                local_rank=stage,
            )
            self.sessions.append(
                Session(
                    self.config,
                    topology,
                    work=self.works,
                    fingerprint=self.fingerprint,
                    store=store,
                )
            )
        return self

    def __exit__(self, *_: Any) -> None:
        for session in self.sessions:
            session.close()

    def step(self, schedule: Schedule | None = None) -> None:
        """One training step."""
        schedule = schedule or self.schedule
        done = {instruction: threading.Event() for instruction in schedule.instructions}
        needs: dict[Instruction, list[threading.Event]] = {i: [] for i in schedule.instructions}
        for edge in schedule.edges:
            before = schedule.instructions[edge.before]
            needs[schedule.instructions[edge.after]].append(done[before])
        errors: list[BaseException] = []

        def rank(session: Session) -> None:
            try:
                session.step_begin(schedule.microbatches)
                own = list(self.exchanges[session.topology.stage]) if self.exchanges else []
                for position, instruction in enumerate(schedule.order[session.topology.stage]):
                    while own and own[0].position == position:
                        exchange = own.pop(0)
                        session.exchange(exchange.messages, exchange.blocking)
                    for event in needs[instruction]:
                        assert event.wait(STEP_LIMIT_S)
                    session.instruction_begin(
                        instruction.kind, instruction.microbatch, instruction.chunk
                    )
                    session.instruction_end()
                    done[instruction].set()
                for exchange in own:
                    session.exchange(exchange.messages, exchange.blocking)
                session.step_end()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=rank, args=(session,)) for session in self.sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(STEP_LIMIT_S)
        assert not errors, errors

    def steps_until(self, ready: Callable[[], bool]) -> int:
        """Train until `ready`; the number of steps. A busy machine plans for longer."""
        limit = time.monotonic() + READY_LIMIT_S
        for count in itertools.count():
            if ready():
                return count
            assert time.monotonic() < limit, f"not ready after {count} steps"
            self.step()
            time.sleep(0.005)  # a dry run takes no time: let the coordinators work
        raise AssertionError("never")

    def events(self, rank: int, event: str) -> list[dict[str, Any]]:
        """The events of one kind of a rank; call after the sessions are closed."""
        path = self.output / f"events-rank{rank}.jsonl"
        return [e for e in read_events(path) if e["event"] == event]


def make_pipeline(
    schedule: Schedule,
    output: Path,
    forward_s: tuple[float, ...] | None = None,
    **config: Any,
) -> Pipeline:
    """A pipeline of emulated A100s; `config` holds further keys of the kareus config."""
    forward_s = forward_s or (0.004,) * schedule.stages
    values = {"device": "emulated", "output": str(output), **config}
    return Pipeline(schedule, output, parse_config(values), works_of(schedule, forward_s))
