"""Whole sessions on the stub NVML: real guards set the clocks that a plan names."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kareus_pp.builders import build_1f1b
from kareus_pp.config import parse_config
from kareus_pp.device.errors import OwnedError
from kareus_pp.measure.samples import MIN_TICKS, read_window
from kareus_pp.plan import Plan
from kareus_pp.runtime.events import read_events
from kareus_pp.runtime.session import Session
from kareus_pp.runtime.store import LocalStore
from kareus_pp.runtime.topology import Topology
from kareus_pp.setting import Setting
from tests.device.conftest import wait_until
from tests.stub import nvml as stub
from tests.stub.nvml import StubMachine

SCHEDULE = build_1f1b(2, 3)
INSTRUCTION_S = 0.02
CLOCKS_MHZ = (900, 1200)


def plan_with(clocks_mhz: tuple[int, ...]) -> Plan:
    rows = tuple(
        tuple(Setting(clocks_mhz[n % len(clocks_mhz)]) for n in range(len(row)))
        for row in SCHEDULE.order
    )
    return Plan(SCHEDULE, rows)


class Job:
    """Two ranks in threads; an instruction sleeps, as the host does that waits for its device."""

    def __init__(self, folder: Path, plan: Plan | None, **config: Any) -> None:
        if plan is not None:
            plan.save(folder / "plan.json")
            config["plan"] = str(folder / "plan.json")
        values = {"device": "nvml", "output": str(folder / "out"), **config}
        store = LocalStore()
        self.folder = folder
        self.steps = 0
        self.sessions = [
            Session(
                parse_config(values),
                Topology(
                    stage, 2, SCHEDULE.model_order, rank=stage, world_size=2, local_rank=stage
                ),
                store=store,
            )
            for stage in (0, 1)
        ]

    def step(self) -> None:
        threads = [threading.Thread(target=self._rank, args=(s,)) for s in self.sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        self.steps += 1

    def train_until(self, ready: Callable[[], object], most: int = 60) -> None:
        for _ in range(most):
            if ready():
                return
            self.step()
        raise AssertionError(f"not ready after {most} steps")

    def events(self, rank: int, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "out" / f"events-rank{rank}.jsonl"
        return [event for event in read_events(path) if event["event"] == kind]

    @staticmethod
    def _rank(session: Session) -> None:
        session.step_begin(3)
        for instruction in SCHEDULE.order[session.topology.stage]:
            session.instruction_begin(instruction.kind, instruction.microbatch, instruction.chunk)
            time.sleep(INSTRUCTION_S)
            session.instruction_end()
        session.step_end()


@contextmanager
def job(folder: Path, plan: Plan | None, **config: Any) -> Iterator[Job]:
    running = Job(folder, plan, **config)
    try:
        yield running
    finally:
        for session in running.sessions:
            session.close()


def in_phase(running: Job, phase: str) -> Callable[[], bool]:
    return lambda: all(session.phase == phase for session in running.sessions)


def test_a_plan_reaches_the_driver_and_energy_comes_from_the_counter(
    machine: StubMachine, tmp_path: Path
) -> None:
    with job(tmp_path, plan_with(CLOCKS_MHZ)) as running:
        running.train_until(in_phase(running, "apply"))
        mark = machine.mark()
        for _ in range(8):
            running.step()
    assert [machine.lock_mhz(0), machine.lock_mhz(1)] == [0, 0]
    for rank in (0, 1):
        locked = [event.first for event in machine.events(mark, stub.LOCK, rank)]
        assert set(locked) == set(CLOCKS_MHZ)
        assert len(locked) >= 6 * (len(SCHEDULE.order[rank]) - 1)
        energies = [event["energy_j"] for event in running.events(rank, "step")]
        assert {event["source"] for event in running.events(rank, "step")} == {"counter"}
        assert any(energy is not None and energy > 0 for energy in energies)
        switches = [event["switches"] for event in running.events(rank, "step")]
        assert max(switches) >= len(SCHEDULE.order[rank]) - 1, "switches are reported"
        assert any(event["temperature_c"] for event in running.events(rank, "step"))
    # Locked graphics clocks only: nothing else of the driver was ever set.
    assert {event.operation for event in machine.events()} == {stub.LOCK, stub.RESET}


def test_a_plan_of_one_clock_leaves_the_driver_alone_once_it_is_verified(
    machine: StubMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kareus_pp.runtime.coordinator._VERIFIED_STEPS", 3)
    with job(tmp_path, plan_with((900,))) as running:
        running.train_until(in_phase(running, "apply"))

        def quiet() -> bool:
            before = machine.get(0, "calls")
            time.sleep(0.1)
            return machine.get(0, "calls") == before

        running.train_until(quiet)
        calls = machine.get(0, "calls")
        for _ in range(4):
            running.step()
        # Default clocks between steps are the session's choice: a set, a reset, and no reading.
        sets = len([e for e in machine.events() if e.operation in (stub.LOCK, stub.RESET)])
        assert machine.get(0, "calls") - calls <= sets


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((f"{stub.LOCK}@1={stub.GPU_IS_LOST},0,-1",), "GPU is lost"),
        pytest.param(
            (f"{stub.LOCK}@1={stub.NO_PERMISSION},0,-1",),
            "CAP_SYS_ADMIN",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (f"{stub.LOCK}@1=0,50000,-1",),
            "too long to follow instructions",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lost", "no permission", "slow"],
)
def test_a_fault_stands_the_job_down_with_one_line_on_each_rank(
    machine: StubMachine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: tuple[str, ...],
    words: str,
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        job(tmp_path, plan_with(CLOCKS_MHZ)) as running,
    ):
        running.train_until(in_phase(running, "apply"))
        running.step()
        machine.faults(*fault)
        running.train_until(lambda: all(s.standing_down for s in running.sessions))
        running.step()
        assert wait_until(lambda: machine.lock_mhz(0) == machine.lock_mhz(1) == 0)
        mark = machine.mark()
        running.step()
        running.step()
        assert machine.events(mark, stub.LOCK) == [], "training goes on at default clocks"
    lines = [r.getMessage() for r in caplog.records if "stands down" in r.getMessage()]
    assert len(lines) == 2
    assert all(words in line for line in lines)


def test_two_ranks_of_one_gpu_cannot_both_set_it(
    machine: StubMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    topology = Topology(0, 2, SCHEDULE.model_order, rank=0, world_size=2, local_rank=0)
    config = parse_config({"device": "nvml", "output": str(tmp_path)})
    session = Session(config, topology, store=LocalStore())
    try:
        with pytest.raises(OwnedError, match=machine.uuid(1)):
            Session(config, dataclasses.replace(topology, rank=1, local_rank=1), store=LocalStore())
    finally:
        session.close()


def test_windows_on_guard_samples(machine: StubMachine, open_guard: Callable[..., Any]) -> None:
    """A counter that moves every 100 ms: seconds can be read from it, a microbatch cannot."""
    controller = open_guard()
    controller.start_sampling(0.01)
    time.sleep(0.3)
    start_s = time.monotonic()
    controller.request(900)
    time.sleep(1.0)
    end_s = time.monotonic()
    time.sleep(0.25)
    samples = controller.drain()
    window = read_window(samples, start_s, end_s)
    assert window.rejected == ""
    assert window.energy_j is not None
    assert window.energy_sd_j is not None
    watts = 60 + 240 * (900 / 1410) ** 3  # the stub's model
    assert window.energy_j == pytest.approx(watts * (end_s - start_s), rel=0.06)
    short = read_window(samples, start_s, start_s + 0.03)
    assert short.energy_j is None
    assert f"fewer than {MIN_TICKS} ticks" in short.rejected
    machine.set(0, limit_w=120)
    controller.request(1410)
    time.sleep(0.6)
    capped = read_window(controller.drain(), time.monotonic() - 0.5, time.monotonic() - 0.1)
    assert "power cap" in capped.rejected, "a clock that was not held is marked, never planned with"
