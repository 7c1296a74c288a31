"""What the hooks leave behind on the ranks of a Megatron world."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kareus_pp.integrations import megatron

from examples.megatron_on_cpu import megatron_on_cpu
from tests.integrations import megatron_cases as cases
from tests.integrations.megatron_cases import schedules
from tests.integrations.recorder import Recorder

_COLLECTIVES = ("all_reduce", "all_gather", "barrier", "broadcast", "batch_isend_irecv", "reduce")


def traces() -> dict[str, Any]:
    """Count collectives, look at every output, compare fingerprints."""
    cases.parallel(2)
    with megatron_on_cpu():
        models = cases.data_parallel(cases.build(2))
        cases.one_step(models, 3)
        plain = counted(models)
        recorder, other = Recorder(), Recorder()
        outputs: list[Any] = []
        with recorder.hooked(megatron), seeing_outputs(outputs):
            hooked = counted(models)
            kept = len(megatron._hooks._forward_of)
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform"}
        with other.hooked(megatron):
            cases.one_step(cases.build(2, **recompute, recompute_num_layers=1), 3)
    fresh = set(torch.zeros(1).__dict__)
    return {
        "collectives": {"plain": plain, "hooked": hooked},
        "outputs": len(outputs),
        "on_tensors": [name for o in outputs for name in o.__dict__ if name not in fresh],
        "kept": kept,
        "fingerprints": [recorder.fingerprint, other.fingerprint],
    }


def counted(models: list[Any]) -> dict[str, int]:
    """How often a step calls each collective, and synchronises."""
    calls: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    patched = {name: counting(name, getattr(dist, name)) for name in _COLLECTIVES}
    synchronize = counting("synchronize", lambda *_: None)
    with (
        mock.patch.multiple(dist, **patched),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
    ):
        cases.one_step(models, 3)
    return dict(calls)


def seeing_outputs(outputs: list[Any]) -> Any:
    """Note what every forward step returned, after the hooks."""
    hooked = schedules.forward_step

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        result = hooked(*args, **kwargs)
        output = result[0]
        outputs.append(output[0] if isinstance(output, list) else output)
        return result

    return mock.patch.object(schedules, "forward_step", forward_step)
