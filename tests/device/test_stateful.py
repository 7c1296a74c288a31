"""Random operations with random faults on real guards: the invariants hold at every moment.

Trainers are real processes (forked from this one for speed, as a bare control loop over a pipe);
guards are real; the driver is the stub. Checked after every operation:

* a GPU has at most one owner: never two guards, and locks only by the owner's guard;
* a GPU is never locked without a lease;

and at the end, when every trainer is gone and faults are over: every GPU is unlocked, no lease and
no guard is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kareus_pp.device.guard import GuardController
from kareus_pp.device.guard_process import clean_up
from kareus_pp.device.lease import RUNTIME_VARIABLE, leases
from kareus_pp.errors import DeviceError
from tests.device.conftest import wait_until
from tests.stub import nvml as stub
from tests.stub.crash import plugin_processes
from tests.stub.nvml import StubMachine, compiler

GPUS = 2
SLOTS = 3
"""More trainers than GPUs: some have to be refused."""
FAULTS = (
    "",
    f"{stub.LOCK}@*={stub.NO_PERMISSION},0,1",
    f"{stub.LOCK}@*=999,0,2",
    f"{stub.RESET}@*=999,0,2",
    f"{stub.LOCK}@*=0,2000,5",
    f"nvmlDevice*@0={stub.GPU_IS_LOST},0,6",
    f"nvmlDevice*@1={stub.GPU_IS_LOST},0,3",
)
counted = {"operations": 0, "starts": 0, "kills": 0, "refused": 0}


class TrainerProcess:
    """A process that holds a controller and does what the pipe says."""

    def __init__(self, uuid: str) -> None:
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _train(uuid, theirs)
            finally:
                os._exit(0)
        theirs.close()
        self.error = self.ask("start")
        self.guard = 0 if self.error else int(self.ask("guard"))

    def ask(self, *message: Any) -> Any:
        self.pipe.send(message)
        return self.pipe.recv()

    def end(self, number: int) -> None:
        os.kill(self.pid, number)
        os.waitpid(self.pid, 0)
        self.pipe.close()


def _train(uuid: str, pipe: Connection) -> None:
    controller: GuardController | None = None
    while True:
        what, *values = pipe.recv()
        answer: Any = None
        if what == "start":
            try:
                controller = GuardController(uuid)
            except DeviceError as error:
                answer = str(error)
        elif what == "exit":
            return
        elif controller is not None:
            if what == "guard":
                answer = controller.guard_pid
            elif what == "request":
                controller.request(*values)
            elif what == "error":
                answer = controller.applied().error
            elif what == "sample":
                controller.start_sampling(0.005)
            elif what == "close":
                controller.close()
        pipe.send(answer)


class Jobs(RuleBasedStateMachine):
    """Trainers come, ask, crash and go; guards are killed; the driver has its moods."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kareus-pp-stateful-"))
        self.machine = StubMachine(self.folder / "machine", GPUS)
        os.environ.update(self.machine.environment())
        os.environ[RUNTIME_VARIABLE] = str(self.folder / "run")
        self.slots: dict[int, tuple[int, TrainerProcess]] = {}
        self.guards: dict[int, set[int]] = {gpu: set() for gpu in range(GPUS)}
        self.seen = 0

    def count(self, what: str = "") -> None:
        counted["operations"] += 1
        if what:
            counted[what] += 1

    def some(self, slot: int) -> tuple[int, TrainerProcess] | None:
        return self.slots.get(slot)

    @initialize()
    def begin(self) -> None:
        for gpu in range(GPUS):
            self.start(gpu, gpu)
            self.ask(gpu, 1200, settle=True)

    @rule(slot=st.integers(0, SLOTS - 1), gpu=st.integers(0, GPUS - 1))
    def start(self, slot: int, gpu: int) -> None:
        if slot in self.slots:
            return self.ask(slot, 900)
        self.count("starts")
        trainer = TrainerProcess(self.machine.uuid(gpu))
        if trainer.error:
            counted["refused"] += 1
            trainer.end(signal.SIGKILL)
            return None
        self.guards[gpu].add(trainer.guard)
        self.slots[slot] = (gpu, trainer)
        return None

    @precondition(lambda self: self.slots)
    @rule(slot=st.integers(0, SLOTS - 1), mhz=st.sampled_from([0, 900, 1005, 1200, 1410]))
    def ask(self, slot: int, mhz: int, settle: bool = False) -> None:
        self.count()
        if found := self.some(slot):
            gpu, trainer = found
            trainer.ask("request", mhz)
            if settle and _lives(trainer.guard) and not trainer.ask("error"):
                wait_until(lambda: self.machine.lock_mhz(gpu) == mhz, 0.1)

    @precondition(lambda self: self.slots)
    @rule(slot=st.integers(0, SLOTS - 1), mhz=st.sampled_from([900, 1410]))
    def ask_and_wait(self, slot: int, mhz: int) -> None:
        self.ask(slot, mhz, settle=True)

    @precondition(lambda self: self.slots)
    @rule(slot=st.integers(0, SLOTS - 1), clocks=st.lists(st.sampled_from([0, 900, 1200, 1410])))
    def ask_many(self, slot: int, clocks: list[int]) -> None:
        self.count()
        if found := self.some(slot):
            for mhz in clocks:
                found[1].ask("request", mhz)

    @precondition(lambda self: self.slots)
    @rule(slot=st.integers(0, SLOTS - 1))
    def look(self, slot: int) -> None:
        self.count()
        if found := self.some(slot):
            found[1].ask("error")

    @precondition(lambda self: self.slots)
    @rule(slot=st.integers(0, SLOTS - 1))
    def sample(self, slot: int) -> None:
        self.count()
        if found := self.some(slot):
            found[1].ask("sample")

    @rule(fault=st.sampled_from(FAULTS))
    def fault(self, fault: str) -> None:
        self.count()
        self.machine.faults(fault)

    @rule(milliseconds=st.integers(0, 10))
    def pause(self, milliseconds: int) -> None:
        self.count()
        time.sleep(milliseconds / 1e3)

    @precondition(lambda self: self.slots)
    @rule(slot=st.integers(0, SLOTS - 1), guard_too=st.booleans())
    def crash(self, slot: int, guard_too: bool) -> None:
        self.count("kills")
        if slot in self.slots:
            _, trainer = self.slots.pop(slot)
            if guard_too:  # as when a whole cgroup is killed
                _kill(trainer.guard, signal.SIGKILL)
            trainer.end(signal.SIGKILL)

    @precondition(lambda self: self.slots)
    @rule(slot=st.integers(0, SLOTS - 1), number=st.sampled_from([signal.SIGKILL, signal.SIGTERM]))
    def crash_guard(self, slot: int, number: int) -> None:
        self.count("kills")
        if found := self.some(slot):
            _kill(found[1].guard, number)

    @precondition(lambda self: self.slots)
    @rule(slot=st.integers(0, SLOTS - 1))
    def close(self, slot: int) -> None:
        self.count()
        if slot in self.slots:
            _, trainer = self.slots.pop(slot)
            trainer.ask("close")
            trainer.end(signal.SIGKILL)

    @invariant()
    def never_locked_without_a_lease(self) -> None:
        for gpu in range(GPUS):
            path = self.folder / "run" / f"{self.machine.uuid(gpu)}.json"
            # In this order: a lease is removed only after the lock is gone.
            if self.machine.lock_mhz(gpu):
                assert path.exists() or not self.machine.lock_mhz(gpu), f"GPU {gpu} has no lease"

    @invariant()
    def never_two_owners(self) -> None:
        mark = self.machine.mark()
        for event in self.machine.events(self.seen, stub.LOCK):
            if event.result == 0:
                assert event.pid in self.guards[event.device], "a lock by no owner's guard"
        self.seen = mark
        live = [lease.uuid for _, lease, is_live in leases() if is_live]
        assert len(live) == len(set(live))
        held = [gpu for gpu, trainer in self.slots.values() if _lives(trainer.guard)]
        assert len(held) == len(set(held)), "two trainers own one GPU"

    def teardown(self) -> None:
        for _, trainer in self.slots.values():
            trainer.end(signal.SIGKILL)
        self.machine.faults()
        assert wait_until(lambda: not plugin_processes(self.folder / "run"), 20)
        clean_up()  # what the next start or kareus-pp unlock does, for guards that were killed
        assert [self.machine.lock_mhz(gpu) for gpu in range(GPUS)] == [0] * GPUS
        assert list(leases()) == []
        shutil.rmtree(self.folder)


def _kill(pid: int, number: int) -> None:
    if pid and _lives(pid):
        os.kill(pid, number)


def _lives(pid: int) -> bool:
    """True for a guard of these tests that runs."""
    try:
        return b"guard_main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def run(operations: int, steps: int) -> None:
    if compiler() is None:
        pytest.skip("no C compiler: the stub NVML cannot be built")
    kept = dict(os.environ)
    try:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            Jobs,
            settings=settings(
                max_examples=max(1, operations // steps),
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                derandomize=operations < 1000,
                database=None,
            ),
        )
    finally:
        os.environ.clear()
        os.environ.update(kept)
        print("stateful:", counted)


def test_some_random_operations() -> None:
    run(120, 40)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_thousand_random_operations() -> None:
    counted.update(dict.fromkeys(counted, 0))
    while counted["operations"] < 10_000:
        run(10_000 - counted["operations"] + 100, 50)
