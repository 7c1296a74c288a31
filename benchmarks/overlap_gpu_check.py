"""What must be checked on GPUs before overlap is trusted there; prints what it found.

    torchrun --nproc-per-node 2 -m benchmarks.overlap_gpu_check [--json]

Nothing of this was run where the project was made. On every rank: gradients against the unmodified
block, for every level of SMs; the thread blocks with which NCCL kernels were launched; how much of
their time ran beside compute; memory per communicator; Megatron-Core with Transformer Engine
layers, where it is installed; a soak with injected exceptions. Rows of `check`, `found` and `ok`,
which is None where nothing is to be judged.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kareus_pp.errors import OverlapError
from kareus_pp.overlap import generic
from kareus_pp.overlap.communicators import check_grids, launched_grids
from kareus_pp.setting import OverlapSetting
from tests.overlap import core_cases
from tests.overlap.steps import begin_step

LEVELS = (4, 8, 16)
SOAK_STEPS = 300
Row = dict[str, Any]


def main() -> None:
    """Check, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows of rank 0 as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was checked; run this with torchrun on a machine with two GPUs")
        return
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        print("one process: nothing was checked; run this with torchrun --nproc-per-node 2")
        return
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    rows = []
    for row in checks():
        rows.append(row)
        if not arguments.json:
            verdict = {True: "ok", False: "NOT OK", None: ""}[row["ok"]]
            print(f"rank {dist.get_rank()}: {row['check']}: {row['found']} {verdict}", flush=True)
    if arguments.json and dist.get_rank() == 0:
        print(json.dumps({"rows": rows}, indent=1))
    dist.destroy_process_group()


def checks() -> Iterator[Row]:
    """All checks, in the same order on every rank."""
    module = core_cases.block().cuda()
    value = core_cases.sample(64).cuda()
    wanted = core_cases.step(module, value)
    before = torch.cuda.mem_get_info()[0]
    executor = generic.attach(module, dist.group.WORLD, levels=LEVELS)
    pool = executor.pool
    used_mib = (before - torch.cuda.mem_get_info()[0]) / len(LEVELS) / 2**20
    yield _row("memory per communicator", f"{used_mib:.0f} MiB")
    yield _row("communicators limit SMs", pool.limits_sms, pool.limits_sms)
    core_cases.step(module, value)
    for sms in LEVELS:
        core_cases.set_both(executor, OverlapSetting.parse(f"mlp@1:{sms}"))
        error = core_cases.error(core_cases.step(module, value), wanted)
        yield _row(f"{sms} SMs: largest relative error", error, error <= 1e-12)
        trace = _trace(lambda: core_cases.step(module, value))
        grids = {name: sorted(blocks) for name, blocks in launched_grids(trace).items()}
        try:
            check_grids(trace, sms)
            held = True
        except OverlapError:
            held = False
        yield _row(f"{sms} SMs: thread blocks of NCCL's kernels", grids, held and bool(grids))
        share = _overlapped_share(trace)
        yield _row(f"{sms} SMs: share of NCCL's time beside compute", round(share, 3), share > 0)
    executor.close()
    yield _guarded("Transformer Engine", _transformer_engine)
    soak = core_cases.soak(SOAK_STEPS, torch.device("cuda"))
    good = soak["max_rel_error"] <= 1e-12 and soak["nanobatch_threads"] == 2
    yield _row(f"soak of {SOAK_STEPS} steps", soak, good and soak["hooks_after"] == 0)


def _row(check: str, found: Any, ok: bool | None = None) -> Row:
    return {"check": check, "found": found, "ok": ok}


def _guarded(check: str, function: Callable[[], Row]) -> Row:
    """A check of what may not be installed: its exception is what was found."""
    try:
        return function()
    except Exception as error:
        absent = isinstance(error, ImportError)
        return _row(check, f"{type(error).__name__}: {error}", None if absent else False)


def _transformer_engine() -> Row:
    """A Megatron-Core block of Transformer Engine layers in bf16, TP 2, against itself whole."""
    import transformer_engine  # noqa: F401
    from kareus_pp.integrations import overlap_megatron
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlock

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=1024,
        num_attention_heads=16,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    block = TransformerBlock(config, get_gpt_layer_with_transformer_engine_spec()).cuda().train()
    torch.manual_seed(2)
    shape = (512 // dist.get_world_size(), 4, 1024)
    hidden = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        block.zero_grad()
        leaf = hidden.clone().requires_grad_()
        block(hidden_states=leaf, attention_mask=None).float().square().mean().backward()
        grads = [leaf.grad, *(parameter.grad for parameter in block.parameters())]
        return [grad.float() for grad in grads if grad is not None]

    step()
    wanted = step()
    executor = overlap_megatron.attach(block, allow_untested=True)
    try:
        step()
        forward, backward = executor.candidates(1)[0]
        begin_step(executor, {"forward": forward, "backward": backward})
        error = core_cases.error(step(), wanted)
        reasons = list(executor.reasons)
    finally:
        executor.close()
        parallel_state.destroy_model_parallel()
    found = {"error": error, "setting": f"{forward} {backward}", "reasons": reasons}
    return _row("Transformer Engine in bf16", found, error < 0.02 and not reasons)


def _trace(step: Callable[[], Any]) -> dict[str, Any]:
    with torch.profiler.profile() as profile:
        step()
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


if __name__ == "__main__":
    main()
