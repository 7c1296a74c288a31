"""Which overlap settings to measure: whole settings, forward and backward of a microbatch together.

Overlap slows both sides, by an amount that depends on the clock, so that parts measured alone do
not add up (rule 27 of the field rules). A candidate therefore names a launch of every partition,
and is measured as a whole, in ordinary training steps, at several clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kareus_pp.overlap.partitions import Program
from kareus_pp.setting import Launch, OverlapSetting

Candidate = tuple[OverlapSetting, OverlapSetting]
"""Settings of a forward and of the backward of the same microbatch: both split, or neither."""

PLACES = (0.0, 0.5, 1.0)
"""Where in a partition the other nanobatch's collective is launched: its first slot, ..."""


def joint_candidates(
    programs: Sequence[Mapping[str, Program]], levels: Sequence[int], count: int
) -> tuple[Candidate, ...]:
    """Candidates for one rank, none of them sequential, which is always a candidate besides.

    Args:
        programs: For every block what was observed, by phase.
        levels: Numbers of SMs of the communicators; none: the framework's own.
        count: Most candidates.

    Returns:
        Candidates spread over launch places and levels; none where a block was not observed or has
        no partition.
    """
    found: list[Candidate] = []
    for sms in levels or (0,):
        for place in PLACES:
            pair = [_setting(programs, phase, place, sms) for phase in ("forward", "backward")]
            if all(not setting.is_sequential for setting in pair):
                found.append((pair[0], pair[1]))
    found = list(dict.fromkeys(found))
    if len(found) <= count:
        return tuple(found)
    return tuple(found[(2 * n + 1) * len(found) // (2 * count)] for n in range(count))


def _setting(
    programs: Sequence[Mapping[str, Program]], phase: str, place: float, sms: int
) -> OverlapSetting:
    """One launch for every partition that all blocks have, at a slot that all of them have."""
    if not programs or any(phase not in found for found in programs):
        return OverlapSetting()
    kinds = [{p.kind: len(p.slots) for p in found[phase].partitions} for found in programs]
    return OverlapSetting(
        tuple(
            Launch(kind, round(place * (_fewest(kinds, kind) - 1)), sms)
            for kind in kinds[0]
            if all(kind in others for others in kinds)
        )
    )


def _fewest(kinds: Iterable[Mapping[str, int]], kind: str) -> int:
    return min(slots[kind] for slots in kinds)
