"""Compiled search: moves that push a run of start times, for networks without slack.

Where every path is critical, no single start time can move without a loss on both sides. A push
makes one instruction slower and passes the delay on along its successors until instructions on
every path absorb it by taking a faster option; predecessors that find more room take slower ones.
"""

from __future__ import annotations

import math

import numpy as np

from kareus_pp.planner._compiled import compiled
from kareus_pp.planner.problem import FloatArray, IntArray
from kareus_pp.planner.search import fitting, room_end


@compiled
def push(
    start: FloatArray,
    choice: IntArray,
    deadline: float,
    slack: float,
    hot: float,
    cold: float,
    proposals: int,
    absorb: float,
    longest: int,
    seed: int,
    in_ptr: IntArray,
    in_node: IntArray,
    in_lag: FloatArray,
    out_ptr: IntArray,
    out_node: IntArray,
    out_lag: FloatArray,
    cls: IntArray,
    ptr: IntArray,
    time: FloatArray,
    cost: FloatArray,
) -> float:
    """Anneal start times in place by pushes; arguments and result as in `search.anneal`.

    Args:
        start: Feasible start times, changed in place; seconds.
        choice: Positions of the options that fit them, changed in place.
        deadline: End of the iteration.
        slack: Numerical tolerance on times, in seconds.
        hot: Temperature at the beginning, in joules.
        cold: Temperature at the end, in joules.
        proposals: Number of proposals.
        absorb: Probability that a pushed instruction that can absorb the delay does so.
        longest: Most instructions that a push may move.
        seed: Seed of the proposals.
        in_ptr: The graph, as in `Graph`; so are the following up to `cls`.
        in_node: Predecessors.
        in_lag: Latencies from predecessors.
        out_ptr: Positions of successors.
        out_node: Successors.
        out_lag: Latencies to successors.
        cls: Class of each node.
        ptr: Option tables, as in `Tables`; so are the following.
        time: Seconds.
        cost: Effective energies.

    Returns:
        Change of the sum of costs, in joules.
    """
    np.random.seed(seed)
    size = len(start)
    mark = np.zeros(size, np.int64)  # proposal in which a node was queued
    seen = np.zeros(size, np.int64)  # proposal in which a node's option was looked at
    moved = np.empty(longest, np.int64)
    old_start = np.empty(longest)
    degree = (in_ptr[1:] - in_ptr[:-1]).max()
    room_for = (degree + 1) * (longest + 1)
    changed = np.empty(room_for, np.int64)
    old_choice = np.empty(room_for, np.int64)
    total = 0.0
    cooling = math.log(cold / hot) / max(1, proposals)
    temperature = hot
    for proposal in range(1, proposals + 1):
        if proposal % 256 == 1:
            temperature = hot * math.exp(cooling * proposal)
        first_node = np.random.randint(size)
        now = choice[first_node]
        if now + 1 >= ptr[cls[first_node] + 1]:
            continue
        extra = 1
        if now + 2 < ptr[cls[first_node] + 1] and np.random.random() < 0.25:
            extra = 2
        # Queue of nodes to move, kept sorted by number, so that all pushes on a node are known.
        count, done = 0, 0
        end = start[first_node] + time[now + extra]
        if end > deadline + slack:
            continue
        feasible = True
        node = first_node
        while True:
            # Push the successors that `node`, ending at `end`, would overlap.
            for k in range(out_ptr[node], out_ptr[node + 1]):
                after = out_node[k]
                ready = end + out_lag[k]
                if ready <= start[after] + slack:
                    continue
                if mark[after] != proposal:
                    if count >= longest:
                        feasible = False
                        break
                    mark[after] = proposal
                    place = count
                    while place > done and moved[place - 1] > after:
                        moved[place] = moved[place - 1]
                        old_start[place] = old_start[place - 1]
                        place -= 1
                    moved[place] = after
                    old_start[place] = start[after]
                    count += 1
                start[after] = ready
            if not feasible or done == count:
                break
            node = moved[done]
            done += 1
            first = ptr[cls[node]]
            room = (
                room_end(node, -1, start, deadline, out_ptr, out_node, out_lag)
                - start[node]
                + slack
            )
            keep = time[choice[node]]
            if room < keep and (room < time[first] or np.random.random() >= absorb):
                # Passes the delay on, at its own option or one step faster.
                if choice[node] > first and np.random.random() < 0.3:
                    keep = time[choice[node] - 1]
                end = start[node] + keep
                if end > deadline + slack:
                    feasible = False
                    break
            else:
                end = -1e300
        if not feasible:
            for k in range(count):
                start[moved[k]] = old_start[k]
            continue
        change = 0.0
        affected = 0
        for k in range(-1, count):
            node = first_node if k < 0 else moved[k]
            low, high = (0, 0) if k < 0 else (in_ptr[node], in_ptr[node + 1])
            for j in range(low - 1, high):
                member = node if j < low else in_node[j]
                if seen[member] == proposal:
                    continue
                seen[member] = proposal
                first, last = ptr[cls[member]], ptr[cls[member] + 1]
                room = (
                    room_end(member, -1, start, deadline, out_ptr, out_node, out_lag)
                    - start[member]
                    + slack
                )
                if room < time[first]:
                    feasible = False
                    break
                chosen = fitting(time, first, choice[member], last, room)
                if chosen != choice[member]:
                    changed[affected] = member
                    old_choice[affected] = choice[member]
                    affected += 1
                    change += cost[chosen] - cost[choice[member]]
                    choice[member] = chosen
            if not feasible:
                break
        if not feasible or (change > 0.0 and np.random.random() >= math.exp(-change / temperature)):
            for k in range(count):
                start[moved[k]] = old_start[k]
            for k in range(affected):
                choice[changed[k]] = old_choice[k]
            continue
        total += change
    return total


@compiled
def reverse_starts(
    start: FloatArray,
    deadline: float,
    out_ptr: IntArray,
    out_node: IntArray,
    out_lag: FloatArray,
) -> FloatArray:
    """Start times of the reversed graph, in its numbering, that leave everyone the same room."""
    size = len(start)
    mirrored = np.empty(size)
    for node in range(size):
        end = room_end(node, -1, start, deadline, out_ptr, out_node, out_lag)
        mirrored[size - 1 - node] = deadline - end
    return mirrored
