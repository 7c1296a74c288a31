"""Which overlap settings the profile phase runs next, and at which clocks.

Every plan has one candidate on all microbatches of a stage, so that its energy shows in the energy
of whole iterations, and each candidate is run at clocks far apart, because its gain depends on the
clock (rule 27 of the field rules).
"""

from __future__ import annotations

from collections.abc import Sequence

from kareus_pp.plan import Settings
from kareus_pp.schedule import Kind, Schedule
from kareus_pp.setting import OverlapSetting, Setting

Candidates = Sequence[Sequence[tuple[OverlapSetting, OverlapSetting]]]
"""For every stage the candidates, each a forward's and a backward's setting."""


def overlap_plan(
    schedule: Schedule, grid_mhz: Sequence[int], candidates: Candidates, done: int
) -> Settings | None:
    """The next plan that overlaps: every candidate at the highest clock, then lowest, then middle.

    Args:
        schedule: The schedule.
        grid_mhz: Clocks that plans use, ascending.
        candidates: Candidates of every stage; a stage without any stays sequential.
        done: Number of plans that overlapped so far.

    Returns:
        The plan; None where every candidate has been run at every one of these clocks.
    """
    count = max(map(len, candidates), default=0)
    clocks = list(dict.fromkeys((grid_mhz[-1], grid_mhz[0], grid_mhz[len(grid_mhz) // 2])))
    if not count or done >= count * len(clocks):
        return None
    clock = clocks[done // count]
    rows = []
    for order, own in zip(schedule.order, candidates, strict=True):
        forward, backward = own[done % count % len(own)] if own else (OverlapSetting(),) * 2
        overlap = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
        rows.append(
            tuple(
                Setting()
                if instruction.kind.is_fixed
                else Setting(clock, overlap.get(instruction.kind, OverlapSetting()))
                for instruction in order
            )
        )
    return tuple(rows)


def overlaps(settings: Settings) -> bool:
    """Whether a plan overlaps anything."""
    return any(not setting.overlap.is_sequential for row in settings for setting in row)
