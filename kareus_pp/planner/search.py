"""Compiled search: longest paths, and annealing over start times.

The state of the search is a start time for every instruction. What an instruction may take is then
known at once, the time to the earliest successor's start (less latency) or to the deadline, and it
takes the cheapest option that fits. So the cost of a state is a sum of step functions, to move one
start time concerns only an instruction and its predecessors, every state is feasible, and a move
costs constant time, however long the critical path is.
"""

from __future__ import annotations

import math

import numpy as np

from kareus_pp.planner._compiled import compiled
from kareus_pp.planner.problem import FloatArray, IntArray


@compiled
def earliest_starts(
    in_ptr: IntArray, in_node: IntArray, in_lag: FloatArray, duration: FloatArray
) -> FloatArray:
    """Earliest start of every node, in seconds; nodes are in topological order."""
    start = np.zeros(len(duration))
    for node in range(len(duration)):
        best = 0.0
        for k in range(in_ptr[node], in_ptr[node + 1]):
            ready = start[in_node[k]] + duration[in_node[k]] + in_lag[k]
            if ready > best:
                best = ready
        start[node] = best
    return start


@compiled
def latest_starts(
    out_ptr: IntArray,
    out_node: IntArray,
    out_lag: FloatArray,
    duration: FloatArray,
    deadline: float,
) -> FloatArray:
    """Latest start of every node that still meets the deadline, in seconds."""
    start = np.empty(len(duration))
    for node in range(len(duration) - 1, -1, -1):
        best = deadline
        for k in range(out_ptr[node], out_ptr[node + 1]):
            due = start[out_node[k]] - out_lag[k]
            if due < best:
                best = due
        start[node] = best - duration[node]
    return start


@compiled
def fitting(time: FloatArray, first: int, guess: int, end: int, room: float) -> int:
    """Last position in `first..end` whose time is at most `room`, searched from a guess."""
    while guess + 1 < end and time[guess + 1] <= room:
        guess += 1
    while guess > first and time[guess] > room:
        guess -= 1
    return guess


@compiled
def room_end(
    node: int,
    skip: int,
    start: FloatArray,
    deadline: float,
    out_ptr: IntArray,
    out_node: IntArray,
    out_lag: FloatArray,
) -> float:
    """When `node` must have ended, the start of successor `skip` left out of account."""
    end = deadline
    for k in range(out_ptr[node], out_ptr[node + 1]):
        if out_node[k] != skip:
            due = start[out_node[k]] - out_lag[k]
            if due < end:
                end = due
    return end


@compiled
def fit_options(
    start: FloatArray,
    deadline: float,
    slack: float,
    out_ptr: IntArray,
    out_node: IntArray,
    out_lag: FloatArray,
    cls: IntArray,
    ptr: IntArray,
    time: FloatArray,
) -> IntArray:
    """For every node the position of the cheapest option that fits between given start times."""
    choice = np.empty(len(start), np.int64)
    for node in range(len(start)):
        room = room_end(node, -1, start, deadline, out_ptr, out_node, out_lag) - start[node]
        first, end = ptr[cls[node]], ptr[cls[node] + 1]
        choice[node] = fitting(time, first, first, end, room + slack)
    return choice


@compiled
def anneal(
    start: FloatArray,
    choice: IntArray,
    deadline: float,
    slack: float,
    hot: float,
    cold: float,
    proposals: int,
    reach: int,
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
    """Anneal start times in place.

    A proposal puts the start of one node where it, or one of its predecessors, just fits an option
    up to `reach` steps away, and is accepted by Metropolis' rule.

    Args:
        start: Feasible start times, changed in place; seconds.
        choice: Positions of the options that fit them, changed in place.
        deadline: End of the iteration.
        slack: Numerical tolerance on times, in seconds.
        hot: Temperature at the beginning, in joules.
        cold: Temperature at the end, in joules.
        proposals: Number of proposals.
        reach: Most steps between an option and the proposed one.
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
    new_choice = np.empty((in_ptr[1:] - in_ptr[:-1]).max() + 1, np.int64)
    total = 0.0
    cooling = math.log(cold / hot) / max(1, proposals)
    temperature = hot
    block = 1024
    for proposal in range(proposals):
        if proposal % block == 0:
            temperature = hot * math.exp(cooling * proposal)
        node = np.random.randint(size)
        end = room_end(node, -1, start, deadline, out_ptr, out_node, out_lag)
        degree = in_ptr[node + 1] - in_ptr[node]
        pick = np.random.randint(degree + 1)
        step = np.random.randint(-reach, reach + 1)
        if pick == degree:
            first, last = ptr[cls[node]], ptr[cls[node] + 1] - 1
            wanted = min(max(choice[node] + step, first), last)
            place = end - time[wanted]
        else:
            edge = in_ptr[node] + pick
            before = in_node[edge]
            first, last = ptr[cls[before]], ptr[cls[before] + 1] - 1
            wanted = min(max(choice[before] + step, first), last)
            place = start[before] + time[wanted] + in_lag[edge]
        if place < 0.0:
            place = 0.0
        old = start[node]
        if place == old:
            continue
        first, last = ptr[cls[node]], ptr[cls[node] + 1]
        room = end - place + slack
        if room < time[first]:
            continue
        own = fitting(time, first, choice[node], last, room)
        change = cost[own] - cost[choice[node]]
        feasible = True
        start[node] = place
        for k in range(in_ptr[node], in_ptr[node + 1]):
            before = in_node[k]
            due = place - in_lag[k]
            if due - start[before] >= time[choice[before]] and place < old:
                new_choice[k - in_ptr[node]] = choice[before]
                continue
            other = room_end(before, node, start, deadline, out_ptr, out_node, out_lag)
            if other < due:
                due = other
            first, last = ptr[cls[before]], ptr[cls[before] + 1]
            room = due - start[before] + slack
            if room < time[first]:
                feasible = False
                break
            chosen = fitting(time, first, choice[before], last, room)
            new_choice[k - in_ptr[node]] = chosen
            change += cost[chosen] - cost[choice[before]]
        if not feasible or (change > 0.0 and np.random.random() >= math.exp(-change / temperature)):
            start[node] = old
            continue
        choice[node] = own
        for k in range(in_ptr[node], in_ptr[node + 1]):
            choice[in_node[k]] = new_choice[k - in_ptr[node]]
        total += change
    return total
