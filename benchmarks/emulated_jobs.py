"""Whole jobs on emulated GPUs: measured against predicted, and what they save.

A Megatron-Core job (4 stages, interleaved, unbalanced) and a torch zero-bubble job observe,
profile themselves, plan and apply. Each trains on this machine's CPUs; time and power are those of
a GPU model (`device: emulated`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from kareus_pp.plan import Plan
from kareus_pp.runtime.events import read_events

ROOT = Path(__file__).resolve().parent.parent
STAGES = 4
LIMIT = 0.02
SETTLING_STEPS = 2
JOBS = {
    "megatron-core, interleaved": (
        "train_gpt_megatron.py",
        "megatron_emulated.yaml",
        ["--pp", str(STAGES), "--chunks", "2", "--layers", "8"],
    ),
    "torch, interleaved zero-bubble": ("train_torch_pipelining.py", "torch_emulated.yaml", []),
}


@dataclass(frozen=True)
class Row:
    """One plan of one job; energies of all stages together.

    Attributes:
        job: Which job.
        plan: `default clocks`, or the target of the plan.
        time_s: Iteration time as measured, in seconds.
        predicted_time_s: As predicted by the plan; None for default clocks.
        energy_j: Energy of an iteration as measured, in joules.
        predicted_energy_j: As predicted by the plan; None for default clocks.
        saved: Share of the energy at default clocks that is saved.
        slower: Iteration time against default clocks, as a fraction.
    """

    job: str
    plan: str
    time_s: float
    predicted_time_s: float | None
    energy_j: float
    predicted_energy_j: float | None
    saved: float
    slower: float


def run_job(name: str, folder: Path, steps: int) -> list[Row]:
    """Run one job and compare its phases."""
    script, config, arguments = JOBS[name]
    values = yaml.safe_load((ROOT / "configs" / config).read_text())
    output = folder / config.removesuffix(".yaml")
    settings = folder / config
    settings.write_text(yaml.safe_dump({**values, "output": str(output)}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [
            *(*torchrun, "--nproc-per-node", str(STAGES), str(ROOT / "examples" / script)),
            *(*arguments, "--steps", str(steps), "--kareus-config", str(settings)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the job {name} failed:\n{done.stderr[-3000:]}")
    plans = [Plan.load(path) for path in output.glob("plan-*.json")]
    if not plans:
        raise SystemExit(f"the job {name} made no plan:\n{done.stderr[-3000:]}")
    default, applied = measure(output, "observe"), measure(output, "apply")
    overran = [
        (e["overruns"], e["paced_instructions"])
        for rank in range(STAGES)
        for e in read_events(output / f"events-rank{rank}.jsonl")
        if e["event"] == "end"
    ]
    print(f"{name}: {overran} instructions overran their paced time", file=sys.stderr)
    (plan,) = plans
    return [
        Row(name, "default clocks", default[0], None, default[1], None, 0.0, 0.0),
        Row(
            *(name, plan.target, applied[0], plan.time_s, applied[1], plan.energy_j),
            saved=1 - applied[1] / default[1],
            slower=applied[0] / default[0] - 1,
        ),
    ]


def measure(output: Path, phase: str) -> tuple[float, float]:
    """Mean iteration time and energy over the steps of a phase, the first ones left out."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for rank in range(STAGES):
        for event in read_events(output / f"events-rank{rank}.jsonl"):
            if event["event"] == "step" and event["phase"] == phase:
                by_step.setdefault(event["step"], []).append(event)
    whole = [by_step[step] for step in sorted(by_step)][SETTLING_STEPS:]
    kept = [s for s in whole if len(s) == STAGES and all(e["energy_j"] for e in s)]
    if not kept:
        raise SystemExit(f"no step of the phase {phase!r} was measured; run more steps")
    return (
        statistics.mean(max(e["time_s"] for e in step) for step in kept),
        statistics.mean(sum(e["energy_j"] for e in step) for step in kept),
    )


def main() -> None:
    """Print the rows; exit status 1 where measured and predicted differ by more than 2 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--job", choices=sorted(JOBS), action="append")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for name in arguments.job or JOBS
            for row in run_job(name, Path(folder), arguments.steps)
        ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show(rows)
    sys.exit(any(_error(row) > LIMIT for row in rows))


def _error(row: Row) -> float:
    pairs = ((row.time_s, row.predicted_time_s), (row.energy_j, row.predicted_energy_j))
    return max((abs(m / p - 1) for m, p in pairs if p is not None), default=0.0)


def show(rows: list[Row]) -> None:
    """The table for people."""
    table = Table(
        "job", "plan", "time s", "predicted s", "energy J", "predicted J", "saved", "slower"
    )
    for row in rows:
        table.add_row(
            row.job,
            row.plan,
            f"{row.time_s:.4f}",
            "" if row.predicted_time_s is None else f"{row.predicted_time_s:.4f}",
            f"{row.energy_j:.1f}",
            "" if row.predicted_energy_j is None else f"{row.predicted_energy_j:.1f}",
            f"{row.saved:.1%}",
            f"{row.slower:+.1%}",
        )
    Console(width=120).print(table)
    print("all figures emulated")


if __name__ == "__main__":
    main()
