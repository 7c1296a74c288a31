"""Compiled search where clock switches have a price: runs of equal clock, exact longest paths.

A switch takes effect between the preceding instruction of the stage and the one that wants the
new clock, so its delay lies on that edge and may hide in a wait for another stage.
"""

from __future__ import annotations

import math

import numpy as np

from kareus_pp.planner._compiled import compiled
from kareus_pp.planner.problem import FloatArray, IntArray


@compiled
def switched_starts(
    lowest: int,
    start: FloatArray,
    choice: IntArray,
    delay: float,
    clock: IntArray,
    time: FloatArray,
    held: IntArray,
    previous: IntArray,
    in_ptr: IntArray,
    in_node: IntArray,
    in_lag: FloatArray,
) -> float:
    """Earliest starts with the delay of switches, in place from node `lowest` on.

    Returns:
        End of the last instruction in seconds.
    """
    end = 0.0
    for node in range(len(start)):
        if node >= lowest:
            ready = 0.0
            switches = held[node] >= 0 and clock[choice[node]] != clock[choice[held[node]]]
            if switches and previous[node] < 0:
                ready = delay
            for k in range(in_ptr[node], in_ptr[node + 1]):
                before = in_node[k]
                at = start[before] + time[choice[before]] + in_lag[k]
                if switches and before == previous[node]:
                    at += delay
                if at > ready:
                    ready = at
            start[node] = ready
        finish = start[node] + time[choice[node]]
        if finish > end:
            end = finish
    return end


@compiled
def pushed_starts(
    lowest: int,
    stamp: int,
    latest: float,
    mark: IntArray,
    start: FloatArray,
    moved: IntArray,
    moved_from: FloatArray,
    tail: FloatArray,
    choice: IntArray,
    delay: float,
    clock: IntArray,
    time: FloatArray,
    held: IntArray,
    previous: IntArray,
    in_ptr: IntArray,
    in_node: IntArray,
    in_lag: FloatArray,
    out_ptr: IntArray,
    out_node: IntArray,
) -> tuple[int, bool]:
    """Earliest starts after a change, in place; only what the change reaches is looked at.

    Nodes marked `stamp` may have another start, those marked `stamp + 1` another duration as well.

    Returns:
        How many starts were moved (`moved`, with their values before in `moved_from`), and whether
        the iteration can end by `latest`; where it cannot, the starts are only partly renewed.
    """
    count = 0
    for node in range(lowest, len(start)):
        if mark[node] < stamp:
            continue
        ready = 0.0
        switches = held[node] >= 0 and clock[choice[node]] != clock[choice[held[node]]]
        if switches and previous[node] < 0:
            ready = delay
        for k in range(in_ptr[node], in_ptr[node + 1]):
            before = in_node[k]
            at = start[before] + time[choice[before]] + in_lag[k]
            if switches and before == previous[node]:
                at += delay
            if at > ready:
                ready = at
        if ready != start[node]:
            moved[count] = node
            moved_from[count] = start[node]
            count += 1
            start[node] = ready
        elif mark[node] == stamp:
            continue
        if ready + time[choice[node]] + tail[node] > latest:
            return count, False
        for k in range(out_ptr[node], out_ptr[node + 1]):
            if mark[out_node[k]] < stamp:
                mark[out_node[k]] = stamp
    return count, True


@compiled
def dwell_shortfall(
    end: float,
    dwell: float,
    start: FloatArray,
    choice: IntArray,
    clock: IntArray,
    row_ptr: IntArray,
    row: IntArray,
    held: IntArray,
) -> float:
    """Seconds by which runs of equal clock are shorter than the least dwell, over all stages."""
    missing = 0.0
    for stage in range(len(row_ptr) - 1):
        first, last = -1.0, -1.0
        for k in range(row_ptr[stage], row_ptr[stage + 1]):
            node = row[k]
            if clock[choice[node]] != clock[choice[held[node]]]:
                if last >= 0.0:
                    missing += max(0.0, dwell - (start[node] - last))
                else:
                    first = start[node]
                last = start[node]
        if last > first >= 0.0:
            missing += max(0.0, dwell - (end - last + first))
    return missing


@compiled
def anneal_runs(
    choice: IntArray,
    deadline: float,
    delay: float,
    energy: float,
    most_switches: int,
    dwell: float,
    overrun_w: float,
    hot: float,
    cold: float,
    proposals: int,
    seed: int,
    slot: IntArray,
    slot_clock: IntArray,
    row_ptr: IntArray,
    row: IntArray,
    held: IntArray,
    previous: IntArray,
    stage_of: IntArray,
    in_ptr: IntArray,
    in_node: IntArray,
    in_lag: FloatArray,
    out_ptr: IntArray,
    out_node: IntArray,
    sinks: IntArray,
    tail: FloatArray,
    cls: IntArray,
    ptr: IntArray,
    time: FloatArray,
    cost: FloatArray,
    clock: IntArray,
) -> tuple[float, float, IntArray]:
    """Anneal options by moves on single instructions, boundaries, and whole or split runs.

    Args:
        choice: Positions of the options of every node, in the wide tables; changed in place.
        deadline: End of the iteration in seconds; 0 seeks the shortest iteration.
        delay: Delay of a switch in seconds.
        energy: Energy of a switch in joules.
        most_switches: Most switches of a stage; negative for no limit.
        dwell: Least time between switches of a stage in seconds.
        overrun_w: Penalty in joules for every second past the deadline or short of the dwell.
        hot: Temperature at the beginning, in joules.
        cold: Temperature at the end, in joules.
        proposals: Number of proposals.
        seed: Seed of the proposals.
        slot: Positions of the options of a class at a clock, shape `(classes, clocks, variants)`,
            -1 where there is none.
        slot_clock: Number of the clock of every position.
        row_ptr: Stage `s` has the instructions `row[row_ptr[s]:row_ptr[s + 1]]`, fixed ones left
            out, in order.
        row: Nodes stage by stage.
        held: Node whose clock every node finds, round the end of the iteration; -1 for fixed ones.
        previous: Preceding node on the same stage, -1 at its start.
        stage_of: Stage of every node.
        in_ptr: The graph, as in `Graph`; so are the following up to `cls`.
        in_node: Predecessors.
        in_lag: Latencies from predecessors.
        out_ptr: Positions of successors.
        out_node: Successors.
        sinks: Nodes without successors.
        tail: Least time from the end of every node to the end of the iteration, in seconds.
        cls: Class of each node.
        ptr: Wide option tables, as in `Tables`; so are the following.
        time: Seconds.
        cost: Effective energies.
        clock: MHz.

    Returns:
        Cost in joules (infinite where no choice met deadline and limits), end in seconds, and
        positions of the best choice.
    """
    np.random.seed(seed)
    size = len(choice)
    movable = len(row)
    stages = len(row_ptr) - 1
    clocks, variants = slot.shape[1], slot.shape[2]
    limit = deadline * (1 + 1e-12)
    start = np.zeros(size)
    mark = np.zeros(size, np.int64)
    moved = np.empty(size, np.int64)
    moved_from = np.empty(size)
    end = switched_starts(
        0, start, choice, delay, clock, time, held, previous, in_ptr, in_node, in_lag
    )
    switches = np.zeros(stages, np.int64)
    total = 0.0
    for node in range(size):
        total += cost[choice[node]]
        if held[node] >= 0 and clock[choice[node]] != clock[choice[held[node]]]:
            switches[stage_of[node]] += 1
            total += energy
    short = 0.0
    if dwell > 0.0:
        short = dwell_shortfall(end, dwell, start, choice, clock, row_ptr, row, held)
    best_cost, best_end, best = np.inf, np.inf, choice.copy()
    allowed = True
    for stage in range(stages):
        if 0 <= most_switches < switches[stage]:
            allowed = False
    sought = deadline <= 0.0
    if allowed and (sought or end <= limit) and short <= 1e-12:
        best_cost, best_end = total, end
    nodes = np.empty(size, np.int64)
    old = np.empty(size, np.int64)
    fresh = np.empty(size, np.int64)
    cooling = math.log(cold / hot) / max(1, proposals)
    temperature = hot
    if movable == 0:
        return best_cost, best_end, best
    for proposal in range(proposals):
        if proposal % 64 == 0:
            temperature = hot * math.exp(cooling * proposal)
        at = np.random.randint(movable)
        node = row[at]
        stage = stage_of[node]
        low_row, high_row = row_ptr[stage], row_ptr[stage + 1]
        now = clock[choice[node]]
        kind = np.random.randint(8)
        first, last = at, at
        wanted = -1
        position = -1
        if kind <= 1:
            position = choice[node] + np.random.randint(-3, 4)
            if position < ptr[cls[node]] or position >= ptr[cls[node] + 1]:
                continue
        else:
            if kind >= 4:
                # The run around the node, or its part from the node on, or up to it.
                if kind != 6:
                    while first > low_row and clock[choice[row[first - 1]]] == now:
                        first -= 1
                if kind != 7:
                    while last + 1 < high_row and clock[choice[row[last + 1]]] == now:
                        last += 1
            if kind in (2, 3) or np.random.random() < 0.4:
                # The clock of a neighbouring run.
                if np.random.random() < 0.5:
                    beside = first - 1 if first > low_row else high_row - 1
                else:
                    beside = last + 1 if last + 1 < high_row else low_row
                wanted = slot_clock[choice[row[beside]]]
            else:
                wanted = slot_clock[choice[node]] + np.random.randint(-2, 3)
            if wanted < 0 or wanted >= clocks:
                continue
        variant = 0 if variants == 1 else np.random.randint(variants)
        count = 0
        change = 0.0
        lowest = size
        possible = True
        for k in range(first, last + 1):
            member = row[k]
            new = position
            if position < 0:
                new = slot[cls[member], wanted, variant]
                if new < 0:
                    new = slot[cls[member], wanted, 0]
                if new < 0:
                    possible = False
                    break
            if new != choice[member]:
                nodes[count] = member
                old[count] = choice[member]
                fresh[count] = new
                count += 1
                change += cost[new] - cost[choice[member]]
                if member < lowest:
                    lowest = member
        if not possible or count == 0:
            continue
        before_switches = switches[stage]
        stamp = 2 * proposal + 2
        whole = last - first + 1 == high_row - low_row
        around = 0
        for k in range(first, last + 1 if whole else last + 2):
            member = row[k] if k < high_row else row[low_row]
            if clock[choice[member]] != clock[choice[held[member]]]:
                around -= 1
        for k in range(count):
            choice[nodes[k]] = fresh[k]
        for k in range(first, last + 1 if whole else last + 2):
            member = row[k] if k < high_row else row[low_row]
            mark[member] = stamp
            if member < lowest:
                lowest = member
            if clock[choice[member]] != clock[choice[held[member]]]:
                around += 1
        for k in range(count):
            mark[nodes[k]] = stamp + 1
        change += energy * around
        accept = not (0 <= most_switches < before_switches + around and around > 0)
        new_end, new_short, shifted = end, short, 0
        # Metropolis' threshold first: it says how late the iteration may end.
        allowed_change = -temperature * math.log(1.0 - np.random.random())
        penalty = overrun_w * (max(0.0, end - limit) + short)
        room = allowed_change - change + penalty
        if accept and room >= 0.0:
            shifted, accept = pushed_starts(
                lowest,
                stamp,
                limit + room / overrun_w,
                mark,
                start,
                moved,
                moved_from,
                tail,
                choice,
                delay,
                clock,
                time,
                held,
                previous,
                in_ptr,
                in_node,
                in_lag,
                out_ptr,
                out_node,
            )
            if accept:
                new_end = 0.0
                for k in range(len(sinks)):
                    new_end = max(new_end, start[sinks[k]] + time[choice[sinks[k]]])
                if dwell > 0.0:
                    new_short = dwell_shortfall(
                        new_end, dwell, start, choice, clock, row_ptr, row, held
                    )
                accept = overrun_w * (max(0.0, new_end - limit) + new_short) <= room
        else:
            accept = False
        if not accept:
            for k in range(count):
                choice[nodes[k]] = old[k]
            for k in range(shifted):
                start[moved[k]] = moved_from[k]
            continue
        for k in range(count):
            total += cost[choice[nodes[k]]] - cost[old[k]]
        total += energy * around
        switches[stage] += around
        end, short = new_end, new_short
        better = end < best_end if sought else (end <= limit and total < best_cost - 1e-12)
        if better and short <= 1e-12:
            allowed = True
            for k in range(stages):
                if 0 <= most_switches < switches[k]:
                    allowed = False
            if allowed:
                best_cost, best_end = total, end
                best[:] = choice
    return best_cost, best_end, best
