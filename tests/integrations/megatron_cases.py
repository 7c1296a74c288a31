"""What ranks of a Megatron world do in tests; see `world.run_world`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from kareus_pp.integrations import megatron
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from examples.megatron_on_cpu import megatron_on_cpu
from kareus_pp.schedule import Instruction, Kind
from tests.integrations.modes import off_observe_apply
from tests.integrations.recorder import Recorder

SEQUENCE, BATCH, HIDDEN, VOCABULARY = 8, 2, 16, 32


def parallel(pp: int, tp: int = 1, chunks: int = 1) -> None:
    """Make Megatron's process groups anew."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )


def build(pp: int, tp: int = 1, chunks: int = 1, layers: int = 0, **values: Any) -> list[Any]:
    """The GPT of this rank: one model for each chunk."""
    torch.manual_seed(1234)
    config = TransformerConfig(
        num_layers=layers or pp * chunks,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        tensor_model_parallel_size=tp,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **values,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    models = []
    for chunk in range(chunks):
        more = {"vp_stage": chunk} if chunks > 1 and takes_vp_stage() else {}
        if chunks > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        models.append(
            GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                pre_process=rank == 0 and chunk == 0,
                post_process=rank == pp - 1 and chunk == chunks - 1,
                share_embeddings_and_output_weights=False,
                **more,
            )
        )
    return models


def takes_vp_stage() -> bool:
    """Whether this Megatron-Core tells a model its chunk."""
    return "vp_stage" in inspect.signature(GPTModel.__init__).parameters


def batches(seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.ones(BATCH, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    while True:
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        yield {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": positions,
            "attention_mask": mask,
        }


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    """A user's forward step, as in `pretrain_gpt.py`."""
    output = model(**next(data))

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def run_step(
    models: list[Any], microbatches: int, seed: int = 0, forward_only: bool = False
) -> list[float]:
    """One iteration through the framework's own schedule; returns the losses of the last stage."""
    chunks = len(models)
    losses = schedules.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches(seed) for _ in models] if chunks > 1 else batches(seed),
        model=models if chunks > 1 else models[0],
        num_microbatches=microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    return [float(loss["loss"]) for loss in losses]


def own_order(
    pp: int, chunks: int, microbatches: int, group: int | None = None, fused: bool = False
) -> list[str]:
    """This rank's order by Megatron's own generators: its schedule table and its warm-up count."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    options = {
        "p2p_communicator": SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: pp, rank=lambda: rank),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        ),
        "overlap_moe_expert_parallel_comm": fused,
    }
    known = inspect.signature(schedules.get_pp_rank_microbatches).parameters
    total, _, warmup, _ = schedules.get_pp_rank_microbatches(
        microbatches,
        chunks,
        group or pp,
        forward_only=False,
        **{name: value for name, value in options.items() if name in known},
    )
    if pp == 1:
        warmup = 0  # Old versions answer for pipelines only.
    table = schedules.get_schedule_table(microbatches, chunks, group or pp)
    forwards = [str(Instruction(rank, Kind.FORWARD, m, c)) for m, c in table]
    backwards = [str(Instruction(rank, Kind.BACKWARD, m, chunks - 1 - c)) for m, c in table]
    steady = itertools.chain(*zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[total - warmup :]]


def orders(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case the recorded stream, Megatron's own order, and what the hooks changed."""
    results = []
    for case in cases:
        shape = {key: case[key] for key in ("pp", "tp", "chunks") if key in case}
        parallel(**shape)
        recorder = Recorder()
        with contextlib.ExitStack() as stack:
            stack.enter_context(megatron_on_cpu())
            models = build(**shape, **case.get("config", {}))
            if case.get("ddp"):
                models = data_parallel(models)
                # Real gathering needs the distributed optimizer; here the setting is enough.
                models[0].ddp_config.overlap_param_gather = case.get("gather", False)
            if case.get("fused"):
                stack.enter_context(fused_steps(models))
            plain = one_step(models, case["microbatches"])
            with recorder.hooked(megatron):
                hooked = one_step(models, case["microbatches"])
        chunks, group = case.get("chunks", 1), case.get("group")
        own = own_order(case["pp"], chunks, case["microbatches"], group, case.get("fused", False))
        results.append(
            {
                "topology": recorder.topology,
                "recorded": recorder.stream(),
                "exchanges": recorder.exchanges,
                "communicating": [text for text in recorder.steps[0] if text.endswith("+comm")],
                "calls": recorder.calls,
                "fingerprint": recorder.fingerprint,
                "own": own,
                "equal": plain == hooked,
                "gradients": len(plain[1]),
                "finite": all(map(math.isfinite, plain[0])),
            }
        )
    return results


def one_step(models: list[Any], microbatches: int, seed: int = 0) -> tuple[list[float], list[str]]:
    """Losses and a digest of every gradient of one iteration from a clean start."""
    for model in models:
        getattr(model, "zero_grad_buffer", model.zero_grad)()
    losses = run_step(models, microbatches, seed)
    digests = []
    for model in models:
        for parameter in model.parameters():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            digests.append(hashlib.sha256(gradient.numpy().tobytes()).hexdigest())
    return losses, digests


def data_parallel(models: list[Any]) -> list[Any]:
    """The models in Megatron's data parallelism, gradients reduced during the last backward."""
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(m.config, ddp, m) for m in models]
    for model in models:
        model.config.no_sync_func = [w.no_sync for w in wrapped]
        model.config.finalize_model_grads_func = lambda *_, **__: [
            w.finish_grad_sync() for w in wrapped
        ]
    if len(models) == 1:
        models[0].config.no_sync_func = wrapped[0].no_sync
    return wrapped


@contextlib.contextmanager
def fused_steps(models: list[Any]) -> Iterator[None]:
    """Megatron's schedule of fused forward-backward steps, the fused step itself replaced.

    The real one needs CUDA streams; the stand-in runs the framework's own forward and backward
    step one after the other.
    """
    from megatron.core.pipeline_parallel import combined_1f1b

    config = models[0].config
    config.overlap_moe_expert_parallel_comm = True
    signature = inspect.signature(combined_1f1b.combined_forward_backward_step)
    forward, backward = schedules.forward_step, schedules.backward_step
    takes_type = "model_type" in inspect.signature(backward).parameters

    def combined(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        v = SimpleNamespace(**given.arguments)
        output = tokens = gradient = None
        if v.f_model is not None:
            stage, chunk = parallel_state.get_pipeline_model_parallel_rank(), v.f_model_chunk_id
            last = stage == config.pipeline_model_parallel_size - 1
            output, tokens = forward(
                *(v.forward_step_func, v.data_iterator, v.f_model, v.num_microbatches),
                *(v.input_tensor, v.forward_data_store, config, 1),
                current_microbatch=v.current_microbatch,
                vp_stage=chunk,
                is_last_stage=last and chunk == len(models) - 1,
            )
        if v.b_model is not None:
            values = (v.b_input_tensor, v.b_output_tensor, v.b_output_tensor_grad)
            more = (None,) if takes_type else ()
            gradient = backward(*values, *more, config)
        return output, tokens, gradient

    combined = functools.wraps(combined_1f1b.combined_forward_backward_step)(combined)
    with mock.patch.multiple(
        combined_1f1b, set_streams=lambda *_, **__: None, combined_forward_backward_step=combined
    ):
        yield


class Training:
    """A small GPT under Megatron's schedules; see `modes.Training`."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._shape = {key: case[key] for key in ("pp", "tp", "chunks") if key in case}
        self._config = case.get("config", {})
        self._microbatches = case["microbatches"]
        parallel(**self._shape)

    def restart(self) -> None:
        self.models = build(**self._shape, **self._config)

    def step(self, seed: int) -> tuple[list[float], list[str]]:
        result = one_step(self.models, self._microbatches, seed)
        update(self.models)
        return result

    def attach(self, config: dict[str, Any]) -> None:
        megatron.attach(config)

    def session(self) -> Any:
        return megatron.session()

    def detach(self) -> None:
        megatron.detach()


def update(models: list[Any]) -> None:
    """Plain gradient descent."""
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


def modes(cases: Sequence[dict[str, Any]], folder: str, work_scale: float) -> list[dict[str, Any]]:
    """For each case: off, observing, applying."""
    results = []
    with megatron_on_cpu():
        for number, case in enumerate(cases):
            place = Path(folder, str(number))
            results.append(off_observe_apply(Training(case), place, work_scale))
    return results
