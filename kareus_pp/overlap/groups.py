"""What a process group needs for overlap: an agreement of its ranks, communicators by SMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.agreement import Agreement
from kareus_pp.overlap.communicators import CommunicatorPool, checked_levels

_ATTACH_TIMEOUT_S = 300.0
"""Longest wait for ranks that make communicators; some build their model for longer."""


def own_group(group: object) -> ProcessGroup:
    """The process group that an argument names; None: all ranks.

    Raises:
        OverlapError: It is none that this rank is in, or torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise OverlapError(
            "torch.distributed is not initialised; call init_process_group before overlap"
        )
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if not isinstance(group, ProcessGroup):
        raise OverlapError(
            f"the group is of type {type(group).__name__}; give a process group that this rank is "
            f"in, or None for all ranks"
        )
    return group


def group_agreement(group: ProcessGroup, timeout_s: float = 10.0) -> Agreement:
    """Agreement of the ranks of a group through the job's own key-value store.

    Args:
        group: The process group.
        timeout_s: Longest wait for the other ranks at the beginning of a step.

    Raises:
        OverlapError: The group is none, or the timeout is no positive, finite number.
    """
    return _agreement(own_group(group), "", timeout_s)


def _agreement(group: ProcessGroup, purpose: str, timeout_s: float) -> Agreement:
    return Agreement(
        dist.distributed_c10d._get_default_store(),
        group=purpose + "-".join(map(str, dist.get_process_group_ranks(group))),
        rank=group.rank(),
        size=group.size(),
        timeout_s=timeout_s,
    )


def group_pool(group: ProcessGroup, levels: Sequence[int]) -> CommunicatorPool:
    """Communicators for every group of this kind.

    With levels a collective call of all ranks of the job.

    Args:
        group: This rank's own group.
        levels: Numbers of SMs; none: the group's own communicator serves all.

    Raises:
        OverlapError: The levels are none, or the ranks do not all give the same ones.
    """
    levels = checked_levels(levels)
    if not levels:
        return CommunicatorPool()
    everyone = dist.distributed_c10d._get_default_group()
    agreement = _agreement(everyone, "levels/", _ATTACH_TIMEOUT_S)
    reason = agreement.reason_against(0, [str(levels)])
    if reason:
        raise OverlapError(
            f"no communicators were made for the levels {levels}, because {reason}; attach with "
            f"the same levels on every rank of the job"
        )
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tuple(dist.get_process_group_ranks(group)))
    return CommunicatorPool.create(sorted(set(everywhere)), levels, group)
