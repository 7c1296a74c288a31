"""An unmodified Megatron-LM checkout under the launcher, with shims for a machine without CUDA."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kareus_pp.builders import build_1f1b, build_interleaved
from kareus_pp.runtime.events import read_events
from kareus_pp.schedule import Schedule
from tests.integrations.test_megatron_order import megatron_020

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LAUNCH = str(ROOT / "tests" / "integration" / "megatron_lm_cpu.py")
ARGUMENTS = shlex.split("""
    --hidden-size 16 --num-attention-heads 2 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4
    --pipeline-model-parallel-size 2 --train-iters 6 --lr 0.001 --min-lr 0.0001
    --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 63
    --split 100,0,0 --distributed-backend gloo --use-cpu-initialization --transformer-impl local
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --attention-backend unfused
    --log-interval 1 --clip-grad 0.0 --eval-interval 3 --eval-iters 1
    --kareus-mode observe --kareus-device dry-run
""")


def launch(checkout: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=checkout,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
    )


def test_help_lists_the_arguments() -> None:
    done = launch(megatron_020(), [sys.executable, LAUNCH, "pretrain_gpt.py", "--help"])
    assert done.returncode == 0, done.stderr[-2000:]
    flags = ("config", "mode", "target", "device", "plan", "profile", "output")
    assert all(f"--kareus-{name} " in done.stdout for name in flags)


JOBS = {
    "1f1b": ("--num-layers 2", build_1f1b(2, 4)),
    "interleaved": (
        "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
        build_interleaved(2, 4, 2, p2p="overlapped"),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_pretrain_gpt_records_its_schedule(tmp_path: Path, name: str) -> None:
    layers, built = JOBS[name]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", "2", LAUNCH, "pretrain_gpt.py"]
    output = ["--kareus-output", str(tmp_path)]
    arguments = [*layers.split(), *ARGUMENTS, *output]
    done = launch(megatron_020(), [*torchrun, *script, *arguments])
    assert done.returncode == 0, done.stderr[-3000:]
    recorded = Schedule.load(next(tmp_path.glob("schedule-*.json")))
    assert recorded.signature == built.signature
    for rank in range(2):
        events = read_events(tmp_path / f"events-rank{rank}.jsonl")
        assert sum(event["event"] == "step" for event in events) == 6
        assert [e["reason"] for e in events if e["event"] == "suspend"] == ["evaluation"] * 2
