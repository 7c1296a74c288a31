"""What overlap must leave unchanged, case by case, on the real Megatron-Core.

Every function runs on all ranks of a `Ranks` group and returns a row: the largest relative error
against the unmodified model, and which launch slots were hit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.overlap.partitions import Program
from kareus_pp.setting import Launch, OverlapSetting
from tests.overlap import megatron_cpu
from tests.overlap.steps import begin_step

FULL_UNIFORM = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
FULL_BLOCK = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 2,
}
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}


def selective(*modules: str) -> dict[str, Any]:
    """Selective recomputation of modules."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


# Case: arguments of `equality`.
EQUALITY: dict[str, dict[str, Any]] = {
    "plain": {},
    "full-uniform recompute": {"changes": FULL_UNIFORM},
    "full-uniform recompute, 2 layers": {
        "changes": {**FULL_UNIFORM, "recompute_num_layers": 2, "num_layers": 4}
    },
    "full-block recompute": {"changes": FULL_BLOCK},
    "selective core_attn": {"changes": selective("core_attn")},
    "selective layernorm": {"changes": selective("layernorm")},
    "selective core_attn, layernorm": {"changes": selective("core_attn", "layernorm")},
    "selective mlp": {"changes": {**selective("mlp"), "add_bias_linear": False}},
    "SwiGLU without bias": {"changes": SWIGLU},
    "GQA": {"changes": {"num_query_groups": 2}},
    "odd batch": {"batch": 3},
    "rotary embedding": {"position": "rope"},
    "per-sample mask": {"mask": "per-sample"},
    "sequence parallel": {"changes": {"sequence_parallel": True}},
    "sequence parallel, full recompute": {"changes": {"sequence_parallel": True, **FULL_UNIFORM}},
    "four communicators": {"levels": (2, 4, 8)},
    "compiled fusions (float32)": {
        "changes": {"bias_dropout_fusion": True, "bias_activation_fusion": True},
        "dtype": torch.float32,
    },
    "compiled SwiGLU (float32)": {
        "changes": {**SWIGLU, "bias_activation_fusion": True, "bias_dropout_fusion": True},
        "dtype": torch.float32,
    },
}


def equality(
    case: str,
    changes: Mapping[str, Any] | None = None,
    batch: int = 4,
    position: str = "learned_absolute",
    mask: str = "causal",
    dtype: torch.dtype = torch.float64,
    levels: Sequence[int] = (),
    settings: int = 0,
    tamper: Callable[[OverlapExecutor], None] | None = None,
) -> dict[str, Any]:
    """TP 2: loss and every gradient of a microbatch, for many settings.

    Args:
        case: Name of the row.
        changes: Changes of the transformer configuration.
        batch: Microbatch size.
        position: Position embedding of the model.
        mask: Attention mask of the batches.
        dtype: Data type of parameters and activations.
        levels: SM levels of the communicators to choose among.
        settings: Number of settings; 0: as many as hit every slot once.
        tamper: Called with the executor: negative controls.
    """
    megatron_cpu.layout()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings_of_model = megatron_cpu.config(dtype, **(changes or {}))
    gpt = megatron_cpu.model(settings_of_model, position)
    (data,) = megatron_cpu.batches(1, batch, mask=mask)
    reference = _step(gpt, data)
    executor = _attach(gpt, levels)
    try:
        if tamper is not None:
            tamper(executor)
        errors = [megatron_cpu.relative_error(_step(gpt, data), reference)]
        choose = _Chooser(executor, (0, *levels))
        wanted: Counter[tuple[str, str, int]] = Counter()
        for number in range(settings or choose.needed):
            setting = choose.setting(number)
            begin_step(executor, setting)
            for phase, chosen in setting.items():
                wanted += expected_launches(executor.blocks[0].programs[phase], chosen)
            errors.append(megatron_cpu.relative_error(_step(gpt, data), reference))
        row = _row(case, max(errors), executor, choose, wanted)
        return {**row, "compiled": _compiled()}
    finally:
        executor.close()


def _compiled() -> int | None:
    """Functions that torch.compile compiled since the case began; None where it is switched off."""
    if torch._dynamo.config.disable:
        return None
    return int(torch._dynamo.utils.counters["frames"]["ok"])


def _attach(model: Any, levels: Sequence[int] = ()) -> OverlapExecutor:
    from kareus_pp.integrations import overlap_megatron

    return overlap_megatron.attach(model, levels=levels, timeout_s=60.0)


def _step(gpt: Any, data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    for parameter in gpt.parameters():
        parameter.grad = None
    loss = gpt(**data).mean()
    loss.backward()
    return {"loss": loss.detach().clone(), **megatron_cpu.gradients(gpt)}


class _Chooser:
    """Settings that hit every slot, then random ones; the same on all ranks."""

    def __init__(self, executor: OverlapExecutor, sms: Sequence[int]) -> None:
        self.partitions = executor.partitions
        self.needed = max(len(partition.slots) for partition in self.partitions)
        self._sms = sms
        self._random = random.Random(3)

    def setting(self, number: int) -> dict[str, OverlapSetting]:
        """Setting of each phase."""
        chosen: dict[str, list[Launch]] = {"forward": [], "backward": []}
        for partition in self.partitions:
            slots = len(partition.slots)
            slot = number % slots if number < self.needed else self._random.randrange(slots)
            launch = Launch(partition.kind, slot, self._random.choice(self._sms))
            chosen[partition.phase].append(launch)
        return {phase: OverlapSetting(tuple(launches)) for phase, launches in chosen.items()}


def expected_launches(program: Program, setting: OverlapSetting) -> Counter[tuple[str, str, int]]:
    """Launches per slot that a setting asks of one split execution of a program.

    Both nanobatches pass every partition; only the very first has no peer's collective to launch.
    """
    expected: Counter[tuple[str, str, int]] = Counter()
    for launch in setting.launches:
        passes = 2 * program.sequence.count(launch.partition)
        first = int(program.sequence[0] == launch.partition)
        expected[program.phase, launch.partition, launch.slot] += passes - first
    return expected


def _row(
    case: str,
    error: float,
    executor: OverlapExecutor,
    choose: _Chooser,
    wanted: Counter[tuple[str, str, int]],
) -> dict[str, Any]:
    launches = Counter({key: count for key, count in executor.launches.items() if key[1] != "tail"})
    every = {(p.phase, p.kind, s.number) for p in choose.partitions for s in p.slots}
    return {
        "case": case,
        "version": f"megatron-core {megatron_cpu.version()}",
        "max_rel_error": error,
        "slots_hit": f"{len(every & set(launches))}/{len(every)}",
        "all_slots_hit": every <= set(launches),
        "launches_as_planned": launches == wanted,
        "reasons": dict(executor.reasons),
    }


# Dropout, against two half microbatches of the unmodified block.

DROPOUT: dict[str, dict[str, Any]] = {
    "dropout": {},
    "dropout, full-uniform recompute": FULL_UNIFORM,
    "dropout, full-block recompute": FULL_BLOCK,
    "dropout, selective core_attn": selective("core_attn"),
    "dropout, selective layernorm": selective("layernorm"),
    "dropout, sequence parallel": {"sequence_parallel": True},
    "dropout, sequence parallel, full recompute": {"sequence_parallel": True, **FULL_UNIFORM},
}


def dropout(
    case: str,
    changes: Mapping[str, Any],
    settings: int = 0,
    tamper: Callable[[OverlapExecutor], None] | None = None,
) -> dict[str, Any]:
    """TP 2, dropout 0.1: the block against itself, unmodified, on each half of the microbatch."""
    megatron_cpu.layout()
    from megatron.core import parallel_state

    config = megatron_cpu.config(hidden_dropout=0.1, attention_dropout=0.1, **changes)
    gpt = megatron_cpu.model(config)
    block = gpt.decoder
    block.pre_process = True
    parts = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
    torch.manual_seed(11)
    shape = (megatron_cpu.SEQUENCE // parts, 4, megatron_cpu.HIDDEN)
    hidden, weight = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    (data,) = megatron_cpu.batches(1, 4)
    entry = _random_states()
    after = _half(block, hidden, weight, data, slice(0, 2), entry)
    first = megatron_cpu.gradients(block)
    _half(block, hidden, weight, data, slice(2, 4), _derived(entry))
    reference = megatron_cpu.gradients(block)
    for name, grad in first.items():
        reference[name] += grad

    executor = _attach(gpt)
    try:
        if tamper is not None:
            tamper(executor)
        _half(block, hidden, weight, data, slice(0, 4), entry)
        choose = _Chooser(executor, (0,))
        wanted: Counter[tuple[str, str, int]] = Counter()
        error, kept = 0.0, True
        for number in range(settings or choose.needed):
            setting = choose.setting(number)
            begin_step(executor, setting)
            for phase, chosen in setting.items():
                wanted += expected_launches(executor.blocks[0].programs[phase], chosen)
            end = _half(block, hidden, weight, data, slice(0, 4), entry)
            error = max(
                error, megatron_cpu.relative_error(megatron_cpu.gradients(block), reference)
            )
            # After the forward as after that of the first half, and the same after the backward.
            kept = kept and _same(end, after) and _same(_random_states(), after)
        row = _row(case, error, executor, choose, wanted)
        return {**row, "random_states_kept": kept}
    finally:
        executor.close()


def _half(
    block: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    data: Mapping[str, Any],
    part: slice,
    states: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Forward and backward of a part of the microbatch; the random states after the forward."""
    _set_random_states(states)
    for parameter in block.parameters():
        parameter.grad = None
    leaf = hidden[:, part].contiguous().requires_grad_()
    output = block(hidden_states=leaf, attention_mask=data["attention_mask"])
    end = _random_states()
    (output * weight[:, part]).sum().backward()
    return end


def _same(states: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(states[key], wanted[key]) for key in wanted)


def _random_states() -> dict[str, torch.Tensor]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {"": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}


def _set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states[""])
    get_cuda_rng_tracker().set_states({k: v for k, v in states.items() if k})


def _derived(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from kareus_pp.overlap.swaps import derived_state

    return {name: derived_state(state) for name, state in states.items()}


# Gradient reduction that overlaps the backward, in Megatron's own DDP.


def grad_reduce(
    case: str,
    steps: int = 6,
    microbatches: int = 2,
    tamper: Callable[[OverlapExecutor], None] | None = None,
) -> dict[str, Any]:
    """TP 2 x DP 2 with `overlap_grad_reduce`: reduced gradients of several steps."""
    megatron_cpu.layout()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = megatron_cpu.config()
    gpt = megatron_cpu.model(config)
    reduce = DistributedDataParallelConfig(
        overlap_grad_reduce=True, grad_reduce_in_fp32=False, bucket_size=4000
    )
    ddp = DistributedDataParallel(config=config, ddp_config=reduce, module=gpt)
    data = list(megatron_cpu.batches(microbatches, 4, seed=dist.get_rank() // 2))

    def step() -> dict[str, torch.Tensor]:
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            for microbatch in data[:-1]:
                ddp(**microbatch).mean().backward()
        ddp(**data[-1]).mean().backward()
        ddp.finish_grad_sync()
        return megatron_cpu.gradients(ddp)

    step()
    reference = step()
    executor = _attach(ddp)
    try:
        if tamper is not None:
            tamper(executor)
        errors = [megatron_cpu.relative_error(step(), reference)]
        choose = _Chooser(executor, (0,))
        wanted: Counter[tuple[str, str, int]] = Counter()
        for number in range(max(steps, choose.needed)):
            setting = choose.setting(number)
            begin_step(executor, setting)
            for phase, chosen in setting.items():
                expected = expected_launches(executor.blocks[0].programs[phase], chosen)
                for _ in range(microbatches):
                    wanted += expected
            errors.append(megatron_cpu.relative_error(step(), reference))
        # The microbatches after the observed one of the first step ran sequentially.
        return _row(case, max(errors), executor, choose, wanted)
    finally:
        executor.close()
