"""What overlap costs on the CPU, per layer of Megatron-Core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kareus_pp.setting import SEQUENTIAL, OverlapSetting
from tests.overlap import megatron_cpu

LAYERS = 8
SPLIT = OverlapSetting.parse("attention@1:0,mlp@1:0")


def overhead(repeats: int) -> list[dict[str, Any]]:
    """Microseconds per layer: unmodified, attached but sequential, halves, overlapped."""
    megatron_cpu.layout()
    gpt = megatron_cpu.model(megatron_cpu.config(torch.float32, num_layers=LAYERS))
    block = gpt.decoder
    (data,) = megatron_cpu.batches(1, 4)
    block.pre_process = True
    hidden = torch.randn(megatron_cpu.SEQUENCE, 4, megatron_cpu.HIDDEN)

    def once(*parts: slice) -> tuple[float, float]:
        leaves = [hidden[:, part].contiguous().requires_grad_() for part in parts]
        start = time.perf_counter()
        outputs = [block(hidden_states=x, attention_mask=data["attention_mask"]) for x in leaves]
        middle = time.perf_counter()
        for output in outputs:
            output.sum().backward()
        return middle - start, time.perf_counter() - middle

    whole, halves = (slice(0, 4),), (slice(0, 2), slice(2, 4))
    from kareus_pp.integrations import overlap_megatron

    executor: Any = None

    def attached(setting: OverlapSetting) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            for phase in ("forward", "backward"):
                executor.set_next(phase, setting)
            return once(*whole)

        return run

    # Alternating, so that both see the same machine.
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(repeats):
        for name, run in (("unmodified", lambda: once(*whole)), ("halves", lambda: once(*halves))):
            times.setdefault(name, []).append(run())
        executor = overlap_megatron.attach(gpt)
        once(*whole)
        for name, setting in (("sequential", SEQUENTIAL), ("overlapped", SPLIT)):
            run = attached(setting)
            run()
            times.setdefault(name, []).append(run())
        executor.close()
    rows = []
    for name, base in (("sequential", "unmodified"), ("overlapped", "halves")):
        row: dict[str, Any] = {"case": name, "against": base}
        for place, phase in enumerate(("forward", "backward")):
            ours, theirs = (
                statistics.median(pair[place] for pair in times[key]) for key in (name, base)
            )
            row[f"{phase}_added_us_per_layer"] = 1e6 * (ours - theirs) / LAYERS
            row[f"{phase}_ratio"] = ours / theirs
        rows.append(row)
    return rows
