"""Where a rank stands in the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Position of one rank.

    Attributes:
        stage: Pipeline rank, from 0.
        stages: Number of pipeline ranks.
        model_order: `(stage, chunk)` in the order in which activations pass through the model.
        replica: Which data- and tensor-parallel copy of the stage this is, from 0.
        replicas: Number of copies of every stage.
        rank: Global rank.
        world_size: Number of ranks, stages x replicas.
        local_rank: Index of the rank on its host; selects the CUDA device.
    """

    stage: int
    stages: int
    model_order: tuple[tuple[int, int], ...]
    replica: int = 0
    replicas: int = 1
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
