"""What overlap costs on the CPU, per layer of Megatron-Core.

On torch's `fake` backend communication takes no time and needs no other process, so that only the
machinery shows; with gloo what two processes do to each other varies more than that.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import overrides
from torch.testing._internal.distributed.fake_pg import FakeStore

from kareus_pp.setting import SEQUENTIAL, OverlapSetting
from tests.overlap import megatron_cpu

LAYERS = 8
RUNS = 7
PHASES, CLOCKS = ("forward", "backward"), ("wall", "processor")
SPLIT = OverlapSetting.parse("attention@1:0,mlp@1:0")
COMPARED = (
    ("unmodified, later", "unmodified"),
    ("sequential", "unmodified"),
    ("sequential in a step that overlaps", "unmodified"),
    ("overlapped", "halves"),
)
Times = dict[tuple[str, str], float]


def overhead_alone(rounds: int, one_core: bool) -> list[dict[str, Any]]:
    """As `overhead`, in a process of its own, without communication.

    Args:
        rounds: Number of rounds.
        one_core: Keep all threads on one core, where they hand over to each other sooner.
    """
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return overhead(rounds)


def overhead(rounds: int) -> list[dict[str, Any]]:
    """Microseconds per layer added to what is compared with, and how sure that is.

    In every round each case runs a few times in a row and its median counts, so that both sides of
    a difference see the same machine; the first row compares the unmodified block with itself.

    Args:
        rounds: Number of rounds.
    """
    megatron_cpu.layout()
    gpt = megatron_cpu.model(megatron_cpu.config(torch.float32, num_layers=LAYERS))
    block = gpt.decoder
    block.pre_process = True
    (data,) = megatron_cpu.batches(1, 4)
    hidden = torch.randn(megatron_cpu.SEQUENCE, 4, megatron_cpu.HIDDEN)
    whole, halves = (slice(0, 4),), (slice(0, 2), slice(2, 4))

    def once(parts: Sequence[slice]) -> Times:
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
            for place, phase in enumerate(PHASES)
            for clock in CLOCKS
        }

    from kareus_pp.integrations import overlap_megatron

    # Maps CUDA to the CPU where the model is built; it would slow down every operation.
    mode = overrides._pop_mode()  # type: ignore[no-untyped-call]
    found: list[dict[str, Times]] = []
    for number in range(rounds):
        row: dict[str, Times] = {}
        row["unmodified"] = _typical(lambda: once(whole))
        row["halves"] = _typical(lambda: once(halves))
        executor = overlap_megatron.attach(gpt)
        if dist.get_backend() == "fake":
            executor._agreement = None  # There is no other rank to agree with.
        once(whole)
        executor.skip_step(2 * number)
        row["sequential"] = _typical(lambda: once(whole))
        assert executor.begin_step(2 * number + 1, [SPLIT])
        row["sequential in a step that overlaps"] = _typical(lambda: once(whole))
        for phase in PHASES:
            executor.set_next(phase, SPLIT)
        row["overlapped"] = _typical(lambda: once(whole))
        for phase in PHASES:
            executor.set_next(phase, SEQUENTIAL)
        executor.close()
        row["unmodified, later"] = _typical(lambda: once(whole))
        found.append(row)
    overrides._push_mode(mode)  # type: ignore[no-untyped-call]
    return [_compared(found, case, against) for case, against in COMPARED]


def _typical(run: Callable[[], Times]) -> Times:
    """The median of a few runs after one that is not counted, without garbage collection."""
    gc.collect()
    gc.disable()
    run()
    times = [run() for _ in range(RUNS)]
    gc.enable()
    return {key: statistics.median(t[key] for t in times) for key in times[0]}


def _compared(found: Sequence[dict[str, Times]], case: str, against: str) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case, "against": against}
    for phase in PHASES:
        for clock in CLOCKS:
            ours, theirs = ([r[who][phase, clock] for r in found] for who in (case, against))
            added = sorted(1e6 * (a - b) / LAYERS for a, b in zip(ours, theirs, strict=True))
            low, high = _interval(len(added))
            row[f"{phase} {clock}, added us per layer"] = round(statistics.median(added), 1)
            row[f"{phase} {clock}, interval us"] = [round(added[low], 1), round(added[high], 1)]
            ratio = statistics.median(ours) / statistics.median(theirs)
            row[f"{phase} {clock}, ratio"] = round(ratio, 3)
    return row


def _interval(count: int) -> tuple[int, int]:
    """Places in order of a 95 % interval of the median, from the binomial distribution."""
    reach = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - reach))
    return low, count - 1 - low


def _now() -> dict[str, float]:
    """Wall time, and processor time, which other programs on the machine do not stretch."""
    return {"wall": time.perf_counter(), "processor": time.process_time()}
