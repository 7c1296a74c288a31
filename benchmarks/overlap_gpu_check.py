"""What must be checked on GPUs before overlap is trusted there; prints what it found.

    torchrun --nproc-per-node 2 -m benchmarks.overlap_gpu_check

Nothing of this was run where the project was made. On every rank: gradients against the
unmodified block; the thread blocks with which NCCL kernels were launched, per level of SMs; whether
collectives and compute overlap in the trace; memory per communicator.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kareus_pp.errors import OverlapError
from kareus_pp.overlap import generic
from kareus_pp.overlap.communicators import check_grids, launched_grids
from kareus_pp.setting import OverlapSetting
from tests.overlap import core_cases

LEVELS = (4, 8, 16)


def main() -> None:
    """Check, and say what was found."""
    if not torch.cuda.is_available():
        print("no GPU: nothing was checked; run this with torchrun on a machine with two GPUs")
        return
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        print("one process: nothing was checked; run this with torchrun --nproc-per-node 2")
        return
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    module = core_cases.block().cuda()
    value = core_cases.sample(64).cuda()
    wanted = core_cases.step(module, value)
    before = torch.cuda.mem_get_info()[0]
    pool = generic.group_pool(dist.group.WORLD, LEVELS)
    used_mib = (before - torch.cuda.mem_get_info()[0]) / len(LEVELS) / 2**20
    _say(f"memory per communicator: {used_mib:.0f} MiB; limits SMs: {pool.limits_sms}")
    executor = generic.attach(module, dist.group.WORLD, pool=pool)
    core_cases.step(module, value)
    for sms in LEVELS:
        core_cases.set_both(executor, OverlapSetting.parse(f"mlp@1:{sms}"))
        error = core_cases.error(core_cases.step(module, value), wanted)
        trace = _trace(module, value)
        _say(f"{sms} SMs: largest relative error {error:.1e}, grids {launched_grids(trace)}")
        _say(f"{sms} SMs: {_overlapped_share(trace):.0%} of NCCL's time beside other kernels")
        try:
            check_grids(trace, sms)
        except OverlapError as fault:
            _say(str(fault))
    executor.close()
    dist.destroy_process_group()


def _trace(module: torch.nn.Module, value: torch.Tensor) -> dict[str, Any]:
    with torch.profiler.profile() as profile:
        core_cases.step(module, value)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return trace


def _overlapped_share(trace: dict[str, Any]) -> float:
    kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    ours = [e for e in kernels if e["name"].startswith("nccl")]
    others = [e for e in kernels if not e["name"].startswith("nccl")]
    total = sum(e["dur"] for e in ours)
    beside = sum(
        max(0.0, min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"]))
        for a in ours
        for b in others
    )
    return beside / total if total else 0.0


def _say(text: str) -> None:
    print(f"rank {dist.get_rank()}: {text}", flush=True)


if __name__ == "__main__":
    main()
