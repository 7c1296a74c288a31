"""Compiled dynamic programming: the clocks of one stage where every change has a price."""

from __future__ import annotations

import numpy as np

from kareus_pp.planner._compiled import compiled
from kareus_pp.planner.problem import FloatArray, IntArray


@compiled
def best_runs(value: FloatArray, price: FloatArray, most_runs: int) -> IntArray:
    """Clocks of one stage that minimise value plus the price of every change (Viterbi).

    Args:
        value: Value of every instruction at every clock, shape `(instructions, clocks)`;
            infinite where the instruction has no option at a clock.
        price: Price of a change before every instruction, shape `(instructions,)`.
        most_runs: Most runs of equal clock; 0 for no limit.

    Returns:
        Clock number of every instruction.
    """
    count, clocks = value.shape
    layers = max(1, most_runs)
    best = np.full((layers, clocks), np.inf)
    came_clock = np.zeros((count, layers, clocks), np.int32)
    came_layer = np.zeros((count, layers, clocks), np.int32)
    best[0] = value[0]
    for i in range(1, count):
        new = np.full((layers, clocks), np.inf)
        for layer in range(layers):
            source = layer if most_runs == 0 else layer - 1
            other, other_clock = np.inf, 0
            if source >= 0:
                for clock in range(clocks):
                    if best[source, clock] < other:
                        other, other_clock = best[source, clock], clock
            for clock in range(clocks):
                stay = best[layer, clock]
                if other + price[i] < stay:
                    new[layer, clock] = other + price[i] + value[i, clock]
                    came_clock[i, layer, clock] = other_clock
                    came_layer[i, layer, clock] = source
                else:
                    new[layer, clock] = stay + value[i, clock]
                    came_clock[i, layer, clock] = clock
                    came_layer[i, layer, clock] = layer
        best = new
    layer, clock, least = 0, 0, np.inf
    for k in range(layers):
        for c in range(clocks):
            if best[k, c] < least:
                layer, clock, least = k, c, best[k, c]
    chosen = np.empty(count, np.int64)
    for i in range(count - 1, -1, -1):
        chosen[i] = clock
        if i > 0:
            layer, clock = came_layer[i, layer, clock], came_clock[i, layer, clock]
    return chosen


@compiled
def best_cycle(value: FloatArray, price: FloatArray, most_switches: int) -> tuple[float, IntArray]:
    """As `best_runs`, exactly: the switch from the last clock back to the first counts as well.

    Args:
        value: Value of every instruction at every clock, shape `(instructions, clocks)`;
            infinite where the instruction has no option at a clock.
        price: Price of a change before every instruction, shape `(instructions,)`.
        most_switches: Most changes, round the end of the iteration; negative for no limit.

    Returns:
        The least value, and the clock number of every instruction.
    """
    count, clocks = value.shape
    limited = most_switches >= 0
    layers = most_switches + 1 if limited else 1
    least, chosen = np.inf, np.zeros(count, np.int64)
    best, new = np.empty((layers, clocks)), np.empty((layers, clocks))
    came = np.empty((count, layers, clocks), np.int32)  # the clock before a change; -1: none
    for opening in range(clocks):
        if value[0, opening] == np.inf:
            continue
        best[:] = np.inf
        best[0, opening] = value[0, opening]
        for i in range(1, count):
            for layer in range(layers):
                source = layer - 1 if limited else layer
                other, other_clock = np.inf, 0
                if source >= 0:
                    for clock in range(clocks):
                        if best[source, clock] < other:
                            other, other_clock = best[source, clock], clock
                for clock in range(clocks):
                    if other + price[i] < best[layer, clock]:
                        new[layer, clock] = other + price[i] + value[i, clock]
                        came[i, layer, clock] = other_clock
                    else:
                        new[layer, clock] = best[layer, clock] + value[i, clock]
                        came[i, layer, clock] = -1
            best[:] = new
        for layer in range(layers):
            for clock in range(clocks):
                closing = clock != opening
                if closing and limited and layer >= most_switches:
                    continue
                total = best[layer, clock] + (price[0] if closing else 0.0)
                if total < least:
                    least = total
                    at, now = layer, clock
                    for i in range(count - 1, -1, -1):
                        chosen[i] = now
                        if i > 0 and came[i, at, now] >= 0:
                            now = came[i, at, now]
                            if limited:
                                at -= 1
    return least, chosen
