"""`kareus-pp learn`: a profile from recorded runs, or how well left-out plans are predicted."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from kareus_pp.errors import ProfileError
from kareus_pp.measure.design import choose_by_design
from kareus_pp.measure.holdout import Holdout, choose_by_chance, count_of, hold_out, summary
from kareus_pp.measure.learn import Learned, learn
from kareus_pp.measure.runs_file import load_runs


def learn_command(
    runs: Path = typer.Argument(help="Runs file, JSON or gzipped JSON."),
    train: float | None = typer.Option(
        None,
        help="Learn from this many plans, or from this share of them if below 1, and predict "
        "the others.",
    ),
    seed: int = typer.Option(0, help="Seed of the choice of training plans."),
    design: bool = typer.Option(
        False, "--design", help="Let the experiment design choose the training plans, not chance."
    ),
    anchor: bool = typer.Option(
        True,
        help="Always train on the plan with the highest clocks, as a profile phase does; "
        "without it, a draw may have to extrapolate to it.",
    ),
    json_output: bool = typer.Option(False, "--json", help="Print JSON."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the profile here."),
) -> None:
    """Learn time and energy of every instruction from recorded training iterations.

    With --train, learn from a part of the plans and predict the others; of a left-out plan only
    its clocks are read. Errors and half-widths are fractions.
    """
    recorded = load_runs(runs)
    if train is None:
        if design:
            raise ProfileError("--design chooses training plans; give their number with --train")
        learned = learn(recorded)
        document = describe(learned)
    else:
        count = count_of(train, len(recorded.runs))
        chosen = (
            choose_by_design(recorded, count)
            if design
            else choose_by_chance(recorded, count, seed, anchor)
        )
        holdout = hold_out(recorded, chosen)
        learned = holdout.learned
        document = {**summary(holdout), **describe(learned), "plans": _plans(holdout)}
    if output is not None:
        learned.profile.save(output)
    if json_output:
        typer.echo(json.dumps(document, indent=1, allow_nan=False))
    else:
        _print(document, learned)


def describe(learned: Learned) -> dict[str, object]:
    """What was learned, as JSON."""
    report = learned.report
    return {
        "blocking_power_w": list(learned.profile.blocking_power_w),
        "overhead_s": learned.profile.overhead.iteration_s,
        "classes": len(learned.profile.options),
        "options": sum(len(options) for options in learned.profile.options.values()),
        "source": learned.profile.device.source.value,
        "supports_planning": report.supports_planning,
        "reasons": list(report.reasons),
        "notes": list(report.notes),
        "unknown_classes": [str(cls) for cls in report.unknown_classes],
        "rejected": dict(report.rejected or {}),
    }


def _plans(holdout: Holdout) -> list[dict[str, object]]:
    return [
        {
            "plan": c.name,
            "predicted_time_s": c.predicted.time_s,
            "half_width_time_s": c.predicted.time_half_s,
            "measured_time_s": c.time_s,
            "standard_error_time_s": c.time_se_s,
            "predicted_energy_j": c.predicted.energy_j,
            "half_width_energy_j": c.predicted.energy_half_j,
            "measured_energy_j": c.energy_j,
            "standard_error_energy_j": c.energy_se_j,
        }
        for c in holdout.test
    ]


def _print(document: dict[str, object], learned: Learned) -> None:
    console = Console(soft_wrap=True)
    if "plans_test" in document:
        table = Table("left-out plans", "time", "energy")
        coverage, width = document["coverage_90"], document["half_width_median"]
        assert isinstance(coverage, dict)
        assert isinstance(width, dict)
        rows = (
            ("mean absolute error", document["time_mape"], document["energy_mape"]),
            ("worst plan", document["time_max"], document["energy_max"]),
            ("inside the 90 % interval", coverage["time"], coverage["energy"]),
            ("median half-width", width["time"], width["energy"]),
        )
        for name, time, energy in rows:
            table.add_row(name, _percent(time), _percent(energy))
        console.print(
            f"{document['plans_train']} plans to learn from, {document['plans_test']} to predict"
        )
        console.print(table)
    watts = ", ".join(f"{value:.1f}" for value in learned.profile.blocking_power_w)
    console.print(f"blocking power of the stages in W: {watts}")
    for note in learned.report.notes:
        console.print(note)
    if learned.report.supports_planning:
        console.print("the data support a plan")
    for reason in learned.report.reasons:
        console.print(f"the data do not support a plan: {reason}")


def _percent(value: object) -> str:
    return f"{value:.2%}" if isinstance(value, float) else "unknown"
