"""Kill training jobs under the real launchers in every way, and see when their GPUs unlock."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kareus_pp.device.lease import RUNTIME_VARIABLE
from tests.stub.nvml import LOCK, RESET, StubMachine

ROOT = Path(__file__).resolve().parents[2]
TRAINER = Path(__file__).with_name("tiny_trainer.py")
RANKS = 2
LAUNCHERS = ("torchrun", "deepspeed")
ACTIONS = (
    "kill -9 one rank",
    "kill -9 all ranks",
    "kill -9 the launcher",
    "kill -9 the process groups",
    "SIGTERM to the command",
    "raise",
    "sys.exit",
    "os._exit",
    "segfault",
)
_SELF_INFLICTED = ("raise", "sys.exit", "os._exit", "segfault")
_START_S = 120.0
_DEATHS_S = 8.0
_UNLOCK_S = 5.0


@dataclass(frozen=True)
class Row:
    """What one crash did.

    Attributes:
        action: One of `ACTIONS`.
        launcher: One of `LAUNCHERS`.
        unlocked_s: Longest time from a rank's own death until its GPU was unlocked; None where a
            GPU stayed locked.
        left_processes: Processes of the plugin that were there two seconds after the last death.
        outlived: Ranks that outlived the action; they kept their clocks and were ended after.
        kept_clocks: True where all ranks that outlived it were still locked a while after.
    """

    action: str
    launcher: str
    unlocked_s: float | None
    left_processes: int
    outlived: int
    kept_clocks: bool


def command_of(launcher: str, script: list[str]) -> list[str]:
    """The launcher's command for a script with `RANKS` local ranks."""
    if launcher == "torchrun":
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), *rendezvous]
        return [sys.executable, *launch, *script]
    port = 20000 + os.getpid() % 20000
    launch = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
    return [sys.executable, *launch, "--master_port", str(port), *script]


def environment_of(machine: StubMachine, folder: Path) -> dict[str, str]:
    """Environment of a job on the stub machine, with a runtime folder of its own."""
    unwanted = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LOCAL_RANK", "RANK")
    inherited = {key: value for key, value in os.environ.items() if key not in unwanted}
    return {
        **inherited,
        **machine.environment(),
        RUNTIME_VARIABLE: str(folder / "run"),
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }


def crash(action: str, launcher: str, folder: Path) -> Row:
    """Start a job under a launcher, do `action` to it, and watch what its GPUs do."""
    folder.mkdir(parents=True)
    machine = StubMachine(folder / "machine", RANKS)
    script = [str(TRAINER), "--folder", str(folder), "--workers"]
    if action in _SELF_INFLICTED:
        script += ["--die", action]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            command_of(launcher, script),
            cwd=ROOT,
            env=environment_of(machine, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deaths: Deaths | None = None
    try:
        deaths = Deaths(_await_ranks(job, machine, folder))
        _act(action, job, deaths.pids, folder)
        deaths.wait(2.0 if "launcher" in action else _DEATHS_S)
        survivors = [rank for rank, pid in enumerate(deaths.pids) if rank not in deaths.at_s]
        kept = all(machine.lock_mhz(rank) for rank in survivors)
        for rank in survivors:
            os.kill(deaths.pids[rank], signal.SIGTERM)
        deaths.wait(_DEATHS_S)
        last = max(deaths.at_s.values())
        delays = [_unlock_delay(machine, rank, deaths.at_s[rank]) for rank in range(RANKS)]
        time.sleep(max(0.0, last + 2.0 - time.monotonic()))
        known = [delay for delay in delays if delay is not None]
        return Row(
            action=action,
            launcher=launcher,
            unlocked_s=max(known) if len(known) == RANKS else None,
            left_processes=len(plugin_processes(folder / "run")),
            outlived=len(survivors),
            kept_clocks=kept,
        )
    finally:
        _end(job, deaths.alive() if deaths else [])


class Deaths:
    """Watches ranks and notes when each dies, on the scale of `time.monotonic()`."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.at_s: dict[int, float] = {}
        self._handles = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def alive(self) -> list[int]:
        """Processes of the ranks that are not dead yet."""
        return [pid for rank, pid in enumerate(self.pids) if rank not in self.at_s]

    def wait(self, seconds: float) -> None:
        """Wait until all are dead, or for `seconds`."""
        self._thread.join(seconds)

    def _watch(self) -> None:
        waiting = dict(self._handles)
        while waiting:
            for handle in select.select(list(waiting), [], [])[0]:
                self.at_s[waiting.pop(handle)] = time.monotonic()
                os.close(handle)


def _await_ranks(job: subprocess.Popen[bytes], machine: StubMachine, folder: Path) -> list[int]:
    """The process of each rank, once each has locked its GPU."""
    deadline = time.monotonic() + _START_S
    notes = [folder / f"rank-{rank}.json" for rank in range(RANKS)]
    while not all(note.exists() for note in notes):
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job did not start: {(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.01)
    if not all(machine.lock_mhz(rank) for rank in range(RANKS)):
        raise RuntimeError(f"no lock: {(folder / 'log').read_text()[-2000:]}")
    return [int(json.loads(note.read_text())["pid"]) for note in notes]


def _act(action: str, job: subprocess.Popen[bytes], pids: list[int], folder: Path) -> None:
    if action in _SELF_INFLICTED:
        (folder / "go").touch()
    elif action == "kill -9 one rank":
        os.kill(pids[1], signal.SIGKILL)
    elif action == "kill -9 all ranks":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    elif action == "kill -9 the launcher":
        for pid in _launchers(job.pid, pids):
            os.kill(pid, signal.SIGKILL)
    elif action == "kill -9 the process groups":
        members = [*_launchers(job.pid, pids), *pids]
        for group in {os.getpgid(pid) for pid in members}:
            os.killpg(group, signal.SIGKILL)
    elif action == "SIGTERM to the command":
        os.kill(job.pid, signal.SIGTERM)
    else:
        raise ValueError(action)


def _launchers(command: int, ranks: list[int]) -> list[int]:
    """The command and what it started on the way to the ranks."""
    found = {command}
    for pid in ranks:
        while (pid := _parent(pid)) > 1 and pid != os.getpid():
            found.add(pid)
    return sorted(found)


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _unlock_delay(machine: StubMachine, device: int, death_s: float) -> float | None:
    """From a rank's death to the reset that left its GPU unlocked."""
    deadline = time.monotonic() + _UNLOCK_S
    while machine.lock_mhz(device) and time.monotonic() < deadline:
        time.sleep(0.005)
    if machine.lock_mhz(device):
        return None
    locked_s = max(event.at_s for event in machine.events(operation=LOCK, device=device))
    resets = machine.events(operation=RESET, device=device)
    after = [event.at_s for event in resets if event.at_s >= locked_s]
    return max(0.0, after[0] - death_s)


def plugin_processes(folder: Path) -> list[int]:
    """Guards that use this runtime folder, whoever their parent is."""
    found = []
    needle = f"{RUNTIME_VARIABLE}={folder}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            is_guard = b"guard_main.py" in (entry / "cmdline").read_bytes()
            if is_guard and needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _end(job: subprocess.Popen[bytes], ranks: list[int]) -> None:
    """End what is left of a job, each process by its number."""
    running = [job.pid, *_descendants(job.pid)] if job.poll() is None else []
    for pid in {*ranks, *running}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found
