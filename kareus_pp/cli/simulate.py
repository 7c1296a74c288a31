"""`kareus-pp simulate`: what a plan costs on a profile, by longest path."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from kareus_pp.errors import ConfigError
from kareus_pp.evaluate import SwitchPrice, evaluate
from kareus_pp.plan import Plan
from kareus_pp.profile_csv import fit_to_schedule, load_any_profile


def simulate(
    plan: Path = typer.Argument(..., help="Plan file."),
    profile: Path = typer.Option(..., help="Profile: JSON of kareus-pp, or CSV."),
    blocking_power: str = typer.Option(
        "", help="Power of a waiting GPU in watts; one number, or one for each stage with commas."
    ),
    switch_delay: float = typer.Option(
        None, help="Delay of a clock switch in seconds; default: as the plan was made with."
    ),
    switch_energy: float = typer.Option(
        None, help="Energy of a clock switch in joules; default: as the plan was made with."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Evaluate a plan on a profile: time, energy, and the idle time of every stage."""
    loaded_plan = Plan.load(plan)
    try:
        power = tuple(float(part) for part in blocking_power.split(",") if part.strip())
    except ValueError:
        raise ConfigError(
            f"--blocking-power is {blocking_power!r} and must be numbers with commas between them"
        ) from None
    for name, value in (("--switch-delay", switch_delay), ("--switch-energy", switch_energy)):
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{name} is {value!r} and must be 0 or more, and finite")
    loaded = fit_to_schedule(load_any_profile(profile, power), loaded_plan.schedule)
    price = SwitchPrice(
        loaded_plan.switch_delay_s if switch_delay is None else switch_delay,
        loaded_plan.switch_energy_j if switch_energy is None else switch_energy,
    )
    found = evaluate(loaded_plan.schedule, loaded_plan.settings, loaded, price)
    report = {
        "time_s": found.time_s,
        "energy_j": found.energy_j,
        "idle_s": list(found.idle_s),
        "switches": loaded_plan.switches,
        "switch_delay_s": price.delay_s,
        "switch_energy_j": price.energy_j,
        "note": loaded_plan.half_split,
        "source": loaded.device.source.value,
        "emulated": loaded.device.source.is_emulated,
    }
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    kind = " (emulated)" if report["emulated"] else ""
    typer.echo(f"time {found.time_s:.6g} s, energy {found.energy_j:.6g} J{kind}")
    for stage, idle in enumerate(found.idle_s):
        typer.echo(f"stage {stage}: idle {idle:.6g} s")
    if report["note"]:
        typer.echo(f"note: {report['note']}")
