"""What a plan costs on a profile: longest path through the schedule, energy with waiting included.

Shared by the planner, the replay and the learner, so that their figures are equal by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kareus_pp.plan import Settings
from kareus_pp.profile import Profile
from kareus_pp.schedule import Schedule, topological_order


@dataclass(frozen=True)
class Evaluation:
    """Cost of one iteration.

    Attributes:
        time_s: Iteration time, overhead included, in seconds.
        energy_j: Energy of the iteration over all stages, one GPU each, waiting included.
        idle_s: For each stage the seconds in which it executes no instruction.
        start_s: For each instruction (by node number) its start, in seconds.
        duration_s: For each instruction its duration, in seconds.
    """

    time_s: float
    energy_j: float
    idle_s: tuple[float, ...]
    start_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]


@dataclass(frozen=True)
class SwitchPrice:
    """What one clock switch costs.

    Attributes:
        delay_s: Delay between the preceding instruction of the stage and the one that wants the
            new clock, in seconds; it may hide in a wait for another stage.
        energy_j: Energy in joules, on top of the blocking power that is drawn meanwhile.
    """

    delay_s: float = 0.0
    energy_j: float = 0.0


FREE_SWITCHES = SwitchPrice()


def switching_nodes(schedule: Schedule, settings: Settings) -> tuple[int, ...]:
    """Numbers of the instructions before which the clock changes.

    The first of a stage changes the clock if the last of the iteration before left another; fixed
    instructions keep the clock they find.
    """
    found, first = [], 0
    for order, row in zip(schedule.order, settings, strict=True):
        steps = [step for step, instruction in enumerate(order) if not instruction.kind.is_fixed]
        found += [
            first + step
            for before, step in zip(steps[-1:] + steps[:-1], steps, strict=True)
            if row[before].clock_mhz != row[step].clock_mhz
        ]
        first += len(order)
    return tuple(found)


def start_times(
    schedule: Schedule,
    duration_s: Sequence[float] | NDArray[np.float64],
    p2p_s: float = 0.0,
    switching: Sequence[int] = (),
    switch_delay_s: float = 0.0,
) -> NDArray[np.float64]:
    """Earliest start of every instruction, in seconds; shape `(instructions,)`.

    Args:
        schedule: The schedule.
        duration_s: Duration of every instruction by node number.
        p2p_s: Latency added to dependencies that cross stages.
        switching: Instructions before which the clock changes.
        switch_delay_s: Least time between the preceding instruction of the stage and those.
    """
    predecessors: list[list[tuple[int, float]]] = [[] for _ in schedule.instructions]
    delayed = set(switching)
    stage_of = schedule.stage_of
    for edge in schedule.edges:
        latency = p2p_s if edge.crosses_stages else 0.0
        if edge.after in delayed and edge.before == edge.after - 1 and not edge.crosses_stages:
            latency += switch_delay_s
        predecessors[edge.after].append((edge.before, latency))
    duration = [float(value) for value in duration_s]
    start = [0.0] * len(duration)
    for node in topological_order(schedule):
        first = node == 0 or stage_of[node] != stage_of[node - 1]
        start[node] = max(
            (start[b] + duration[b] + lag for b, lag in predecessors[node]), default=0.0
        )
        if first and node in delayed:
            start[node] = max(start[node], switch_delay_s)
    return np.array(start)


def evaluate(
    schedule: Schedule,
    settings: Settings,
    profile: Profile,
    switch: SwitchPrice = FREE_SWITCHES,
) -> Evaluation:
    """Time and energy of one iteration: `E = sum e_i + sum_s P_s (T - busy_s)`.

    Clock switches count with their delay and energy where `switch` prices them.

    Raises:
        ProfileError: The profile misses a class, a setting or the blocking power of a stage.
    """
    chosen = [
        profile.option(schedule.class_of(instruction), setting)
        for order, row in zip(schedule.order, settings, strict=True)
        for instruction, setting in zip(order, row, strict=True)
    ]
    duration = np.array([option.time_s for option in chosen])
    energy = np.array([option.energy_j for option in chosen])
    switching = switching_nodes(schedule, settings) if switch != FREE_SWITCHES else ()
    found = compose(schedule, duration, energy, profile, switching, switch.delay_s)
    return replace(found, energy_j=found.energy_j + switch.energy_j * len(switching))


def compose(
    schedule: Schedule,
    duration_s: NDArray[np.float64],
    instruction_energy_j: NDArray[np.float64],
    profile: Profile,
    switching: Sequence[int] = (),
    switch_delay_s: float = 0.0,
) -> Evaluation:
    """Iteration time and energy from the duration and energy of every instruction."""
    start = start_times(schedule, duration_s, profile.overhead.p2p_s, switching, switch_delay_s)
    time_s = float(np.max(start + duration_s)) + profile.overhead.iteration_s
    busy = np.bincount(schedule.stage_of, weights=duration_s, minlength=schedule.stages)
    idle = time_s - busy
    power = np.array(profile.blocking_power_w)
    return Evaluation(
        time_s=time_s,
        energy_j=float(instruction_energy_j.sum() + (power * idle).sum()),
        idle_s=tuple(float(value) for value in idle),
        start_s=start,
        duration_s=duration_s,
    )
