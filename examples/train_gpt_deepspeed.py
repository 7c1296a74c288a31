"""Train a byte-level GPT with DeepSpeed pipeline parallelism.

The text is on every machine: the source files of Python's own standard library. The embedding is on
the first stage and the head on the last, so that the stages differ in work. One seed gives the same
losses, bit by bit.

    deepspeed --num_gpus 4 examples/train_gpt_deepspeed.py --deepspeed_config FILE --stages 4
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Embedding(nn.Module):
    """Bytes and positions to vectors."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.byte(tokens) + self.position(places)


class Block(nn.Module):
    """A transformer block, normalised before attention and before the perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_perceptron = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.n_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(functional.gelu(self.expand(self.norm_perceptron(x))))


class Head(nn.Module):
    """Vectors to a score for every next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.norm(x))


def next_byte_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def standard_library(limit: int) -> Tensor:
    """The first `limit` bytes of the standard library's source files, in order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def batches(
    text: Tensor, batch: int, length: int, seed: int, replica: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless microbatches of `(inputs, targets)`, each of shape `(batch, length)`."""
    generator = torch.Generator().manual_seed(seed * 1000 + replica)
    while True:
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        windows = torch.stack([text[start : start + length + 1] for start in starts])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def build(arguments: argparse.Namespace) -> PipelineModule:
    layers = [LayerSpec(Embedding, arguments.width, arguments.length)]
    layers += [LayerSpec(Block, arguments.width, arguments.heads)] * arguments.layers
    layers += [LayerSpec(Head, arguments.width)]
    return PipelineModule(
        layers,
        num_stages=arguments.stages,
        loss_fn=next_byte_loss,
        partition_method=arguments.partition,
        activation_checkpoint_interval=arguments.recompute,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages")
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--partition", default="uniform", help="how DeepSpeed cuts the layers")
    parser.add_argument("--recompute", type=int, default=0, help="layers of a checkpoint segment")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eval-every", type=int, default=0, help="evaluate after so many steps")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="JSON lines with the loss of every step")
    parser.add_argument("--backend", default=None, help="nccl, gloo; default: as DeepSpeed chooses")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    deepspeed.init_distributed(dist_backend=arguments.backend)
    module = build(arguments)
    engine, _, _, _ = deepspeed.initialize(
        args=arguments, model=module, model_parameters=module.parameters()
    )
    text = standard_library(1 << 20)
    split = len(text) * 9 // 10
    size, replica = engine.train_micro_batch_size_per_gpu(), engine.grid.get_data_parallel_id()
    train = batches(text[:split], size, arguments.length, arguments.seed, replica)
    check = batches(text[split:], size, arguments.length, arguments.seed, replica)
    lines: list[dict[str, Any]] = []
    for step in range(1, arguments.steps + 1):
        lines.append({"step": step, "loss": engine.train_batch(train).item()})
        if arguments.eval_every and step % arguments.eval_every == 0:
            lines[-1]["eval_loss"] = engine.eval_batch(check).item()
    if arguments.save:
        engine.save_checkpoint(arguments.save)
    if arguments.log and engine.global_rank == 0:
        arguments.log.parent.mkdir(parents=True, exist_ok=True)
        arguments.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # A thread of gloo that still frees the last loss while Python ends would abort the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
