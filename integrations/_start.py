"""What adapters share when they start a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from kareus_pp.integrations._activation import rank_logger, stop_for_user
from kareus_pp.integrations._boundaries import stream_boundaries
from kareus_pp.integrations._store import open_store

from kareus_pp.config import KareusConfig, OverlapConfig, load_config, parse_config
from kareus_pp.errors import ConfigError, DeviceError, KareusError
from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.runtime.messages import DOWN_KEY
from kareus_pp.runtime.session import Session
from kareus_pp.runtime.topology import Topology
from kareus_pp.schedule import InstructionClass
from kareus_pp.simulate.gpu_model import Work

Config = KareusConfig | Mapping[str, object] | str | os.PathLike[str]


def configuration(config: Config) -> KareusConfig:
    """The configuration given as a model, as a mapping, or as the path of a YAML or JSON file.

    Raises:
        ConfigError: The file is absent or malformed, or a value is not allowed.
    """
    if isinstance(config, KareusConfig):
        return config
    if isinstance(config, Mapping):
        return parse_config(config)
    return load_config(config)


def pipeline_topology(
    pipeline: Sequence[int], model_order: tuple[tuple[int, int], ...]
) -> Topology:
    """Where this rank stands, from the global ranks of its pipeline in order of the stages.

    Raises:
        ConfigError: The ranks of the pipeline are not evenly spaced.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    stages = len(pipeline)
    steps = {after - before for before, after in pairwise(pipeline)} or {1}
    stride = steps.pop()
    if steps or stride < 1 or world_size % stages:
        raise ConfigError(
            f"the ranks {list(pipeline)} of a pipeline in a world of {world_size} are not evenly "
            f"spaced; kareus-pp needs a regular grid of pipelines and their copies"
        )
    # Pipelines of a regular grid interleave `stride` at a time.
    block, place = divmod(pipeline[0], stride * stages)
    return Topology(
        stage=pipeline.index(rank),
        stages=stages,
        model_order=model_order,
        replica=block * stride + place,
        replicas=world_size // stages,
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


def start_session(
    config: KareusConfig,
    topology: Topology,
    fingerprint: Mapping[str, str],
    device: torch.device,
    count_work: Callable[[int], Mapping[InstructionClass, Work]],
    attach_overlap: Callable[[OverlapConfig], OverlapExecutor] | None = None,
) -> Session:
    """Start the session of this rank; every rank calls it.

    Args:
        config: The configuration.
        topology: Where the rank stands.
        fingerprint: Effective model, precision, recompute, ... settings, as text.
        device: What executes the instructions.
        count_work: Counts the work of a stage; called for the emulated device only.
        attach_overlap: Attaches the blocks of this rank, where the configuration asks for overlap;
            None where the framework has none that are known.

    Raises:
        ConfigError: Overlap is asked for and the framework's blocks are not known.
        OverlapError: The blocks of this rank cannot be attached.
        KareusError: A plan or profile file that the configuration names is malformed.
        DeviceError: The device that the configuration names cannot be used.
    """
    executor = _attach_overlap(config.overlap, attach_overlap)
    store = open_store(topology.rank, topology.world_size)
    try:
        session = Session(
            config,
            topology,
            work=count_work(topology.stage) if config.device == "emulated" else None,
            fingerprint=fingerprint,
            store=store,
            logger=rank_logger(topology.rank),
            boundaries=stream_boundaries(device),
        )
    except Exception as error:
        # The other ranks would wait for the stream of this one.
        store.set(DOWN_KEY, f"rank {topology.rank}: {error}")
        if executor is not None:
            executor.close()
        raise
    if executor is not None:
        session.follow_overlap(executor)
    return session


def _attach_overlap(
    config: OverlapConfig, attach: Callable[[OverlapConfig], OverlapExecutor] | None
) -> OverlapExecutor | None:
    """Attach before anything that may fail on one rank only: all make communicators together."""
    if not config.enabled:
        return None
    if attach is None:
        raise ConfigError(
            "the kareus config has overlap.enabled and the blocks of this framework are not known; "
            "attach yours with kareus_pp.overlap.generic and hand the executor to the session's "
            "follow_overlap"
        )
    return attach(config)


def start_or_go_on(start: Callable[[], Session | None], rank: int) -> Session | None:
    """Start where no line of the user's asked for it: a mistake ends the job, a fault does not."""
    try:
        return start()
    except DeviceError as error:
        rank_logger(rank).warning("kareus-pp: %s; training goes on without it", error)
    except KareusError as error:
        stop_for_user(error, rank)
    except Exception as error:
        rank_logger(rank).warning(
            "kareus-pp: cannot start (%s: %s); training goes on without it",
            type(error).__name__,
            error,
        )
    return None
