"""The work of a stage, counted from its modules and from a real forward."""

from __future__ import annotations

import pytest
import torch
from kareus_pp.integrations._work import WorkCounter, count_forward, instruction_works
from torch import nn

from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.simulate.gpu_model import Work


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        weight = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        return self.out((weight @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, n_heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


BATCH, LENGTH, WIDTH = 3, 16, 32
TOKENS = BATCH * LENGTH


def test_static_flops_equal_those_of_a_real_forward() -> None:
    stage = [Block(WIDTH, 4), Block(WIDTH, 4)]
    with WorkCounter() as counter:
        nn.Sequential(*stage)(torch.randn(BATCH, LENGTH, WIDTH))
    static = count_forward(stage, TOKENS, LENGTH)
    by_hand = 2 * (2 * 12 * WIDTH**2 * TOKENS + 4 * TOKENS * LENGTH * WIDTH)
    assert static.flops == counter.work.flops == by_hand
    assert 0 < static.bytes < counter.work.bytes


def test_static_flops_of_torch_attention() -> None:
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    expected = 2 * 4 * WIDTH**2 * TOKENS + 4 * TOKENS * LENGTH * WIDTH
    assert count_forward([attention], TOKENS, LENGTH).flops == expected


def test_an_embedding_is_bytes_only() -> None:
    embedding = nn.Embedding(256, WIDTH)
    assert count_forward([embedding], TOKENS) == Work(0.0, 2 * 4 * TOKENS * WIDTH)
    with WorkCounter() as counter:
        embedding(torch.zeros(BATCH, LENGTH, dtype=torch.long))
    assert counter.work.flops == 0
    assert counter.work.bytes > 0


def test_a_position_table_is_no_matrix() -> None:
    module = nn.Module()
    module.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
    assert count_forward([module], TOKENS).flops == 0


def test_a_module_listed_twice_counts_once() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    assert count_forward([layer, nn.Sequential(layer)], TOKENS) == count_forward([layer], TOKENS)


def test_a_real_backward_costs_two_forwards() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(TOKENS, WIDTH, requires_grad=True)
    with WorkCounter() as forward:
        y = layer(x)
    with WorkCounter() as backward:
        y.sum().backward()
    assert backward.work.flops == 2 * forward.work.flops


def test_views_move_no_bytes() -> None:
    x = torch.randn(BATCH, WIDTH)
    with WorkCounter() as counter:
        x.t().reshape(WIDTH, BATCH).unsqueeze(0)
    assert counter.work == Work(0.0, 0.0)


def test_counting_does_not_change_results() -> None:
    block, x = Block(WIDTH, 4), torch.randn(BATCH, LENGTH, WIDTH)
    plain = block(x)
    with WorkCounter():
        counted = block(x)
    assert torch.equal(plain, counted)


@pytest.mark.parametrize(("recompute", "backward", "input_gradient"), [(0, 2, 1), (1, 3, 2)])
def test_kinds_cost_multiples_of_the_forward(
    recompute: int, backward: int, input_gradient: int
) -> None:
    forward = Work(10.0, 4.0)
    works = instruction_works(2, forward, chunk=1, recompute=bool(recompute))
    assert works == {
        InstructionClass(2, Kind.FORWARD, 1): forward,
        InstructionClass(2, Kind.BACKWARD, 1): backward * forward,
        InstructionClass(2, Kind.INPUT_GRADIENT, 1): input_gradient * forward,
        InstructionClass(2, Kind.WEIGHT_GRADIENT, 1): forward,
    }
