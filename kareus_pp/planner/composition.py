"""Composition: the frontier of a microbatch from the frontiers of its partitions.

The partitions of a microbatch (attention, MLP, ...) run one after another at one clock, so at each
clock its frontier is the Minkowski sum of theirs. Folded pairwise and pruned after each fold, it
never grows beyond the points that matter, where the product of all settings would explode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kareus_pp.profile import Option, Origin
from kareus_pp.setting import OverlapSetting, Setting


def compose_partitions(
    partitions: Sequence[Sequence[Option]], counts: Sequence[int] | None = None
) -> tuple[Option, ...]:
    """Options of a microbatch from the options of its partitions.

    At each clock that all partitions have, every undominated combination of their options; launches
    of the partitions are put together, times and energies added, variances added. An option is
    measured only where all its parts are.

    Args:
        partitions: For each partition its options; each launches collectives of its own kind.
        counts: How often each partition occurs in the microbatch, at one and the same option;
            None: once.

    Returns:
        Options by clock, then time; none dominated by another of the same clock.
    """
    times = list(counts) if counts is not None else [1] * len(partitions)
    scaled = [
        [_repeated(option, many) for option in own]
        for own, many in zip(partitions, times, strict=True)
    ]
    by_clock = [_by_clock(own) for own in scaled]
    if not by_clock:
        return ()
    shared = set.intersection(*(set(own) for own in by_clock))
    found: list[Option] = []
    for clock in sorted(shared, key=lambda c: c or 0):
        fronts: list[list[Option]] = [undominated(own[clock]) for own in by_clock]
        total = fronts[0]
        for front in fronts[1:]:
            total = undominated(_joined(a, b) for a in total for b in front)
        found += total
    return tuple(found)


def undominated(options: Iterable[Option]) -> list[Option]:
    """Options that no other beats in time and energy, by time."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.time_s, o.energy_j)):
        if not kept or option.energy_j < kept[-1].energy_j:
            kept.append(option)
    return kept


def _by_clock(options: Iterable[Option]) -> Mapping[int | None, list[Option]]:
    found: dict[int | None, list[Option]] = {}
    for option in options:
        found.setdefault(option.setting.clock_mhz, []).append(option)
    return found


def _repeated(option: Option, many: int) -> Option:
    return Option(
        option.setting,
        option.time_s * many,
        option.energy_j * many,
        # One option's error repeats, it does not average out.
        None if option.time_sd_s is None else option.time_sd_s * many,
        None if option.energy_sd_j is None else option.energy_sd_j * many,
        option.origin,
    )


def _joined(a: Option, b: Option) -> Option:
    measured = a.origin is Origin.MEASURED and b.origin is Origin.MEASURED
    return Option(
        Setting(
            a.setting.clock_mhz,
            OverlapSetting(a.setting.overlap.launches + b.setting.overlap.launches),
        ),
        a.time_s + b.time_s,
        a.energy_j + b.energy_j,
        _root(a.time_sd_s, b.time_sd_s),
        _root(a.energy_sd_j, b.energy_sd_j),
        Origin.MEASURED if measured else Origin.PREDICTED,
    )


def _root(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else float((a * a + b * b) ** 0.5)
