"""Start jobs under the real DeepSpeed launcher, on CPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.demo import free_port, remove_shared_memory

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = Path(__file__).resolve().parent / "jobs"


def deepspeed(
    *arguments: str, folder: Path, ranks: int = 2, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run `deepspeed ARGUMENTS` with `ranks` processes in `folder`."""
    port = free_port()
    command = [python, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    command += ["--master_port", str(port), *arguments]
    # Older releases count the CPUs with numactl, unless they are told.
    return run(command, folder, port, LOCAL_SIZE=str(ranks))


def alone(script: str, *arguments: str, folder: Path, python: str = sys.executable) -> Any:
    """Run a job script of one rank without a launcher; its last line of output is JSON."""
    port = free_port()
    done = run([python, str(JOBS / script), *arguments], folder, port, MASTER_PORT=str(port))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def run(
    command: list[str], folder: Path, port: int, **more: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **more}
    environment["PYTHONPATH"] = str(ROOT)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=240)
    except BaseException:
        # The ranks are children of children: the whole group, or they would train on.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    finally:
        remove_shared_memory(port)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that kareus-pp wrote, the launcher's own left out."""
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if "kareus-pp: " in line]
