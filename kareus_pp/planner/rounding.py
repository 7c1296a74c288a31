"""Rounding: from the durations of the relaxation to options, one sweep through the graph."""

from __future__ import annotations

import numpy as np

from kareus_pp.planner._compiled import compiled
from kareus_pp.planner.problem import FloatArray, IntArray


@compiled
def sweep(
    latest_end: FloatArray,
    price: FloatArray,
    keen: float,
    slack: float,
    in_ptr: IntArray,
    in_node: IntArray,
    in_lag: FloatArray,
    cls: IntArray,
    ptr: IntArray,
    time: FloatArray,
    cost: FloatArray,
) -> tuple[FloatArray, IntArray]:
    """Choose options in topological order, each as soon as its predecessors have ended.

    An instruction takes the option of least `cost + keen * price * time` among those that end by
    `latest_end`. What rounding leaves unused passes on to the instructions that follow.

    Args:
        latest_end: Latest end of every node when those after it take the relaxation's durations.
        price: Price of time on every node in joules per second, the relaxation's flow through it.
        keen: Factor on the prices; below 1 longer options are preferred, so slack is used early.
        slack: Numerical tolerance on times, in seconds.
        in_ptr: The graph, as in `Graph`; so are the following up to `cls`.
        in_node: Predecessors.
        in_lag: Latencies from predecessors.
        cls: Class of each node.
        ptr: Option tables, as in `Tables`; so are the following.
        time: Seconds.
        cost: Effective energies.

    Returns:
        Start times and positions of the options.
    """
    size = len(cls)
    start = np.zeros(size)
    choice = np.empty(size, np.int64)
    for node in range(size):
        ready = 0.0
        for k in range(in_ptr[node], in_ptr[node + 1]):
            end = start[in_node[k]] + time[choice[in_node[k]]] + in_lag[k]
            if end > ready:
                ready = end
        start[node] = ready
        room = latest_end[node] - ready + slack
        best = ptr[cls[node]]
        worth = keen * price[node]
        for option in range(best + 1, ptr[cls[node] + 1]):
            if time[option] > room:
                break
            if cost[option] + worth * time[option] <= cost[best] + worth * time[best]:
                best = option
        choice[node] = best
    return start, choice
