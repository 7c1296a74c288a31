"""The demo: one training job three times, at default clocks and with two plans of its own.

Runs `train_gpt_deepspeed.py` under the DeepSpeed launcher on this machine's CPUs, with a GPU per
stage emulated: every instruction takes the wall-clock time, and draws the power, that a GPU model
says. First at default clocks; then it profiles itself, plans and applies the fastest plan; then it
applies a plan 5 % slower from the same profile. Everything is in `runs/demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kareus_pp._files import write_text
from kareus_pp.evaluate import evaluate
from kareus_pp.plan import Plan, default_settings
from kareus_pp.profile import Profile
from kareus_pp.runtime.events import read_events

EXAMPLES = Path(__file__).resolve().parent
CONFIG = EXAMPLES.parent / "configs" / "deepspeed_demo.json"
STAGES = 4
MEASURED_STEPS = 12
# Steps at the start of a phase that are not measured: the job, or a clock, settles.
SETTLING_STEPS = 2
OBSERVED_STEPS = 2
PROFILING_PLANS = 10
STEPS_PER_PROFILING_PLAN = 6
LEARNING_STEPS = 26
PLANNING_STEPS = 20
MAX_OVERRUN_SHARE = 0.01


class DemoError(Exception):
    """The demo did not show what it is there to show."""


@dataclass(frozen=True)
class Row:
    """One plan, measured and predicted; times per iteration, energies of all stages together."""

    plan: str
    measured_time_s: float
    predicted_time_s: float | None
    measured_energy_j: float
    predicted_energy_j: float | None
    switches: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=MEASURED_STEPS, help="measured for each plan")
    arguments = parser.parse_args()
    try:
        run_demo(arguments.output, arguments.steps)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def run_demo(output: Path, steps: int) -> None:
    """Run the three jobs, check them, print the table and write `summary.json`."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    kept = steps + SETTLING_STEPS
    default, fastest, slower = output / "default", output / "fastest", output / "slower"

    train(default, {"mode": "observe"}, kept, "1 of 3: at default clocks")
    train(
        fastest,
        {"mode": "auto", "target": "fastest", "profiling": {"plans": PROFILING_PLANS}},
        OBSERVED_STEPS + PROFILING_PLANS * STEPS_PER_PROFILING_PLAN + LEARNING_STEPS + kept,
        "2 of 3: profiles itself, plans, and applies the fastest plan",
    )
    profile = fastest / "profile.json"
    train(
        slower,
        {"mode": "apply", "target": "slowdown:5", "profile": str(profile)},
        OBSERVED_STEPS + PLANNING_STEPS + kept,
        "3 of 3: a plan 5 % slower, from the same profile",
    )

    overran, paced = overruns((default, fastest, slower))
    rows = [
        default_row(default, fastest, steps),
        planned_row("fastest", fastest, steps),
        planned_row("5 % slower", slower, steps),
    ]
    show(rows, overran, paced)
    summary = {
        "source": "emulated",
        "rows": [asdict(row) for row in rows],
        "instructions": paced,
        "overruns": overran,
    }
    write_text(output / "summary.json", json.dumps(summary, indent=1) + "\n")
    print(f"the same in {output / 'summary.json'}")
    if overran > MAX_OVERRUN_SHARE * paced:
        raise DemoError(
            f"{overran} of {paced} instructions took longer on this machine's CPUs than on the "
            f"emulated GPU, and at most 1 % may: the figures do not hold; run it on a machine "
            f"that is less busy"
        )


def train(output: Path, values: dict[str, Any], steps: int, title: str) -> None:
    """Run one job under the DeepSpeed launcher; its log goes to `train.log`.

    Args:
        output: Folder of the job.
        values: What the job's config file says beyond the DeepSpeed config.
        steps: Training steps.
        title: For the user.
    """
    print(f"demo {title}: {steps} steps ...", flush=True)
    output.mkdir()
    config = output / "kareus.json"
    config.write_text(json.dumps({**values, "output": str(output)}))
    port = free_port()
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--num_gpus", str(STAGES), "--master_port", str(port)),
        *("--module", "kareus_pp.launch", "--kareus-config", str(config)),
        str(EXAMPLES / "train_gpt_deepspeed.py"),
        *("--deepspeed_config", str(CONFIG), "--backend", "gloo", "--stages", str(STAGES)),
        *("--layers", "10", "--steps", str(steps), "--log", str(output / "losses.jsonl")),
    ]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    # DeepSpeed compiles an operator once. Where that was interrupted, a lock stays behind in the
    # user's own folder of extensions, and every later job waits for it.
    environment["TORCH_EXTENSIONS_DIR"] = str((output.parent / "torch-extensions").resolve())
    try:
        with (output / "train.log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    finally:
        remove_shared_memory(port)
    if done.returncode:
        tail = "".join((output / "train.log").read_text().splitlines(keepends=True)[-15:])
        raise DemoError(f"the job failed; the end of {output / 'train.log'}:\n{tail}")
    absent = [rank for rank in range(STAGES) if not events_file(output, rank).is_file()]
    if absent:
        raise DemoError(f"ranks {absent} wrote no events; see {output / 'train.log'}")


def events_file(job: Path, rank: int) -> Path:
    """The event log of a rank."""
    return job / f"events-rank{rank}.jsonl"


def free_port() -> int:
    """A port that no other job of this machine uses now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def remove_shared_memory(port: int) -> None:
    """Remove what DeepSpeed leaves in shared memory after a job on CPUs: 66 MiB for every rank."""
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink(missing_ok=True)


def default_row(job: Path, profiled: Path, steps: int) -> Row:
    """Default clocks, as measured; predicted from the profile that the other job took."""
    plan = applied_plan(profiled)
    profile = Profile.load(profiled / "profile.json")
    predicted = evaluate(plan.schedule, default_settings(plan.schedule), profile)
    measured = measure(job, "observe", steps)
    return Row(
        "default clocks",
        measured.time_s,
        predicted.time_s,
        measured.energy_j,
        predicted.energy_j,
        measured.switches,
    )


def planned_row(name: str, job: Path, steps: int) -> Row:
    """A plan of the job's own, as measured under it."""
    plan = applied_plan(job)
    measured = measure(job, "apply", steps)
    return Row(
        name, measured.time_s, plan.time_s, measured.energy_j, plan.energy_j, measured.switches
    )


def applied_plan(job: Path) -> Plan:
    """The plan that a job made."""
    plans = sorted(job.glob("plan-*.json"))
    if not plans:
        raise DemoError(f"the job made no plan; see {job / 'train.log'}")
    return Plan.load(plans[0])


@dataclass(frozen=True)
class Measured:
    """Means over the iterations of one plan; energy and switches of all stages together."""

    time_s: float
    energy_j: float
    switches: float


def measure(job: Path, phase: str, steps: int) -> Measured:
    """What the ranks of a job recorded in the last `steps` steps of a phase."""
    ranks = [read_events(events_file(job, rank)) for rank in range(STAGES)]
    by_step: dict[int, list[dict[str, Any]]] = {}
    for events in ranks:
        for event in events:
            if event["event"] == "step" and event["phase"] == phase:
                by_step.setdefault(event["step"], []).append(event)
    whole = [by_step[step] for step in sorted(by_step) if len(by_step[step]) == STAGES]
    kept = [events for events in whole[SETTLING_STEPS:] if all(e["energy_j"] for e in events)]
    if len(kept) < steps // 2:
        raise DemoError(
            f"only {len(kept)} steps of the phase {phase!r} were measured and {steps} were "
            f"expected; see {job / 'train.log'}"
        )
    kept = kept[-steps:]
    return Measured(
        time_s=statistics.mean(max(e["time_s"] for e in events) for events in kept),
        energy_j=statistics.mean(sum(e["energy_j"] for e in events) for events in kept),
        switches=statistics.mean(sum(e["switches"] for e in events) for events in kept),
    )


def overruns(jobs: tuple[Path, ...]) -> tuple[int, int]:
    """Instructions whose real execution overran their paced time, and all paced instructions."""
    ends = [
        event
        for job in jobs
        for rank in range(STAGES)
        for event in read_events(events_file(job, rank))
        if event["event"] == "end"
    ]
    return sum(e["overruns"] for e in ends), sum(e["paced_instructions"] for e in ends)


def show(rows: list[Row], overran: int, paced: int) -> None:
    """The table for the user: the last lines of the demo."""
    default = rows[0]
    table = Table(title=f"{STAGES} stages, emulated GPUs: time and energy of an iteration")
    for name in ("plan", "time s", "predicted s", "energy J", "predicted J"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for name in ("slower", "saves", "switches"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.plan,
            f"{row.measured_time_s:.4f}",
            number(row.predicted_time_s, 4),
            f"{row.measured_energy_j:.1f}",
            number(row.predicted_energy_j, 1),
            f"{row.measured_time_s / default.measured_time_s - 1:+.2%}",
            f"{1 - row.measured_energy_j / default.measured_energy_j:.1%}",
            f"{row.switches:.0f}",
        )
    Console(width=100).print(table)
    print(f"all figures emulated; {overran} of {paced} instructions overran their paced time")


def number(value: float | None, digits: int) -> str:
    """A prediction, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
