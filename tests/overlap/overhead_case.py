"""What overlap costs on the CPU, per layer of Megatron-Core."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kareus_pp.setting import SEQUENTIAL, OverlapSetting
from tests.overlap import megatron_cpu

LAYERS = 8
Times = dict[tuple[str, str], float]
SPLIT = OverlapSetting.parse("attention@1:0,mlp@1:0")


def overhead(repeats: int) -> list[dict[str, Any]]:
    """Microseconds per layer: unmodified, attached but sequential, halves, overlapped."""
    megatron_cpu.layout()
    gc.disable()
    gpt = megatron_cpu.model(megatron_cpu.config(torch.float32, num_layers=LAYERS))
    block = gpt.decoder
    (data,) = megatron_cpu.batches(1, 4)
    block.pre_process = True
    hidden = torch.randn(megatron_cpu.SEQUENCE, 4, megatron_cpu.HIDDEN)

    def once(*parts: slice) -> Times:
        leaves = [hidden[:, part].contiguous().requires_grad_() for part in parts]
        dist.barrier()
        marks = [_now()]
        outputs = [block(hidden_states=x, attention_mask=data["attention_mask"]) for x in leaves]
        marks.append(_now())
        for output in outputs:
            output.sum().backward()
        marks.append(_now())
        return {
            (phase, clock): marks[place + 1][clock] - marks[place][clock]
            for place, phase in enumerate(("forward", "backward"))
            for clock in marks[0]
        }

    whole, halves = (slice(0, 4),), (slice(0, 2), slice(2, 4))
    from kareus_pp.integrations import overlap_megatron

    executor: Any = None

    def attached(setting: OverlapSetting) -> Callable[[], Times]:
        def run() -> Times:
            for phase in ("forward", "backward"):
                executor.set_next(phase, setting)
            return once(*whole)

        return run

    # Alternating, and each after a run of its own kind, so that all see the same machine.
    times: dict[str, list[Times]] = {}
    for number in range(repeats):
        for name, parts in (("unmodified", whole), ("halves", halves)):
            once(*parts)
            times.setdefault(name, []).append(once(*parts))
        executor = overlap_megatron.attach(gpt)
        once(*whole)
        for name, setting in (
            ("overlapped", SPLIT),
            ("sequential in a step that overlaps", SEQUENTIAL),
            ("sequential", SEQUENTIAL),
        ):
            if name == "sequential":
                executor.skip_step(2 * number + 1)
            elif name == "overlapped":
                assert executor.begin_step(2 * number, [SPLIT])
            run = attached(setting)
            run()
            times.setdefault(name, []).append(run())
        executor.close()
        gc.collect()
    rows = []
    for name, base in (
        ("sequential", "unmodified"),
        ("sequential in a step that overlaps", "unmodified"),
        ("overlapped", "halves"),
    ):
        row: dict[str, Any] = {"case": name, "against": base}
        for key in times[name][0]:
            ours, theirs = (min(t[key] for t in times[who]) for who in (name, base))
            label = " ".join(key)
            row[f"{label}, added us per layer"] = round(1e6 * (ours - theirs) / LAYERS, 1)
            row[f"{label}, ratio"] = round(ours / theirs, 3)
        rows.append(row)
    gc.enable()
    return rows


def _now() -> dict[str, float]:
    """Wall time, and processor time, which other programs on the machine do not stretch."""
    return {"wall": time.perf_counter(), "processor": time.process_time()}
