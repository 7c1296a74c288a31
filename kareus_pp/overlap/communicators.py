"""Communicators that limit how many SMs a collective may take.

NCCL limits SMs per communicator, not per call (rule 26 of the field rules): one more communicator
over the same ranks for every level. `max_ctas` is an upper bound, and some kernels ignore it; what
was launched is read from a trace with `launched_grids`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from kareus_pp.errors import OverlapError

MakeGroup = Callable[[list[int], int], Any]


class CommunicatorPool:
    """The communicators of tensor-parallel groups, one per level of SMs.

    Attributes:
        levels: Numbers of SMs for which there are communicators, ascending.
        limits_sms: True where the communicators limit SMs; False where the backend cannot.
    """

    def __init__(self) -> None:
        self.levels: tuple[int, ...] = ()
        self.limits_sms = False
        self._members: dict[int, dict[int, ProcessGroup]] = {}

    @classmethod
    def create(
        cls,
        groups: Iterable[Sequence[int]],
        levels: Sequence[int],
        own: ProcessGroup,
        make: MakeGroup | None = None,
    ) -> CommunicatorPool:
        """Make the communicators; a collective call of all ranks of the job, in the same order.

        Args:
            groups: Global ranks of every tensor-parallel group of the job, in the same order on
                every rank.
            levels: Numbers of SMs; three or four, because every communicator costs GPU memory.
            own: The tensor-parallel group of this rank.
            make: Makes one group of ranks and a number of SMs; none: as the backend needs it.

        Raises:
            OverlapError: A level is not a positive number.
        """
        pool = cls()
        pool.levels = checked_levels(levels)
        pool.limits_sms = dist.get_backend(own) == "nccl"
        if make is None:
            make = _make_nccl_group if pool.limits_sms else _make_plain_group
        rank = dist.get_rank()
        members: dict[int, ProcessGroup] = {}
        for ranks in groups:
            for level in pool.levels:
                group = make(list(ranks), level)
                if rank in ranks:
                    members[level] = group
        pool._members[id(own)] = members
        for group in members.values():
            _warm_up(group)
        return pool

    def select(self, group: ProcessGroup, sms: int) -> ProcessGroup:
        """The communicator for a number of SMs: the largest level not above it.

        Args:
            group: The tensor-parallel group that the framework named.
            sms: Number of SMs; 0, or fewer than the lowest level, means the framework's own.
        """
        members = self._members.get(id(group))
        place = bisect_right(self.levels, sms)
        if not members or place == 0:
            return group
        return members[self.levels[place - 1]]

    def close(self) -> None:
        """Give the communicators back."""
        for members in self._members.values():
            for group in members.values():
                if dist.is_initialized():
                    dist.destroy_process_group(group)
        self._members.clear()
        self.levels = ()


def checked_levels(levels: object) -> tuple[int, ...]:
    """Levels of SMs in ascending order.

    Raises:
        OverlapError: They are no sequence of positive whole numbers.
    """
    if (
        not isinstance(levels, Sequence)
        or isinstance(levels, str)
        or not all(type(level) is int and level > 0 for level in levels)
    ):
        raise OverlapError(
            f"the communicator levels {levels!r} must be positive whole numbers of SMs, "
            f"as in (4, 8, 16)"
        )
    return tuple(sorted(set(levels)))


def _make_plain_group(ranks: list[int], sms: int) -> Any:
    return dist.new_group(ranks)


def _make_nccl_group(ranks: list[int], sms: int) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas = sms
    options.config.max_ctas = sms
    if hasattr(options.config, "split_share"):
        # Shares the parent's buffers, which are most of a communicator's memory.
        options.config.split_share = 1
    return dist.new_group(ranks, pg_options=options)


def _warm_up(group: ProcessGroup) -> None:
    """Connect now; the first collective of a communicator connects, for seconds."""
    device = torch.device("cuda", torch.cuda.current_device()) if _is_nccl(group) else "cpu"
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _is_nccl(group: ProcessGroup) -> bool:
    return bool(dist.get_backend(group) == "nccl")


def launched_grids(trace: Mapping[str, Any]) -> dict[str, set[int]]:
    """Number of thread blocks with which NCCL kernels were launched.

    Args:
        trace: A Chrome trace as `torch.profiler.profile.export_chrome_trace` writes it.

    Returns:
        For every NCCL kernel name the numbers of blocks that were seen. A setting whose number is
        not among them was not held and must not be planned with.
    """
    grids: dict[str, set[int]] = {}
    for event in trace.get("traceEvents", ()):
        name = str(event.get("name", ""))
        grid = (event.get("args") or {}).get("grid")
        if event.get("cat") == "kernel" and name.startswith("nccl") and grid:
            blocks = int(grid[0]) * int(grid[1]) * int(grid[2])
            grids.setdefault(name, set()).add(blocks)
    return grids


def check_grids(trace: Mapping[str, Any], sms: int) -> None:
    """Check that no NCCL kernel of a trace took more SMs than a setting allowed.

    Raises:
        OverlapError: A kernel did; the message names it. Do not trust the setting.
    """
    for name, blocks in sorted(launched_grids(trace).items()):
        if max(blocks) > sms:
            raise OverlapError(
                f"the NCCL kernel {name!r} was launched with {max(blocks)} thread blocks where "
                f"{sms} were allowed; the communicator's limit was not held, so leave this number "
                f"of SMs out"
            )
