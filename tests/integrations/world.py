"""Runs a function on several ranks: real process groups over gloo, one import of the framework.

`run_world("tests.integrations.megatron_cases:order", 4, ...)` starts one process, which imports the
module once and forks the ranks.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_world(
    function: str,
    ranks: int,
    *,
    prepare: str = "",
    path: tuple[Path, ...] = (),
    env: dict[str, str] | None = None,
    timeout_s: float = 280.0,
    **kwargs: Any,
) -> list[Any]:
    """Call `module:name` with `kwargs` on every rank; returns what each rank returned, as JSON.

    Args:
        function: The function, as `module:name`.
        ranks: Number of ranks.
        prepare: A module to import first.
        path: Folders to put before installed packages, as that of another framework version.
        env: More environment variables.
        timeout_s: After this long the world is ended and the test fails.
        kwargs: Arguments of the function, as JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.integrations.world"]
        job = {"function": function, "ranks": ranks, "folder": folder, "kwargs": kwargs}
        job["prepare"] = prepare
        search = [str(ROOT), *map(str, path), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [*command, json.dumps(job)],
            cwd=folder,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, search))}
            | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        results = []
        for rank in range(ranks):
            file = Path(folder, f"result-{rank}.json")
            if not file.is_file():
                raise AssertionError(
                    f"rank {rank} gave no result (exit status {done.returncode}):\n"
                    f"{done.stdout[-2000:]}\n{done.stderr[:3000]}\n...\n{done.stderr[-3000:]}"
                )
            results.append(json.loads(file.read_text()))
        return results


def _rank_main(rank: int, job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks, folder = job["ranks"], Path(job["folder"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    module, name = job["function"].split(":")
    try:
        result = getattr(importlib.import_module(module), name)(**job["kwargs"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Import the function's module, fork the ranks, wait; one that fails ends the others."""
    job = json.loads(sys.argv[1])
    if job["prepare"]:
        importlib.import_module(job["prepare"])
    importlib.import_module(job["function"].split(":")[0])
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank_main, args=(r, job)) for r in range(job["ranks"])]
    for process in ranks:
        process.start()
    waiting = set(ranks)
    status = 0
    while waiting and not status:
        multiprocessing.connection.wait([process.sentinel for process in waiting])
        for process in [p for p in waiting if p.exitcode is not None]:
            status = status or process.exitcode or 0
            waiting.discard(process)
    for process in waiting:
        process.kill()
    sys.exit(status)


if __name__ == "__main__":
    main()
