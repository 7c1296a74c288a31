"""Replay of many plans at once: iteration times and the instructions that determine them."""

from __future__ import annotations

import numpy as np

from kareus_pp.measure.table import Floats, Ints
from kareus_pp.schedule import Schedule, topological_order


class Replay:
    """Longest paths through one schedule, for many plans in one pass."""

    def __init__(self, schedule: Schedule) -> None:
        self._order = topological_order(schedule)
        self._before: list[list[int]] = [[] for _ in schedule.instructions]
        for edge in schedule.edges:
            self._before[edge.after].append(edge.before)
        self._first = np.cumsum([0, *(len(row) for row in schedule.order[:-1])])

    def __call__(self, duration_s: Floats) -> Floats:
        """Iteration time without overhead; `(instructions, plans)` to `(plans,)`."""
        return np.asarray(np.max(self._ends(duration_s), axis=0))

    def critical(self, duration_s: Floats) -> list[Ints]:
        """For each plan the numbers of the instructions on its longest path."""
        ends = self._ends(duration_s)
        paths = []
        for end in ends.T:
            value = end.tolist()
            node = int(np.argmax(end))
            path = [node]
            while self._before[node]:
                node = max(self._before[node], key=value.__getitem__)
                path.append(node)
            paths.append(np.array(path, dtype=np.intp))
        return paths

    def waits(self, duration_s: Floats) -> Floats:
        """Seconds that a stage waits before each instruction; shape as `duration_s`."""
        end = self._ends(duration_s)
        previous = np.concatenate([np.zeros((1, end.shape[1])), end[:-1]])
        previous[self._first[self._first < len(end)]] = 0.0
        return np.asarray(np.maximum(end - duration_s - previous, 0.0))

    def _ends(self, duration_s: Floats) -> Floats:
        end = np.zeros_like(duration_s)
        for node in self._order:
            before = self._before[node]
            if len(before) == 1:
                end[node] = end[before[0]] + duration_s[node]
            elif before:
                end[node] = np.max(end[before], axis=0) + duration_s[node]
            else:
                end[node] = duration_s[node]
        return end
