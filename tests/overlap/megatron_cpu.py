"""The real Megatron-Core GPT on CPU with gloo: small models, exact references.

Runs in the processes of `ranks`. CUDA calls are mapped to the CPU from outside; Megatron itself is
unmodified. Its named CUDA random states live in the CPU generator.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

SEQUENCE, HIDDEN, HEADS, VOCABULARY = 8, 32, 4, 64


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


@functools.cache
def setup() -> None:
    """Map CUDA to the CPU in this process; once."""
    warnings.filterwarnings("ignore")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    stream = types.SimpleNamespace(wait_stream=lambda *_: None, wait_event=lambda *_: None)
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment,return-value]
    torch.cuda.nvtx.range_push = lambda *_: 0  # type: ignore[assignment]
    torch.cuda.nvtx.range_pop = lambda *_: 0  # type: ignore[assignment]
    _CudaToCpu().__enter__()
    if importlib.util.find_spec("triton") is None and _imports_triton():
        _stub_triton()
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    if not hasattr(megatron_random, "FP8GlobalStateManager"):
        # Selective recomputation asks Transformer Engine whether FP8 is on.
        megatron_random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        megatron_random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
        megatron_random.fp8_autocast = lambda **_: contextlib.nullcontext()


def _imports_triton() -> bool:
    """Whether this Megatron-Core cannot be imported without triton; 0.16 can."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    return "import triton" in (package / "transformer/moe/moe_layer.py").read_text()


def _stub_triton() -> None:
    """Megatron-Core 0.20 imports triton's kernels for mixture of experts, which are not run."""
    # Its modules look for triton when they are imported: they must not find the stub.
    torch.compile(lambda tensor: tensor)
    torch._dynamo.config.disable = True

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return Anything()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            is_decorator = len(args) == 1 and isinstance(args[0], (types.FunctionType, Anything))
            return args[0] if is_decorator else Anything()

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    for name in ("triton", "triton.language"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__getattr__ = attribute  # type: ignore[method-assign]
        module.__version__ = "3.0.0"  # type: ignore[attr-defined]
        sys.modules[name] = module
    sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]


def version() -> str:
    """Version of the Megatron-Core in this process."""
    import megatron.core

    return str(megatron.core.__version__)


def layout(tensor: int = 2, pipeline: int = 1, virtual: int | None = None) -> None:
    """Make the parallel groups, replacing earlier ones."""
    setup()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    # That forgets the groups; they live on, each with its threads, until c10d destroys them.
    for group in [g for g in distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        create_gloo_process_groups=dist.get_backend() == "gloo",
    )
    model_parallel_cuda_manual_seed(123)


def config(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A small transformer configuration."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": (
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    values.update(changes)
    return TransformerConfig(**values)


class Norm:
    """Layer norm that, unlike Megatron's torch norm, may stand in sequence-parallel layers."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm = torch.nn.LayerNorm(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def _block_spec(settings: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    count = get_num_layers_to_build(settings, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


def model(settings: Any, position: str = "learned_absolute", vp_stage: int | None = None) -> Any:
    """A GPT with local layers; parameters are the same for the same layout."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(7)
    where = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    gpt = GPTModel(
        config=settings,
        transformer_layer_spec=_block_spec(settings, vp_stage),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        position_embedding_type=position,
        share_embeddings_and_output_weights=False,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    gpt.to(settings.params_dtype)
    for module in gpt.modules():
        # Buffers and attributes that remember a data type.
        if hasattr(module, "params_dtype"):
            module.params_dtype = settings.params_dtype
    return gpt.train()


def batches(count: int, size: int, seed: int = 5, mask: str = "causal") -> Iterator[dict[str, Any]]:
    """Microbatches of random tokens, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (size, SEQUENCE + 1), generator=generator)
        causal = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
        if mask == "per-sample":
            causal = causal.repeat(size, 1, 1, 1)
            for sample in range(size):
                causal[sample, :, :, : sample % 3] = True
                causal[sample, :, range(SEQUENCE), range(SEQUENCE)] = False
        yield {
            "input_ids": tokens[:, :-1].contiguous(),
            "position_ids": torch.arange(SEQUENCE).expand(size, -1).contiguous(),
            "attention_mask": causal,
            "labels": tokens[:, 1:].contiguous(),
        }


def gradients(module: Any) -> dict[str, torch.Tensor]:
    """A copy of all gradients."""
    found = {}
    for name, parameter in module.named_parameters():
        grad = getattr(parameter, "main_grad", None)
        grad = parameter.grad if grad is None else grad
        if grad is not None:
            found[name] = grad.detach().clone()
    return found


def relative_error(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Largest difference over all tensors, each relative to its own largest value."""
    assert got.keys() == wanted.keys()
    assert got, "there is nothing to compare"
    worst = 0.0
    for name, reference in wanted.items():
        scale = reference.abs().max().clamp_min(1e-30)
        worst = max(worst, float((got[name] - reference).abs().max() / scale))
    return worst
