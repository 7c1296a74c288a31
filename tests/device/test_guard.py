"""The guard process and its controller, with real processes against the stub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kareus_pp.device import channel, errors
from kareus_pp.device.base import Sample
from kareus_pp.device.guard import GuardController
from kareus_pp.device.guard_process import Trainer, start_time
from kareus_pp.device.lease import Lease, Ownership, leases, runtime_folder
from tests.device.conftest import wait_until
from tests.stub import nvml as stub
from tests.stub.crash import plugin_processes
from tests.stub.nvml import StubMachine

OpenGuard = Callable[..., GuardController]


def locks(machine: StubMachine, device: int = 0) -> list[int]:
    """The clocks that were locked, in order; 0 for a reset."""
    return [
        event.first
        for event in machine.events(device=device)
        if event.operation in (stub.LOCK, stub.RESET) and event.result == 0
    ]


def lease_files(machine: StubMachine) -> list[Path]:
    return sorted((machine.path.parent / "run").glob("*.json"))


def test_requests_are_applied_and_closing_restores_default_clocks(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    controller = open_guard(1)
    assert controller.applied().mhz is None
    controller.request(900)
    assert wait_until(lambda: controller.applied().mhz == 900)
    assert (machine.lock_mhz(1), machine.lock_mhz(0)) == (900, 0)
    controller.request(0)
    assert wait_until(lambda: controller.applied().mhz == 0)
    assert machine.lock_mhz(1) == 0
    controller.request(1200)
    assert wait_until(lambda: machine.lock_mhz(1) == 1200)
    controller.close()
    controller.close()
    assert machine.lock_mhz(1) == 0
    assert locks(machine, 1) == [900, 0, 1200, 0]
    assert lease_files(machine) == []
    assert wait_until(lambda: not plugin_processes(machine.path.parent / "run"))


def test_repeated_values_reach_neither_the_guard_nor_the_driver(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    controller = open_guard()
    for _ in range(3):
        controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    word = controller._words[channel.REQUEST]
    for _ in range(1000):
        controller.request(900)
    assert controller._words[channel.REQUEST] == word
    time.sleep(0.05)
    assert controller.calls == 1
    assert controller.applied().switches == 1


def test_the_newest_value_wins_when_they_change_faster_than_the_driver(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    machine.faults(f"{stub.LOCK}@0=0,5000,-1")
    controller = open_guard()
    clocks = [900 + 15 * (number % 30) for number in range(400)]
    for mhz in clocks:
        controller.request(mhz)
        time.sleep(0.0005)
    assert wait_until(lambda: controller.applied().mhz == clocks[-1])
    assert machine.lock_mhz(0) == clocks[-1]
    assert controller.calls < len(clocks) / 2


def test_a_minimum_dwell_holds_back_locks_and_never_an_unlock(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    dwell_s = 0.6
    controller = open_guard(min_dwell_s=dwell_s)
    controller.request(900)
    assert wait_until(lambda: controller.applied().mhz == 900)
    for mhz in (915, 930, 945):
        controller.request(mhz)
    assert wait_until(lambda: machine.lock_mhz(0) == 945)
    controller.request(0)
    assert wait_until(lambda: machine.lock_mhz(0) == 0)
    changes = [event for event in machine.events() if event.operation in (stub.LOCK, stub.RESET)]
    assert [event.first for event in changes] == [900, 945, 0]
    assert changes[1].at_s - changes[0].at_s >= dwell_s
    assert changes[2].at_s - changes[1].at_s < dwell_s


def test_nothing_is_read_unless_asked_for(machine: StubMachine, open_guard: OpenGuard) -> None:
    controller = open_guard()
    controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    time.sleep(0.2)  # each clock is read back once, a while after it was first set
    calls = machine.get(0, "calls")
    time.sleep(0.5)
    assert machine.get(0, "calls") == calls
    assert controller.drain() == []
    controller.start_sampling(0.01)
    assert wait_until(lambda: machine.get(0, "calls") > calls + 20)
    controller.stop_sampling()
    time.sleep(0.1)
    calls = machine.get(0, "calls")
    time.sleep(0.2)
    assert machine.get(0, "calls") == calls


def test_samples_carry_the_reading_and_the_request(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    controller = open_guard()
    samples: list[Sample] = []

    def sampled(mhz: int) -> bool:
        samples.extend(controller.drain())
        return sum(sample.requested_mhz == mhz for sample in samples) > 15

    controller.start_sampling(0.01)
    controller.request(900)
    assert wait_until(lambda: sampled(900))
    machine.set(0, limit_w=150)
    controller.request(1410)
    assert wait_until(lambda: sampled(1410))
    controller.stop_sampling()
    samples.extend(controller.drain())
    assert controller.drain() == []
    assert [sample.at_s for sample in samples] == sorted(sample.at_s for sample in samples)
    slow = [sample for sample in samples if sample.requested_mhz == 900][5:]
    assert {sample.clock_mhz for sample in slow} == {900}
    capped = [sample for sample in samples if sample.requested_mhz == 1410][-1]
    assert capped.throttled == ("power cap",)
    assert capped.clock_mhz is not None
    assert capped.clock_mhz < 1380
    assert all(sample.energy_j is not None and sample.temperature_c for sample in samples)
    assert controller.applied().error == ""


def test_one_gpu_has_one_owner(machine: StubMachine, open_guard: OpenGuard) -> None:
    first = open_guard(0)
    with pytest.raises(errors.OwnedError, match=f"process {os.getpid()}"):
        open_guard(0)
    open_guard(1)
    first.close()
    assert wait_until(lambda: len(plugin_processes(machine.path.parent / "run")) == 1)
    open_guard(0)


def test_the_lease_is_there_before_the_first_lock(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    controller = open_guard()
    assert machine.events() == []
    ((path, lease, live),) = leases()
    assert (lease.uuid, lease.trainer_pid, lease.guard_pid, live) == (
        machine.uuid(0),
        os.getpid(),
        controller.guard_pid,
        True,
    )
    assert json.loads(path.read_text())["version"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_the_guard_ignores_what_a_terminal_sends(
    machine: StubMachine, open_guard: OpenGuard, number: signal.Signals
) -> None:
    controller = open_guard()
    os.kill(controller.guard_pid, number)
    controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)


def test_a_terminated_guard_resets_and_says_so(machine: StubMachine, open_guard: OpenGuard) -> None:
    controller = open_guard()
    controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    os.kill(controller.guard_pid, signal.SIGTERM)
    assert wait_until(lambda: "terminated" in controller.applied().error)
    assert machine.lock_mhz(0) == 0
    assert controller.applied().mhz == 0
    assert lease_files(machine) == []


def test_a_killed_guard_is_noticed_and_its_lock_undone(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    controller = open_guard()
    controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    os.kill(controller.guard_pid, signal.SIGKILL)
    assert wait_until(lambda: "guard process died" in controller.applied().error)
    assert wait_until(lambda: machine.lock_mhz(0) == 0)
    assert wait_until(lambda: lease_files(machine) == [])
    controller.close()


def test_closing_after_the_guard_was_killed_unlocks(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    controller = open_guard()
    controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    os.kill(controller.guard_pid, signal.SIGKILL)
    controller.close()
    assert wait_until(lambda: machine.lock_mhz(0) == 0)


def test_a_forked_child_neither_closes_nor_keeps_the_guard(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    controller = open_guard()
    controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    child = os.fork()
    if child == 0:
        controller.close()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.05)
    assert machine.lock_mhz(0) == 900


def test_a_lease_of_the_killed_is_reset_at_the_next_start(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    """A kill of a whole cgroup takes the guard too."""
    script = (
        "import os, signal, sys, time\n"
        "from kareus_pp.device.guard import GuardController\n"
        "guards = [GuardController(uuid) for uuid in sys.argv[1:]]\n"
        "for guard in guards:\n"
        "    guard.request(900)\n"
        "while any(guard.applied().mhz != 900 for guard in guards):\n"
        "    time.sleep(0.001)\n"
        "for guard in guards:\n"
        "    os.kill(guard.guard_pid, signal.SIGKILL)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, machine.uuid(0), machine.uuid(1)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert (machine.lock_mhz(0), machine.lock_mhz(1)) == (900, 900)
    assert wait_until(lambda: [live for _, _, live in leases()] == [False, False])
    controller = open_guard(0)  # its own GPU before anything else, the other one beside its work
    assert machine.lock_mhz(0) == 0
    assert wait_until(lambda: machine.lock_mhz(1) == 0)
    assert wait_until(lambda: [lease.uuid for _, lease, _ in leases()] == [machine.uuid(0)])
    assert controller.applied().error == ""


def test_a_reset_is_tried_again_until_it_succeeds(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    controller = open_guard()
    controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    machine.faults(f"{stub.RESET}@0=999,0,3")
    controller.close()
    assert machine.lock_mhz(0) == 0
    assert lease_files(machine) == []


def test_a_gpu_that_cannot_be_reset_keeps_its_lease_with_the_reason(
    machine: StubMachine, open_guard: OpenGuard
) -> None:
    controller = open_guard()
    controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    machine.faults(f"{stub.RESET}@0=999,0,-1")
    controller.close()
    ((_, lease, _),) = leases()
    assert "reset failed" in lease.problem
    machine.faults()
    open_guard(0)
    assert machine.lock_mhz(0) == 0


def test_a_damaged_lease_still_names_its_gpu(machine: StubMachine, open_guard: OpenGuard) -> None:
    folder = runtime_folder()
    (folder / f"{machine.uuid(1)}.json").write_text("{not json")
    (folder / "x y.json").write_text("{}")
    machine.set(1, lock_mhz=900)
    assert [(lease.uuid, live) for _, lease, live in leases()] == [(machine.uuid(1), False)]
    open_guard(0)
    assert wait_until(lambda: machine.lock_mhz(1) == 0)


def test_a_lease_of_another_name_inside_is_ignored(machine: StubMachine) -> None:
    owner = Ownership(machine.uuid(0), runtime_folder())
    owner.write(Lease("GPU-somebody-else", 1, 1, 0.0))
    assert owner.stale() is None
    owner.release()


def test_death_is_told_by_start_time_where_there_is_no_pidfd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(pid)

    monkeypatch.setattr(os, "pidfd_open", refuse)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    trainer = Trainer(child.pid, start_time(child.pid))
    assert not trainer.wait(0.01)
    assert Trainer(child.pid, start_time(child.pid) + 1).wait(0.0), "another process of that number"
    child.kill()
    assert wait_until(lambda: trainer.wait(0.01))  # a zombie until it is waited for
    child.wait()


def test_a_guard_that_cannot_start_says_why(
    machine: StubMachine, open_guard: OpenGuard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("KAREUS_PP_RUNTIME_DIR", str(blocked))
    with pytest.raises(errors.GuardError, match="runtime folder"):
        open_guard(0)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(errors.GuardError, match="cannot be started"):
        open_guard(0)
