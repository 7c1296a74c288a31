"""The peer: lowtime (Perseus' and Kareus' solver) on the same schedule and profile."""

from __future__ import annotations

import time
from dataclasses import dataclass

import networkx as nx
from lowtime.cost_model import ExponentialModel
from lowtime.operation import (
    CandidateExecutionOptions,
    DummyOperation,
    ExecutionOption,
    Operation,
    OperationSpec,
)
from lowtime.solver import PhillipsDessouky

from kareus_pp.evaluate import evaluate
from kareus_pp.plan import Settings
from kareus_pp.profile import Profile
from kareus_pp.schedule import Schedule
from kareus_pp.setting import Setting


@dataclass(frozen=True)
class PeerPoint:
    """A plan of lowtime.

    Attributes:
        predicted_s: Iteration time that lowtime predicts.
        time_s: Iteration time of its clocks, evaluated on the profile.
        energy_j: Energy of its clocks, evaluated on the profile.
    """

    predicted_s: float
    time_s: float
    energy_j: float


def lowtime_frontier(
    schedule: Schedule, profile: Profile, unit_s: float = 1e-3
) -> tuple[list[PeerPoint], float]:
    """The frontier of lowtime, re-evaluated on the profile, and the processor seconds it took.

    Its time is the solver's alone: fitting and re-evaluation are not counted.
    """
    specs = {}
    for cls in schedule.classes:
        watts = profile.blocking_power_w[cls.stage]
        options = CandidateExecutionOptions(
            [
                ExecutionOption(
                    o.time_s, unit_s, o.energy_j - watts * o.time_s, o.setting.clock_mhz
                )
                for o in profile.options[cls]
            ]
        )
        specs[cls] = OperationSpec(options, ExponentialModel(options))
    dag = nx.DiGraph()
    size = len(schedule.instructions)
    operations = [Operation(specs[schedule.class_of(i)]) for i in schedule.instructions]
    source, sink = size, size + 1
    for node, operation in enumerate(operations):
        dag.add_node(node, op=operation)
    for node in (source, sink):
        dag.add_node(node, op=DummyOperation())
    dag.graph["source_node"], dag.graph["sink_node"] = source, sink
    dag.add_edges_from((e.before, e.after) for e in schedule.edges)
    for node in range(size):
        if dag.in_degree(node) == 0:
            dag.add_edge(source, node)
        if dag.out_degree(node) == 0:
            dag.add_edge(node, sink)
    found: list[tuple[float, list[int]]] = []
    began = time.process_time()
    for result in PhillipsDessouky(dag).run():
        found.append((result.real_time, [o.assigned_knob for o in operations]))
    seconds = time.process_time() - began
    points = []
    for predicted, clocks in found:
        cost = evaluate(schedule, _settings(schedule, clocks), profile)
        points.append(PeerPoint(predicted, cost.time_s, cost.energy_j))
    return points, seconds


def _settings(schedule: Schedule, clocks: list[int]) -> Settings:
    rest = iter(clocks)
    return tuple(tuple(Setting(next(rest)) for _ in row) for row in schedule.order)


def undominated(points: list[PeerPoint]) -> list[PeerPoint]:
    """Plans that no other of the same frontier beats in true time and energy."""
    kept: list[PeerPoint] = []
    for point in sorted(points, key=lambda p: (p.time_s, p.energy_j)):
        if not kept or point.energy_j < kept[-1].energy_j:
            kept.append(point)
    return kept
