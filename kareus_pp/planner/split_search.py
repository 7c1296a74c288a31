"""Search for the microbatches to split: annealing over start times, forward and backward as one.

As in `kareus_pp.planner.search` the state is a start time for every instruction, which says what
room each has. A microbatch on a stage takes what is cheapest for its forward and its backward
together: both whole, or both split. So a move of one start time may split a microbatch or join it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from kareus_pp.evaluate import evaluate
from kareus_pp.plan import Settings
from kareus_pp.planner._compiled import compiled
from kareus_pp.planner.options import PlannerOptions
from kareus_pp.planner.problem import FloatArray, IntArray, Place, build_problem, place_of
from kareus_pp.planner.search import fitting, room_end
from kareus_pp.profile import Profile
from kareus_pp.schedule import Schedule

PROPOSALS = 4000
"""For every instruction and try; fewer where time is short."""
TRIES = 10
PROPOSAL_S = 2e-6
# Temperatures in units of the mean energy between neighbouring options.
HOT, COLD = 1.0, 0.01


class SplitSearch:
    """Improves which microbatches are split, for one schedule and profile.

    Args:
        schedule: The schedule.
        profile: Options of every class in it.
        options: Which clocks are allowed, and the seed.
        places: The microbatches that can be split.
    """

    def __init__(
        self,
        schedule: Schedule,
        profile: Profile,
        options: PlannerOptions,
        places: Collection[Place],
    ) -> None:
        self._schedule, self._profile, self._seed = schedule, profile, options.seed
        whole = build_problem(schedule, profile, options, frozenset())
        split = build_problem(schedule, profile, options, frozenset(places))
        graph = self._graph = whole.graph
        self._overhead_s = whole.overhead_s
        count, end = len(whole.tables.ptr) - 1, whole.tables.ptr[-1]
        # Classes of whole microbatches, then those of split ones; a row of numbers for each.
        self._cls = np.stack([graph.cls, split.graph.cls + count])
        self._ptr = np.concatenate([whole.tables.ptr, end + split.tables.ptr[1:]])
        self._time = np.concatenate([whole.tables.time, split.tables.time])
        self._cost = np.concatenate([whole.tables.cost, split.tables.cost])
        self._place = [place_of(schedule.instructions[node]) for node in graph.node.tolist()]
        self._mate = np.full(graph.size, -1, np.int64)
        first: dict[Place, int] = {}
        for node, place in enumerate(self._place):
            fixed = schedule.instructions[graph.node[node]].kind.is_fixed
            if place in places and not fixed:
                other = first.setdefault(place, node)
                if other != node:
                    self._mate[node], self._mate[other] = other, node

    def improved(
        self, settings: Settings, deadline_s: float, seconds: float, number: int
    ) -> frozenset[Place]:
        """The microbatches that are split after annealing from a plan.

        Args:
            settings: The plan's settings, consistent.
            deadline_s: Deadline, overhead included; the plan meets it.
            seconds: Time to take at most, about.
            number: Number of the try; another one draws other numbers.
        """
        found = evaluate(self._schedule, settings, self._profile)
        graph = self._graph
        start = found.start_s[graph.node]
        family = np.zeros(graph.size, np.int64)
        flat = [setting for row in settings for setting in row]
        for node, own in enumerate(graph.node.tolist()):
            if self._mate[node] >= 0 and not flat[own].overlap.is_sequential:
                family[node] = 1
        # On the smoothed profile the plan may end a little later.
        deadline = max(found.time_s, deadline_s) - self._overhead_s
        steps = (self._ptr[1:] - self._ptr[:-1] - 1).clip(1)
        spread = self._cost[self._ptr[:-1]] - self._cost[self._ptr[1:] - 1]
        # Between families too: with one clock only they differ at all.
        between = np.abs(self._cost[self._ptr[self._cls[0]]] - self._cost[self._ptr[self._cls[1]]])
        step_j = max(float((spread / steps).mean()), float(between.mean())) or 1.0
        graph_lists = (*graph.incoming, *graph.outgoing)
        tables = (self._mate, self._cls, self._ptr, self._time, self._cost)
        sweep_s = PROPOSAL_S * graph.size
        proposals = graph.size * int(min(PROPOSALS, seconds / sweep_s))
        tries = max(1, min(TRIES, int(seconds / (PROPOSALS * sweep_s))))
        best = (math.inf, family)
        for try_ in range(tries):
            tried = family.copy()
            seed = self._seed + 7919 * number + 104_729 * try_
            gained = anneal_split(
                start.copy(),
                tried,
                deadline,
                1e-12 * deadline,
                HOT * step_j,
                COLD * step_j,
                proposals,
                3,
                seed,
                *graph_lists,
                *tables,
            )
            best = min(best, (gained, tried), key=lambda pair: pair[0])
        return frozenset(self._place[node] for node in np.flatnonzero(best[1]).tolist())


@compiled
def anneal_split(
    start: FloatArray,
    family: IntArray,
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
    mate: IntArray,
    cls: IntArray,
    ptr: IntArray,
    time: FloatArray,
    cost: FloatArray,
) -> float:
    """Anneal start times in place; the cheapest family of the best state is left in `family`.

    A proposal puts the start of one node where it, or one of its predecessors, just fits an option
    of either family up to `reach` steps from where its own family's option stands.

    Args:
        start: Feasible start times, changed in place; seconds.
        family: For every node 1 where its microbatch is split, else 0; changed in place.
        deadline: End of the iteration.
        slack: Numerical tolerance on times, in seconds.
        hot: Temperature at the beginning, in joules.
        cold: Temperature at the end, in joules.
        proposals: Number of proposals.
        reach: Most steps between an option and the proposed one.
        seed: Seed of the proposals.
        in_ptr: The graph, as in `Graph`; so are the following up to `out_lag`.
        in_node: Predecessors.
        in_lag: Latencies from predecessors.
        out_ptr: Positions of successors.
        out_node: Successors.
        out_lag: Latencies to successors.
        mate: The other instruction of the same microbatch; -1 where it cannot be split.
        cls: Class of each node, shape `(2, nodes)`: whole, and split.
        ptr: Option tables, as in `Tables`; so are the following.
        time: Seconds.
        cost: Effective energies.

    Returns:
        Change of the sum of costs from the first state to the best, in joules.
    """
    np.random.seed(seed)
    size = len(start)
    choice = np.empty(size, np.int64)
    for node in range(size):
        room = room_end(node, -1, start, deadline, out_ptr, out_node, out_lag) - start[node]
        first, end = ptr[cls[family[node], node]], ptr[cls[family[node], node] + 1]
        choice[node] = fitting(time, first, first, end, room + slack)
    most = 2 * ((in_ptr[1:] - in_ptr[:-1]).max() + 1)
    touched = np.empty(most, np.int64)
    old_choice = np.empty(most, np.int64)
    old_family = np.empty(most, np.int64)
    best_family = family.copy()
    total, best_total = 0.0, 0.0
    cooling = math.log(cold / hot) / max(1, proposals)
    temperature = hot
    for proposal in range(proposals):
        if proposal % 1024 == 0:
            temperature = hot * math.exp(cooling * proposal)
        node = np.random.randint(size)
        degree = in_ptr[node + 1] - in_ptr[node]
        pick = np.random.randint(degree + 1)
        step = np.random.randint(-reach, reach + 1)
        aimed = node if pick == degree else in_node[in_ptr[node] + pick]
        wanted_family = family[aimed]
        if mate[aimed] >= 0 and np.random.random() < 0.5:
            wanted_family = 1 - wanted_family
        stands = choice[aimed] - ptr[cls[family[aimed], aimed]] + step
        first, last = ptr[cls[wanted_family, aimed]], ptr[cls[wanted_family, aimed] + 1] - 1
        wanted = min(max(first + stands, first), last)
        if pick == degree:
            place = room_end(node, -1, start, deadline, out_ptr, out_node, out_lag) - time[wanted]
        else:
            place = start[aimed] + time[wanted] + in_lag[in_ptr[node] + pick]
        if place < 0.0:
            place = 0.0
        old = start[node]
        if place == old:
            continue
        start[node] = place
        change, count, feasible = 0.0, 0, True
        for k in range(in_ptr[node] - 1, in_ptr[node + 1]):
            own = node if k < in_ptr[node] else in_node[k]
            other = mate[own]
            seen = False
            for j in range(count):
                seen = seen or touched[j] == own
            if seen:
                continue
            room = room_end(own, -1, start, deadline, out_ptr, out_node, out_lag) - start[own]
            room += slack
            other_room = 0.0
            if other >= 0:
                other_room = slack - start[other]
                other_room += room_end(other, -1, start, deadline, out_ptr, out_node, out_lag)
            least, kept = np.inf, -1
            chosen, other_chosen = -1, -1
            for which in range(2 if other >= 0 else 1):
                first, end = ptr[cls[which, own]], ptr[cls[which, own] + 1]
                if room < time[first]:
                    continue
                guess = choice[own] if which == family[own] else first
                fits = fitting(time, first, guess, end, room)
                value, other_fits = cost[fits], -1
                if other >= 0:
                    first, end = ptr[cls[which, other]], ptr[cls[which, other] + 1]
                    if other_room < time[first]:
                        continue
                    guess = choice[other] if which == family[own] else first
                    other_fits = fitting(time, first, guess, end, other_room)
                    value += cost[other_fits]
                if value < least:
                    least, kept, chosen, other_chosen = value, which, fits, other_fits
            if kept < 0:
                feasible = False
                break
            for member, option in ((own, chosen), (other, other_chosen)):
                if member < 0:
                    continue
                touched[count] = member
                old_choice[count], old_family[count] = choice[member], family[member]
                change += cost[option] - cost[choice[member]]
                choice[member], family[member] = option, kept
                count += 1
        if not feasible or (change > 0.0 and np.random.random() >= math.exp(-change / temperature)):
            start[node] = old
            for j in range(count):
                choice[touched[j]], family[touched[j]] = old_choice[j], old_family[j]
            continue
        total += change
        if total < best_total - 1e-12 * abs(hot):
            best_total = total
            best_family[:] = family
    family[:] = best_family
    return best_total
