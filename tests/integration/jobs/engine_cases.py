"""One rank without a launcher: what attach and detach do to an engine; prints results as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import kareus_pp.integrations.deepspeed as door
import torch
import torch.distributed as dist
from common import Layer, data, make_engine, own_stream, start
from kareus_pp.integrations.deepspeed import attach, detach

from kareus_pp.config import parse_config
from kareus_pp.errors import ConfigError

FOLDER = Path(sys.argv[1])
QUIET = {"device": "dry-run", "mode": "observe", "output": str(FOLDER / "kareus")}
HOOKED = {"_INSTRUCTION_MAP", "_exec_schedule", "train_batch", "eval_batch", "save_checkpoint"}


def stream(session: Any) -> list[str]:
    """The instructions of the last complete step."""
    calls = session.calls
    end = len(calls) - 1 - calls[::-1].index("end")
    begin = max(i for i, call in enumerate(calls[:end]) if call.startswith("step "))
    return list(calls[begin + 1 : end])


def activation() -> dict[str, Any]:
    """`import kareus_pp.integrations.deepspeed` alone has attached the engine that is made."""
    engine = make_engine(1, {"kareus": QUIET})
    session = attach(engine)
    same = attach(engine, QUIET) is session and attach(engine, parse_config(QUIET)) is session
    engine.train_batch(data())
    whole = stream(session) == own_stream(engine, 4)
    other = attach(engine, {**QUIET, "min_dwell_s": 0.1})
    replaced = other is not session and session.calls[-1] == "close"
    detach(engine)
    detach(engine)
    clean = not HOOKED & set(vars(engine)) and other.calls[-1] == "close"
    engine.train_batch(data())
    return {
        "same": same,
        "stream": whole,
        "replaced": replaced,
        "clean": clean,
        "class_untouched": "kareus" not in repr(type(engine)._INSTRUCTION_MAP),
        "silent_after_detach": other.calls[-1] == "close",
    }


def switched_off() -> dict[str, Any]:
    engine = make_engine(1, {"kareus": {"enabled": False}})
    return {"session": attach(engine), "hooked": bool(HOOKED & set(vars(engine)))}


def user_exception() -> dict[str, Any]:
    """An exception that the user catches leaves the plugin and the engine working."""
    engine = make_engine(1, {"kareus": QUIET})
    session = attach(engine)
    engine.train_batch(data())
    Layer.failure = ValueError("a bad batch")
    caught = None
    try:
        engine.train_batch(data())
    except ValueError as error:
        caught = error
    same, Layer.failure = caught is Layer.failure, None
    engine.timers("train_batch").stop()  # DeepSpeed's own timer is still running
    aborted = session.calls[-1]
    engine.train_batch(data())
    result = {
        "same_exception": same,
        "aborted": aborted,
        "stream_after": stream(session) == own_stream(engine, 4),
        "standing_down": session.standing_down,
    }
    detach(engine)
    return result


def modes() -> dict[str, Any]:
    """bf16 with ZeRO-1 and recompute: the stream is the schedule's own, no step differs."""
    # Releases before 0.17 recompute only where the device has streams.
    recompute = 0 if int(deepspeed.__version__.split(".")[1]) < 17 else 1
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        "recompute": recompute,
        "kareus": QUIET,
    }
    engine = make_engine(1, config)
    session = attach(engine)
    batches = ((x.bfloat16(), y.bfloat16()) for x, y in data())
    engine.train_batch(batches)
    result = {
        "stream": stream(session) == own_stream(engine, 4),
        "fingerprint": door.fingerprint_of(engine),
        "standing_down": session.standing_down,
    }
    detach(engine)
    return result


def own_map_and_loop() -> dict[str, Any]:
    """An engine class with an instruction map and an execution loop of its own is served too."""
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

    engine = make_engine(1, {"kareus": {"enabled": False}})
    log: list[str] = []

    class OwnForward(ForwardPass):
        pass

    def forward(self: Any, buffer_id: int) -> None:
        log.append("own")
        self._exec_forward_pass(buffer_id)

    own_map = {**PipelineEngine._INSTRUCTION_MAP, OwnForward: forward}

    class OwnEngine(PipelineEngine):
        _INSTRUCTION_MAP = own_map

        def _exec_schedule(self, pipe_schedule: Any) -> None:
            self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
            self.fwd_outputs = []
            for commands in pipe_schedule:
                for command in commands:
                    kind = OwnForward if type(command) is ForwardPass else type(command)
                    self._INSTRUCTION_MAP[kind](self, **command.kwargs)

    engine.__class__ = OwnEngine
    session = attach(engine, QUIET)
    engine.train_batch(data())
    result = {
        "stream": stream(session) == own_stream(engine, 4),
        "own": log.count("own"),
        "has_backward": BackwardPass in engine._INSTRUCTION_MAP,
    }
    detach(engine)
    return result


def both_phases() -> dict[str, Any]:
    """DualPipeV: two chunks on a rank, microbatches counted for each."""
    if not hasattr(deepspeed, "DualPipeVModule"):
        return {"absent": True}
    module = deepspeed.DualPipeVModule([Layer(), Layer()], num_stages=1, loss_fn=torch.nn.MSELoss())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
        "kareus": {**QUIET, "device": "emulated"},
    }
    engine, _, _, _ = deepspeed.initialize(
        model=module, config=config, model_parameters=module.parameters()
    )
    session = attach(engine)
    engine.train_batch(data())
    engine.eval_batch(data())
    engine.train_batch(data())
    seen = stream(session)
    result = {
        "each_once": sorted(seen) == sorted(2 * [f"{k}{m}" for k in "FB" for m in range(4)]),
        "model_order": list(session.topology.model_order),
        "chunks_with_work": len({cls.chunk for cls in door._works(engine, session.config)}),
        "standing_down": session.standing_down,
    }
    detach(engine)
    return result


def mistakes() -> dict[str, Any]:
    engine = make_engine(1, {"kareus": {"enabled": False}})
    told = []
    for call in (
        lambda: attach(engine, {"modee": "observe"}),
        lambda: attach(engine, FOLDER / "absent.yaml"),
        lambda: attach(torch.nn.Linear(1, 1), QUIET),
    ):
        try:
            call()
        except (ConfigError, TypeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return {"told": told, "hooked": bool(HOOKED & set(vars(engine)))}


def mismatching_plan() -> dict[str, Any]:
    """A plan for another schedule: default clocks, one warning, training goes on."""
    kareus = {**QUIET, "mode": "apply", "device": "emulated", "plan": str(FOLDER / "plan.json")}
    engine = make_engine(1, {"kareus": kareus})
    session = attach(engine)
    for _ in range(30):
        engine.train_batch(data())
    result = {"phase": session.phase, "standing_down": session.standing_down}
    detach(engine)
    return result


def main() -> None:
    engine = start(1, {"kareus": {"enabled": False}})
    del engine
    cases = (activation, switched_off, user_exception, modes, own_map_and_loop, both_phases)
    results = {case.__name__: case() for case in (*cases, mistakes, mismatching_plan)}
    print(json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
