r"""Train a GPT with Megatron-Core's pipeline schedules and a loop of its own.

One line hooks kareus-pp in (`attach`). Where there is no GPU it runs on the CPU, over gloo:

    torchrun --nproc-per-node 4 examples/train_gpt_megatron.py --pp 4 --chunks 2 \
        --kareus-config configs/megatron_emulated.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

from kareus_pp.integrations.megatron import attach, detach

VOCABULARY = 512


def main() -> None:
    arguments = parse_arguments()
    with contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")
        else:
            sys.path.append(str(Path(__file__).parent))
            from megatron_on_cpu import megatron_on_cpu

            dist.init_process_group("gloo")
            stack.enter_context(megatron_on_cpu())
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=arguments.tp,
            pipeline_model_parallel_size=arguments.pp,
            virtual_pipeline_model_parallel_size=arguments.chunks if arguments.chunks > 1 else None,
        )
        attach(arguments.kareus_config)
        train(build_models(arguments), arguments)
        detach()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of a stage")
    parser.add_argument("--chunks", type=int, default=1, help="model chunks on a stage")
    parser.add_argument("--layers", type=int, default=0, help="0: one for each chunk")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kareus-config", required=True, help="YAML or JSON file")
    return parser.parse_args()


def build_models(arguments: argparse.Namespace) -> list[Any]:
    """One model for each chunk of this stage."""
    torch.manual_seed(1)
    pp, chunks = arguments.pp, arguments.chunks
    config = TransformerConfig(
        num_layers=arguments.layers or pp * chunks,
        hidden_size=arguments.hidden,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        tensor_model_parallel_size=arguments.tp,
        # Two interleaved stages send to each other in both directions: Megatron asks for this.
        overlap_p2p_comm=pp == 2 and chunks > 1,
        batch_p2p_comm=not (pp == 2 and chunks > 1),
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    models = [
        GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=arguments.length,
            pre_process=rank == 0 and chunk == 0,
            post_process=rank == pp - 1 and chunk == chunks - 1,
            share_embeddings_and_output_weights=False,
            **({"vp_stage": chunk} if chunks > 1 else {}),
        )
        for chunk in range(chunks)
    ]
    return [model.cuda() for model in models]


def sequences(length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Sequences that count up from a random start: there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places = torch.arange(length + 1)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    while True:
        start = torch.randint(0, VOCABULARY, (1, 1), generator=generator)
        tokens = ((start + places) % VOCABULARY).to(device)
        yield {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": places[:-1].expand(1, length).to(device),
            "attention_mask": mask.to(device),
        }


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    """Megatron's contract: the output of a microbatch, and what makes a loss of it."""
    output = model(**next(data))

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def train(models: list[Any], arguments: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-3)
    data = [sequences(arguments.length) for _ in models]
    interleaved = len(models) > 1
    for step in range(arguments.steps):
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if interleaved else data[0],
            model=models if interleaved else models[0],
            num_microbatches=arguments.microbatches,
            seq_length=arguments.length,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        if losses and step % 10 == 0:
            mean = sum(float(loss["loss"]) for loss in losses) / len(losses)
            print(f"step {step}: loss {mean:.3f}", flush=True)


if __name__ == "__main__":
    main()
