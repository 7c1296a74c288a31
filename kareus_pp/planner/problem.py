"""The planning problem as arrays: the dependency graph and the options of every instruction."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kareus_pp.errors import ConfigError, ProfileError
from kareus_pp.evaluate import SwitchPrice
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.profile import Option, Profile
from kareus_pp.schedule import Instruction, InstructionClass, Schedule, topological_order
from kareus_pp.setting import DEFAULT_SETTING

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Place = tuple[int, int, int]
"""Stage, chunk and microbatch: a forward and its backward."""


@dataclass(frozen=True)
class Graph:
    """The dependency graph; nodes are renumbered so that every edge goes from low to high.

    Attributes:
        node: Number of each node in `schedule.instructions`.
        stage: Stage of each node.
        cls: Class number of each node; split and whole microbatches of a class have their own.
        previous: Preceding node on the same stage, -1 at its start.
        following: Next node on the same stage, -1 at its end.
        in_ptr, in_node, in_lag: Predecessors of node `i` are
            `in_node[in_ptr[i]:in_ptr[i + 1]]`, with the latency of the edge in seconds.
        out_ptr, out_node, out_lag: The same for successors.
    """

    node: IntArray
    stage: IntArray
    cls: IntArray
    previous: IntArray
    following: IntArray
    in_ptr: IntArray
    in_node: IntArray
    in_lag: FloatArray
    out_ptr: IntArray
    out_node: IntArray
    out_lag: FloatArray

    @property
    def size(self) -> int:
        """Number of instructions."""
        return len(self.node)

    @cached_property
    def incoming(self) -> tuple[IntArray, IntArray, FloatArray]:
        """The arrays of predecessors, as compiled functions take them."""
        return self.in_ptr, self.in_node, self.in_lag

    @cached_property
    def outgoing(self) -> tuple[IntArray, IntArray, FloatArray]:
        """The arrays of successors, as compiled functions take them."""
        return self.out_ptr, self.out_node, self.out_lag

    @cached_property
    def reversed(self) -> Graph:
        """The graph with every edge turned round; node `i` becomes `size - 1 - i`."""
        return Graph(
            self.node[::-1].copy(),
            self.stage[::-1].copy(),
            self.cls[::-1].copy(),
            _mirrored(self.following),
            _mirrored(self.previous),
            *_reversed_lists(*self.outgoing),
            *_reversed_lists(*self.incoming),
        )


@dataclass(frozen=True)
class Tables:
    """Options of every class, one class after another, each sorted by time.

    `time`, `cost`, `clock` and `option` hold the Pareto set: times rise and effective energies
    fall strictly. `hull` marks the vertices of its lower convex hull. `wide_*` hold the options

    not dominated at their own clock: where switches have a price, holding a clock may be worth it.

    Attributes:
        ptr: Class `k` has positions `ptr[k]` to `ptr[k + 1]`.
        time: Seconds.
        cost: Effective energy `e - P t` in joules.
        clock: MHz; 0 for the default clock, -1 for fixed instructions (they keep what they find).
        hull: True for vertices of the lower hull.
        option: Position among the class's options in `options`.
        wide_ptr, wide_time, wide_cost, wide_clock, wide_option: The same for the wide set.
    """

    ptr: IntArray
    time: FloatArray
    cost: FloatArray
    clock: IntArray
    hull: NDArray[np.bool_]
    option: IntArray
    wide_ptr: IntArray
    wide_time: FloatArray
    wide_cost: FloatArray
    wide_clock: IntArray
    wide_option: IntArray


@dataclass(frozen=True)
class Problem:
    """Everything that the methods need; times exclude `overhead_s` unless named otherwise.

    Attributes:
        schedule: The schedule.
        profile: The profile.
        graph: The dependency graph.
        tables: The options as arrays.
        options: For each class number its usable options, in the profile's order.
        static_w: Blocking power of all stages together.
        overhead_s: Time of every iteration outside the graph.
        switch: Price of one clock switch.
    """

    schedule: Schedule
    profile: Profile
    graph: Graph
    tables: Tables
    options: tuple[tuple[Option, ...], ...]
    static_w: float
    overhead_s: float
    switch: SwitchPrice

    @cached_property
    def fastest_s(self) -> FloatArray:
        """Shortest duration of every node."""
        return self.tables.time[self.tables.ptr[:-1]][self.graph.cls]

    @cached_property
    def slowest_s(self) -> FloatArray:
        """Duration of every node at its least effective energy."""
        return self.tables.time[self.tables.ptr[1:] - 1][self.graph.cls]

    def energy_j(self, cost_j: float, time_s: float) -> float:
        """Total energy from a sum of effective energies and an iteration time with overhead."""
        return cost_j + self.static_w * time_s


def place_of(instruction: Instruction) -> Place:
    """The forward and backward that an instruction belongs to."""
    return instruction.stage, instruction.chunk, instruction.microbatch


def build_problem(
    schedule: Schedule,
    profile: Profile,
    options: PlannerOptions,
    split: Collection[Place] | None = None,
) -> Problem:
    """Look up every class of the schedule and lay the problem out as arrays.

    Args:
        schedule: The schedule.
        profile: Options of every class in it.
        options: Which clocks are allowed.
        split: The microbatches that are split into nanobatches, and have only options that
            overlap; all others have only those that do not. None: every instruction has both.

    Raises:
        ConfigError: Clocks are given for a stage that is not there.
        ProfileError: A class, or the blocking power of a stage, is missing; a number is not
            finite or negative; or no profiled option of a class has an allowed clock.
    """
    if profile.stages != schedule.stages:
        raise ProfileError(
            f"the profile knows the blocking power of {profile.stages} stages and the schedule "
            f"has {schedule.stages}; profile this pipeline, or give one power for each stage"
        )
    unknown = [stage for stage in options.stage_clocks_mhz if stage >= schedule.stages]
    if unknown:
        raise ConfigError(
            f"clocks are given for stage {unknown[0]} and the schedule has stages 0 to "
            f"{schedule.stages - 1}; name one of these"
        )
    power = profile.blocking_power_w[: schedule.stages]
    for stage, watts in enumerate(power):
        if not (math.isfinite(watts) and watts >= 0):
            raise ProfileError(
                f"the blocking power of stage {stage} is {watts!r} W and must be finite and not "
                f"negative; measure it again"
            )
    keys = [
        (
            schedule.class_of(instruction),
            None if split is None or instruction.kind.is_fixed else place_of(instruction) in split,
        )
        for instruction in schedule.instructions
    ]
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    usable = tuple(usable_options(cls, profile, options, is_split) for cls, is_split in number)
    classes = np.array([number[key] for key in keys], dtype=np.int64)
    return Problem(
        schedule=schedule,
        profile=profile,
        graph=_build_graph(schedule, classes, profile.overhead.p2p_s),
        tables=_build_tables([cls for cls, _ in number], usable, power),
        options=usable,
        static_w=float(sum(profile.blocking_power_w)),
        overhead_s=profile.overhead.iteration_s,
        switch=options.switch_price(profile),
    )


def usable_options(
    cls: InstructionClass,
    profile: Profile,
    options: PlannerOptions,
    is_split: bool | None = None,
) -> tuple[Option, ...]:
    """The options of a class that may be planned with.

    Args:
        cls: The class.
        profile: The profile.
        options: Which clocks are allowed.
        is_split: Only those that overlap, or only those that do not; None: both.

    Raises:
        ProfileError: There are none, or one has a number that is not finite or negative.
    """
    if cls.kind.is_fixed:
        found: tuple[Option, ...] = (profile.option(cls, DEFAULT_SETTING),)
    else:
        found = profile.options_of(cls)
        allowed = options.allowed_clocks(cls.stage)
        if allowed is not None:
            kept = tuple(o for o in found if o.setting.clock_mhz in allowed)
            if found and not kept:
                raise ProfileError(
                    f"no option of instruction class {cls} has one of the allowed clocks "
                    f"{sorted(allowed)[:8]} MHz; allow one of "
                    f"{sorted({o.setting.clock_mhz or 0 for o in found})[:8]}"
                )
            found = kept
    if is_split is not None:
        kept = tuple(o for o in found if o.setting.overlap.is_sequential is not is_split)
        if found and not kept:
            raise ProfileError(
                f"instruction class {cls} has no option that "
                f"{'overlaps' if is_split else 'does not overlap, which is always one to weigh'}; "
                f"profile this schedule"
            )
        found = kept
    if not found:
        raise ProfileError(
            f"the profile has an empty list of options for instruction class {cls}; "
            f"profile this schedule"
        )
    for option in found:
        if not (math.isfinite(option.time_s) and math.isfinite(option.energy_j)):
            raise ProfileError(
                f"option {option.setting} of instruction class {cls} has time "
                f"{option.time_s!r} s and energy {option.energy_j!r} J, which must be finite; "
                f"remove or measure it again"
            )
        if option.time_s < 0:
            raise ProfileError(
                f"option {option.setting} of instruction class {cls} has the negative time "
                f"{option.time_s!r} s; remove or measure it again"
            )
    return found


def _build_graph(schedule: Schedule, cls: IntArray, p2p_s: float) -> Graph:
    order = np.array(topological_order(schedule), dtype=np.int64)
    size = len(order)
    rank = np.empty(size, dtype=np.int64)
    rank[order] = np.arange(size)
    before = rank[np.array([e.before for e in schedule.edges], dtype=np.int64)]
    after = rank[np.array([e.after for e in schedule.edges], dtype=np.int64)]
    crosses = np.array([e.crosses_stages for e in schedule.edges], dtype=bool)
    lag = np.where(crosses, p2p_s, 0.0)
    stage = np.array(schedule.stage_of, dtype=np.int64)
    previous, following = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    first = 0
    for row in schedule.order:
        nodes = rank[first : first + len(row)]
        previous[nodes[1:]] = nodes[:-1]
        following[nodes[:-1]] = nodes[1:]
        first += len(row)
    in_ptr, by_after = grouped(after, size)
    out_ptr, by_before = grouped(before, size)
    return Graph(
        order,
        stage[order],
        cls[order],
        previous,
        following,
        in_ptr,
        before[by_after],
        lag[by_after],
        out_ptr,
        after[by_before],
        lag[by_before],
    )


def _mirrored(neighbour: IntArray) -> IntArray:
    turned = neighbour[::-1]
    return np.where(turned < 0, -1, len(turned) - 1 - turned)


def _reversed_lists(
    ptr: IntArray, node: IntArray, lag: FloatArray
) -> tuple[IntArray, IntArray, FloatArray]:
    # Lists of the last node come first; within each list the order is turned round too.
    return len(node) - ptr[::-1], len(ptr) - 2 - node[::-1], lag[::-1].copy()


def grouped(key: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """Edges sorted by their node: where the list of each node begins, and the order."""
    ptr = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(key, minlength=size), out=ptr[1:])
    return ptr, np.argsort(key, kind="stable").astype(np.int64)


def _build_tables(
    classes: Sequence[InstructionClass],
    options: tuple[tuple[Option, ...], ...],
    power: tuple[float, ...],
) -> Tables:
    ptr, wide_ptr = [0], [0]
    kept_parts, hull_parts, wide_parts = [], [], []
    for cls, own in zip(classes, options, strict=True):
        time = np.array([o.time_s for o in own])
        cost = np.array([o.energy_j for o in own]) - power[cls.stage] * time
        clock = np.array(
            [-1 if cls.kind.is_fixed else (o.setting.clock_mhz or 0) for o in own], np.int64
        )
        by_time = np.lexsort((cost, time))
        kept = by_time[pareto(cost[by_time])]
        kept_parts.append((time[kept], cost[kept], clock[kept], kept))
        hull = np.zeros(len(kept), bool)
        hull[lower_hull(time[kept], cost[kept])] = True
        hull_parts.append(hull)
        wide = by_time[pareto_by_clock(cost[by_time], clock[by_time])]
        wide_parts.append((time[wide], cost[wide], clock[wide], wide))
        ptr.append(ptr[-1] + len(kept))
        wide_ptr.append(wide_ptr[-1] + len(wide))
    narrow = [np.concatenate(parts) for parts in zip(*kept_parts, strict=True)]
    all_wide = [np.concatenate(parts) for parts in zip(*wide_parts, strict=True)]
    return Tables(
        np.array(ptr, np.int64),
        narrow[0],
        narrow[1],
        narrow[2],
        np.concatenate(hull_parts),
        narrow[3],
        np.array(wide_ptr, np.int64),
        *all_wide,
    )


def pareto(cost: FloatArray) -> IntArray:
    """Positions of the Pareto set of points that are sorted by time, then cost."""
    return pareto_by_clock(cost, np.zeros(len(cost), np.int64))


def pareto_by_clock(cost: FloatArray, clock: IntArray) -> IntArray:
    """Positions of the points that no other point of the same clock dominates."""
    best: dict[int, float] = {}
    kept = []
    for position, (value, held) in enumerate(zip(cost.tolist(), clock.tolist(), strict=True)):
        if value < best.get(held, math.inf):
            kept.append(position)
            best[held] = value
    return np.array(kept, np.int64)


def lower_hull(time: FloatArray, cost: FloatArray) -> IntArray:
    """Positions of the lower convex hull of a Pareto set (Andrew's monotone chain)."""
    hull: list[int] = []
    for new in range(len(time)):
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            turn = (time[b] - time[a]) * (cost[new] - cost[a]) - (cost[b] - cost[a]) * (
                time[new] - time[a]
            )
            if turn > 0:
                break
            hull.pop()
        hull.append(new)
    return np.array(hull, np.int64)
