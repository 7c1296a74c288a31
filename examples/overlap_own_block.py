"""Overlap on a tensor-parallel block of one's own, in plain PyTorch.

    torchrun --nproc-per-node 2 examples/overlap_own_block.py

Prints the partitions that were found in the block, then trains it with and without overlap.
"""

import torch
import torch.distributed as dist
from torch import nn

from kareus_pp.overlap import generic
from kareus_pp.setting import OverlapSetting


class ReduceForward(torch.autograd.Function):
    """Sum over the group in forward."""

    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, grad):
        return grad


class ReduceBackward(torch.autograd.Function):
    """Sum over the group in backward."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class FeedForward(nn.Module):
    """A feed-forward layer, its hidden features divided among the ranks."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width // dist.get_world_size())
        self.down = nn.Linear(4 * width // dist.get_world_size(), width, bias=False)

    def forward(self, x):
        hidden = torch.relu(self.up(ReduceBackward.apply(self.norm(x))))
        return x + ReduceForward.apply(self.down(hidden))


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(dist.get_rank())
    block = nn.Sequential(*(FeedForward(64) for _ in range(4)))
    x = torch.arange(8 * 16 * 64).reshape(8, 16, 64).sin().requires_grad_()

    def gradients():
        block.zero_grad()
        block(x).square().mean().backward()
        return [p.grad.clone() for p in block.parameters()]

    group = dist.group.WORLD
    partitions = generic.find_partitions(block, group, x)
    wanted = gradients()
    executor = generic.attach(block, group, agreement=generic.group_agreement(group))
    gradients()  # observed
    setting = OverlapSetting.parse("mlp@1:0")
    executor.begin_step(1, [setting])  # all ranks agree on it, or run the step sequentially
    for phase in ("forward", "backward"):
        executor.set_next(phase, setting)
    found = gradients()
    error = max((a - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True))
    if dist.get_rank() == 0:
        for p in partitions:
            print(f"{p.phase} {p.kind}: {p.count} times, then {p.collective} of {p.bytes} bytes")
            for slot in p.slots:
                print(f"  slot {slot.number} at {slot.name}: {', '.join(slot.operations)}")
        print(f"launches {dict(executor.launches)}")
        print(f"largest relative difference of a gradient {error:.1e}")
    executor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
