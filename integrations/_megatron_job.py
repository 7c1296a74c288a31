"""What the plugin reads of a Megatron job: pipeline, work, and what a profile depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kareus_pp.integrations._work import count_forward, instruction_works

from kareus_pp.errors import ConfigError
from kareus_pp.schedule import InstructionClass
from kareus_pp.simulate.gpu_model import Work

_FINGERPRINT = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_moe_experts"),
    *("params_dtype", "fp16", "bf16", "fp8", "fp8_recipe"),
    *("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"),
    *("sequence_parallel", "tp_comm_overlap", "overlap_p2p_comm", "batch_p2p_comm"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("cpu_offloading", "cuda_graph_impl", "enable_cuda_graph"),
    *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
)
_DDP_FINGERPRINT = (
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    *("grad_reduce_in_fp32", "data_parallel_sharding_strategy"),
)


def refuse_full_iteration_graphs(model_config: Any) -> None:
    """Refuse a model configuration under which no host hook sees the instructions.

    Raises:
        ConfigError: CUDA graphs replay whole iterations.
    """
    scope = getattr(model_config, "cuda_graph_scope", None) or ()
    scopes = [scope] if not isinstance(scope, (list, tuple)) else scope
    names = {str(getattr(entry, "name", entry)) for entry in scopes}
    impl = getattr(model_config, "cuda_graph_impl", None)
    if impl == "full_iteration" or (impl != "none" and "full_iteration" in names):
        raise ConfigError(
            "CUDA graphs of full iterations (full_iteration) replay all instructions without the "
            "host, so that none can be given its clock; use another CUDA graph scope, or switch "
            "kareus-pp off with 'enabled: false'"
        )


def pipeline_ranks(kwargs: Mapping[str, Any]) -> list[int]:
    """Global ranks of this rank's pipeline, in order of the stages."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    communicator = kwargs.get("p2p_communicator")
    group = getattr(communicator, "pp_group", None)
    if group is None and parallel_state.model_parallel_is_initialized():
        group = parallel_state.get_pipeline_model_parallel_group()
    if group is None:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return list(dist.get_process_group_ranks(group))


def instruction_work(
    stage: int, models: list[Any], model_config: Any, kwargs: Mapping[str, Any]
) -> dict[InstructionClass, Work]:
    """Work of every instruction class of this rank, for the emulated device."""
    sequence = int(kwargs["seq_length"])
    tokens = sequence * int(kwargs["micro_batch_size"])
    recompute = getattr(model_config, "recompute_granularity", None) == "full"
    works: dict[InstructionClass, Work] = {}
    for chunk, model in enumerate(models):
        forward = count_forward([model], tokens, sequence)
        works |= instruction_works(stage, forward, chunk=chunk, recompute=recompute)
    return works


def fingerprint(models: list[Any], model_config: Any) -> dict[str, str]:
    """What a profile depends on, the same on every rank: model, precision and effective modes."""
    import megatron.core

    ddp = getattr(models[0], "ddp_config", None)
    found = {"framework": "megatron-core", "version": megatron.core.__version__}
    for source, names in ((model_config, _FINGERPRINT), (ddp, _DDP_FINGERPRINT)):
        found |= {name: str(getattr(source, name)) for name in names if hasattr(source, name)}
    return found | {"chunks": str(len(models))}
