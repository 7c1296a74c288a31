"""Each fault ends in training going on at default clocks, and one clear line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kareus_pp.device.guard_process import clean_up
from tests.device.conftest import wait_until
from tests.stub import nvml as stub
from tests.stub.crash import ROOT, TRAINER, plugin_processes
from tests.stub.nvml import StubMachine

STEPS = 40
LONG = ("--instruction-s", "0.1", "--steps", "8")
"""Instructions that are long enough for a clock to settle and be read back."""
SLOW_US = 50_000


def train(
    machine: StubMachine, folder: Path, *more: str, fault: dict[str, float] | str = ""
) -> str:
    """Run the trainer in miniature; the fault comes once it has locked its GPU."""
    command = [sys.executable, str(TRAINER), "--folder", str(folder), "--steps", str(STEPS), *more]
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(job.stdout or ()))
    reader.start()
    if fault:
        assert wait_until(lambda: (folder / "rank-0.json").exists(), 30), "".join(lines)
        if isinstance(fault, str):
            machine.faults(fault)
        else:
            machine.set(0, **fault)
    job.wait(60)
    reader.join()
    assert job.returncode == 0, "".join(lines)
    return "".join(lines)


def check(machine: StubMachine, output: str, folder: Path, *words: str) -> None:
    """Training went on, clocks are at default, and one line says why."""
    assert re.search("^trained [0-9]+ steps$", output, re.MULTILINE)
    lines = [line for line in output.splitlines() if "kareus-pp" in line]
    assert len(lines) == 1, output
    for word in ("training goes on at default clocks", *words):
        assert re.search(word, lines[0]), lines[0]
    assert "; " in lines[0], "the line lacks a remedy"
    machine.faults()
    assert machine.lock_mhz(0) == 0
    assert wait_until(lambda: not plugin_processes(folder / "run"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (stub.NO_PERMISSION, ("Insufficient Permissions", "CAP_SYS_ADMIN")),
        (stub.NOT_SUPPORTED, ("Not Supported", "dry-run")),
    ],
)
def test_refused_from_the_start(
    machine: StubMachine, tmp_path: Path, code: int, words: tuple[str, ...]
) -> None:
    machine.faults(f"{stub.LOCK}@*={code},0,-1")
    check(machine, train(machine, tmp_path), tmp_path, *words)


@pytest.mark.slow
def test_refused_to_this_user(machine: StubMachine, tmp_path: Path) -> None:
    machine.set(0, restricted=1)
    check(machine, train(machine, tmp_path), tmp_path, "CAP_SYS_ADMIN")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(
            f"{stub.LOCK}@0={stub.NO_PERMISSION},0,-1",
            ("Insufficient Permissions",),
            marks=pytest.mark.slow,
        ),
        (f"{stub.LOCK}@0=0,{SLOW_US},-1", ("takes 5. ms", "too long")),
    ],
    ids=["permission lost", "slow calls"],
)
def test_in_mid_run(
    machine: StubMachine, tmp_path: Path, fault: str, words: tuple[str, ...]
) -> None:
    check(machine, train(machine, tmp_path, fault=fault), tmp_path, *words)


@pytest.mark.parametrize("offset_mhz", [-300, pytest.param(120, marks=pytest.mark.slow)])
def test_a_clock_that_is_not_reached(machine: StubMachine, tmp_path: Path, offset_mhz: int) -> None:
    machine.set(0, clock_offset=offset_mhz)
    output = train(machine, tmp_path, *LONG)
    check(machine, output, tmp_path, "locked at .* MHz and runs at")


@pytest.mark.slow
def test_a_clock_that_is_lost_while_it_is_sampled(machine: StubMachine, tmp_path: Path) -> None:
    output = train(machine, tmp_path, *LONG, "--sample", fault={"clock_offset": -300})
    check(machine, output, tmp_path, "locked at .* MHz and runs at")


@pytest.mark.slow
def test_a_clock_held_down_by_power_is_marked_and_no_fault(
    machine: StubMachine, tmp_path: Path
) -> None:
    machine.set(0, limit_w=120)
    output = train(machine, tmp_path, *LONG, "--sample")
    assert "kareus-pp" not in output


def test_a_gpu_lost_in_mid_run(machine: StubMachine, tmp_path: Path) -> None:
    output = train(machine, tmp_path, fault=f"nvmlDevice*@0={stub.GPU_IS_LOST},0,-1")
    # Nobody knows whether a lost GPU forgot its lock: the lease stays until a reset succeeds.
    assert [path.stem for path in (tmp_path / "run").glob("*.json")] == [machine.uuid(0)]
    machine.faults()
    clean_up()
    check(machine, output, tmp_path, "GPU is lost", "Xid", "reset")
    assert not list((tmp_path / "run").glob("*.json"))


@pytest.mark.slow
def test_a_gpu_that_comes_back_in_mid_run_is_unlocked_at_once(
    machine: StubMachine, tmp_path: Path
) -> None:
    lost = f"{stub.LOCK}@0={stub.GPU_IS_LOST},0,1;{stub.RESET}@0={stub.GPU_IS_LOST},0,2"
    output = train(machine, tmp_path, fault=lost)
    check(machine, output, tmp_path, "GPU is lost")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"counter_mode": stub.COUNTER_STUCK}, ("energy counter", "stood still")),
        ({"jump_mj": -5e5}, ("energy counter", "jumped back")),
        pytest.param(
            {"counter_mode": stub.COUNTER_ABSENT},
            ("no energy counter",),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["stands still", "jumps back", "goes away"],
)
def test_a_counter_that_fails_while_it_is_read(
    machine: StubMachine, tmp_path: Path, fault: dict[str, float], words: tuple[str, ...]
) -> None:
    check(
        machine,
        train(machine, tmp_path, "--sample", "--steps", "90", fault=fault),
        tmp_path,
        *words,
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(
            {"counter_mode": stub.COUNTER_STUCK},
            ("energy counter", "did not move"),
            marks=pytest.mark.slow,
        ),
        ({"counter_mode": stub.COUNTER_ABSENT}, ("no energy counter",)),
        ({"mig": 1}, ("MIG", "nvidia-smi -mig 0")),
        ({"driver_loaded": 0}, ("Driver Not Loaded", "driver")),
    ],
    ids=["counter stands still", "counter absent", "MIG", "no driver"],
)
def test_there_from_the_start(
    machine: StubMachine, tmp_path: Path, fault: dict[str, float], words: tuple[str, ...]
) -> None:
    machine.set(0, **fault)
    check(machine, train(machine, tmp_path), tmp_path, *words)
    assert machine.events(operation=stub.LOCK) == []


@pytest.mark.slow
def test_without_any_nvidia_library(tmp_path: Path, machine: StubMachine) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    command = [sys.executable, str(TRAINER), "--folder", str(tmp_path), "--steps", str(STEPS)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if "trained" in done.stdout and "kareus-pp" not in done.stderr:
        pytest.skip("this machine has an NVIDIA driver")
    check(machine, done.stdout + done.stderr, tmp_path, "NVML cannot be used", "driver")
    automatic = subprocess.run(
        [*command, "--device", "auto"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "dry-run, no clock is set" in automatic.stderr


@pytest.mark.slow
def test_slow_calls_never_delay_the_trainer(machine: StubMachine, tmp_path: Path) -> None:
    machine.faults(f"nvmlDevice*ClockS*@0=0,{SLOW_US},-1", f"{stub.LOCK}@0=0,{SLOW_US},-1")
    begin = time.monotonic()
    output = train(machine, tmp_path)
    assert f"trained {STEPS} steps" in output
    assert time.monotonic() - begin < 30
