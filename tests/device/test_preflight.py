"""Preflight, `kareus-pp doctor` and `kareus-pp unlock`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kareus_pp.cli.main import app
from kareus_pp.config import parse_config
from kareus_pp.device import errors, preflight, select
from kareus_pp.device.backend import NVML
from kareus_pp.device.guard import GuardController
from kareus_pp.device.guard_process import reset_stale
from kareus_pp.device.lease import Lease, Ownership, runtime_folder
from kareus_pp.device.preflight import Finding
from kareus_pp.profile import Source
from tests.device.conftest import wait_until
from tests.stub import nvml as stub
from tests.stub.nvml import StubMachine

OpenGuard = Callable[..., GuardController]


def look(machine: StubMachine) -> dict[str, Finding]:
    found = preflight.preflight(machine.uuid(0), NVML)
    return {finding.check: finding for finding in found}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def stale_lease(machine: StubMachine, device: int, backend: Mapping[str, str] = NVML) -> Path:
    """A lease as a kill of everything leaves it, and its lock."""
    owner = Ownership(machine.uuid(device), runtime_folder())
    owner.write(Lease(machine.uuid(device), 1, 1, 0.0, dict(backend)))
    owner.release()
    machine.set(device, lock_mhz=900)
    return runtime_folder() / f"{machine.uuid(device)}.json"


def test_a_healthy_gpu(machine: StubMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "has_sys_admin", lambda: True)
    found = look(machine)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert "81 SM clocks from 210 to 1410 MHz" in found["clocks"].text
    assert machine.events() == [], "preflight sets nothing"


def test_findings_say_what_follows_and_what_to_do(
    machine: StubMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "has_sys_admin", lambda: False)
    machine.set(0, persistence=0, counter_factor=2, process=1)
    machine.set(0, lock_mhz=900)  # by somebody else, as far as this process can see
    found = look(machine)
    warned = {check for check, finding in found.items() if finding.level == "warning"}
    assert warned == {"permission", "persistence", "energy counter", "foreign lock", "processes"}
    assert all(finding.remedy for finding in found.values() if finding.level == "warning")
    assert "CAP_SYS_ADMIN" in found["permission"].text
    assert "disagree" in found["energy counter"].text
    assert "inferred" in found["foreign lock"].text
    assert "900 MHz" in found["foreign lock"].text


def test_an_idle_gpu_tells_nothing_about_locks(machine: StubMachine) -> None:
    machine.set(0, load=0)
    machine.set(0, lock_mhz=900)
    finding = look(machine)["foreign lock"]
    assert finding.level == "ok"
    assert "cannot read a lock back" in finding.text


def test_a_gpu_below_its_clock_for_a_reason_is_not_suspected(machine: StubMachine) -> None:
    machine.set(0, limit_w=150)
    assert "power cap" in look(machine)["foreign lock"].text


def test_a_live_owner_and_a_stale_lease(machine: StubMachine, open_guard: OpenGuard) -> None:
    controller = open_guard(0)
    finding = look(machine)["lease"]
    assert finding.level == "error"
    assert isinstance(finding.error, errors.OwnedError)
    controller.close()
    stale_lease(machine, 0)
    assert "kareus-pp unlock" in look(machine)["lease"].remedy


def test_the_factory_opens_nvml_and_its_facts_come_from_the_device(machine: StubMachine) -> None:
    for device in (0, 1):
        machine.set_name(device, "A GPU of next year")
    machine.faults(f"{stub.LOCK}@1=0,3000,-1", f"{stub.RESET}@1=0,3000,-1")
    opened = select.open_controller(parse_config({"device": "auto"}), stage=0, local_rank=1)
    try:
        assert opened.identity.uuid == machine.uuid(1)
        assert opened.facts.name == "A GPU of next year"
        assert opened.facts.clocks_mhz[0] == 210
        assert (opened.facts.source, opened.facts.scope) == (Source.COUNTER, "gpu")
        assert opened.facts.switch_latency_s is not None
        assert opened.facts.switch_latency_s >= 0.003
        assert opened.pacer is None
    finally:
        opened.controller.close()


def test_doctor_prints_and_fails_where_a_check_fails(
    machine: StubMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, output = run("doctor", "--set")
    assert (code, machine.uuid(0) in output, "locked and unlocked" in output) == (0, True, True)
    assert machine.uuid(1) not in output
    machine.set(0, counter_mode=stub.COUNTER_ABSENT, restricted=1)
    code, output = run("doctor", "--set", "--json")
    rows = {row["check"]: row for row in json.loads(output)[machine.uuid(0)]}
    assert code == 1
    assert rows["reading"]["level"] == "error"
    assert "no energy counter" in rows["reading"]["text"]
    assert "Insufficient Permissions" in rows["set a clock"]["text"]
    machine.set(0, mig=1)
    code, output = run("doctor")
    assert (code, "MIG" in output, "->" in output) == (1, True, True)


def test_unlock_resets_stale_leases_only(machine: StubMachine, open_guard: OpenGuard) -> None:
    controller = open_guard(0)
    controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    path = stale_lease(machine, 1)
    code, output = run("unlock")
    assert code == 0
    assert (machine.lock_mhz(0), machine.lock_mhz(1)) == (900, 0)
    assert not path.exists()
    assert "left alone" in output
    code, output = run("unlock", "--force")
    assert code == 0
    assert machine.lock_mhz(0) == 0
    assert wait_until(lambda: "terminated" in controller.applied().error)


def test_unlock_of_a_named_gpu_and_of_all(machine: StubMachine) -> None:
    machine.set(0, lock_mhz=900)
    machine.set(1, lock_mhz=900)
    assert "no lease" in run("unlock")[1]
    assert machine.lock_mhz(1) == 900, "without a lease or a name nothing is reset"
    assert run("unlock", "--gpu", machine.uuid(1))[0] == 0
    assert (machine.lock_mhz(0), machine.lock_mhz(1)) == (900, 0)
    assert run("unlock", "--all")[0] == 0
    assert machine.lock_mhz(0) == 0
    machine.faults(f"{stub.RESET}@0={stub.NO_PERMISSION},0,-1")
    assert run("unlock", "--gpu", "0")[0] == 1


def test_unlock_runs_no_command_from_a_lease_of_another_user(
    machine: StubMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's epilog must not run what a user wrote into a lease."""
    trap = tmp_path / "trap"
    command = {"device": "command", "lock": "x {uuid} {mhz}", "unlock": f"touch {trap} {{uuid}}"}
    path = stale_lease(machine, 0, command)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    code, output = run("unlock")
    assert (code, "root can reset it" in output) == (0, True)
    assert machine.lock_mhz(0) == 900
    reset_stale(Lease(machine.uuid(0), 1, 1, 0.0, command), path)
    assert not trap.exists()
    assert machine.lock_mhz(0) == 0, "reset through NVML instead"


def test_a_user_error_is_one_line(machine: StubMachine) -> None:
    code = "import sys; from kareus_pp.cli.main import main; sys.argv[1:] = sys.argv[2:]; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "", "unlock", "--gpu", "9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no GPU is called '9'" in done.stderr
