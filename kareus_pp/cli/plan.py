"""`kareus-pp plan`: plans and frontiers from a profile."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kareus_pp.builders import P2P_MODES, SCHEDULE_NAMES, build_schedule
from kareus_pp.errors import ConfigError, TargetError
from kareus_pp.evaluate import FREE_SWITCHES
from kareus_pp.plan import Plan
from kareus_pp.planner import Planner, PlannerOptions, undominated
from kareus_pp.planner.splitting import without_overlap
from kareus_pp.planner.warmup import compile_loops
from kareus_pp.profile import Profile
from kareus_pp.profile_csv import fit_to_schedule, load_any_profile
from kareus_pp.schedule import Schedule
from kareus_pp.target import TARGET_HELP, Fastest, Target, parse_target

_OBJECTIVES = {"energy": "least-energy", "edp": "edp", "fastest": "fastest"}


def plan(
    profile: Path = typer.Argument(..., help="Profile: JSON of kareus-pp, or CSV."),
    schedule: str = typer.Option(
        "1f1b", help=f"Schedule: {', '.join(SCHEDULE_NAMES)}, or a schedule file."
    ),
    microbatches: int = typer.Option(8, help="Microbatches of an iteration."),
    chunks: int = typer.Option(1, help="Model chunks on a stage, for interleaved schedules."),
    p2p: str = typer.Option(
        "asynchronous",
        help=f"Whether stages of interleaved 1F1B wait where they send: {', '.join(P2P_MODES)} "
        "(Megatron-Core with and without --overlap-p2p-communication).",
    ),
    blocking_power: str = typer.Option(
        "", help="Power of a waiting GPU in watts; one number, or one for each stage with commas."
    ),
    deadline: float = typer.Option(None, help="Target: least energy in so many seconds."),
    slowdown: float = typer.Option(None, help="Target: least energy at most so many % slower."),
    energy_budget: float = typer.Option(None, help="Target: shortest with so many joules."),
    power_cap: float = typer.Option(None, help="Target: shortest at so many watts on average."),
    objective: str = typer.Option(None, help="Target: energy, edp or fastest."),
    straggler: float = typer.Option(None, help="Target: another pipeline needs so many seconds."),
    cost: str = typer.Option(None, help="Target: least cost, PER_JOULE,PER_HOUR."),
    target: str = typer.Option(None, help=f"Target in text form: {TARGET_HELP}."),
    points: int = typer.Option(
        None, help="Points of the frontier; default 10, or 1 where there is a target."
    ),
    time_limit: float = typer.Option(
        None, help="Seconds for each plan; default 20 for one plan, a quick one for a frontier."
    ),
    solver: str = typer.Option(
        "highs", help="Solver behind PuLP: highs (cbc where highspy is missing) or cbc."
    ),
    switch_delay: float = typer.Option(
        None, help="Delay of a clock switch in seconds; default: as the profile knows it, else 0."
    ),
    switch_energy: float = typer.Option(None, help="Energy of a clock switch in joules."),
    max_switches: int = typer.Option(None, help="Most clock switches of a stage."),
    min_dwell: float = typer.Option(0.0, help="Least seconds between clock switches."),
    clocks: str = typer.Option("", help="Clocks to use in MHz, with commas; default: all."),
    stage_clocks: list[str] = typer.Option(
        [], help="Clocks of one stage, as in 2=1200,1410; may be repeated."
    ),
    smoothing: str = typer.Option("auto", help="auto, none, physical, local or exponential."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    output: Path = typer.Option(
        None, "--output", "-o", help="Write the frontier, or the one plan, to this file."
    ),
) -> None:
    """Plan clocks for every instruction: one plan for a target, or a frontier."""
    chosen = _target(
        {
            "deadline": deadline,
            "slowdown": slowdown,
            "energy-budget": energy_budget,
            "power-cap": power_cap,
            "straggler": straggler,
            "cost": cost,
        },
        objective,
        target,
    )
    loaded = load_any_profile(profile, _numbers(blocking_power, "--blocking-power", float))
    if Path(schedule).is_file():
        planned = Schedule.load(schedule)
    else:
        planned = build_schedule(schedule, loaded.stages, microbatches, chunks, p2p)
    loaded = fit_to_schedule(loaded, planned)
    options = PlannerOptions(
        solver=solver,  # type: ignore[arg-type]
        time_limit_s=20.0 if time_limit is None else time_limit,
        switch_delay_s=switch_delay,
        switch_energy_j=switch_energy,
        max_switches=max_switches,
        min_dwell_s=min_dwell,
        clocks_mhz=_numbers(clocks, "--clocks", int),
        stage_clocks_mhz=_stage_clocks(stage_clocks),
        smoothing=smoothing,  # type: ignore[arg-type]
    )
    overlaps = loaded != without_overlap(loaded)
    compile_s = compile_loops(options.solver, overlaps)
    began = time.perf_counter()
    planner = Planner(planned, loaded, options)
    count = points if points is not None else (10 if chosen is None else 1)
    if count == 1:
        plans: tuple[Plan, ...] = (planner.plan(chosen or Fastest()),)
    else:
        plans = _distinct(planner.sweep(count, planner.longest_useful_s, time_limit or 0.0))
    single = planner.plan(chosen) if chosen is not None and count != 1 else None
    solve_s = time.perf_counter() - began
    if output is not None and count == 1:
        plans[0].save(output)
    elif output is not None:
        undominated(plans).save(output)
    report = _report(planner, plans, loaded, solve_s, compile_s)
    report["points_asked"] = count
    if single is not None:
        report["chosen"] = _point(single)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _show(report, chosen)


def _distinct(plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Neighbouring deadlines may have the same plan: each plan once."""
    first = plans[:1]
    rest = (b for a, b in itertools.pairwise(plans) if a.settings != b.settings)
    return (*first, *rest)


def _target(
    numbers: dict[str, float | str | None], objective: str | None, text: str | None
) -> Target | None:
    given = {name: value for name, value in numbers.items() if value is not None}
    texts = [f"{name}:{value}" for name, value in given.items()]
    if objective is not None:
        if objective not in _OBJECTIVES:
            raise TargetError(
                f"the objective {objective!r} is unknown; use one of {', '.join(_OBJECTIVES)}"
            )
        texts.append(_OBJECTIVES[objective])
    if text is not None:
        texts.append(text)
    if len(texts) > 1:
        raise TargetError(f"several targets were given ({', '.join(texts)}); give one of them")
    return parse_target(texts[0]) if texts else None


def _numbers(text: str, option: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(
            f"{option} is {text!r} and must be numbers with commas between them"
        ) from None


def _stage_clocks(texts: list[str]) -> dict[int, tuple[int, ...]]:
    found = {}
    for text in texts:
        stage, equals, clocks = text.partition("=")
        if not equals or not stage.strip().isdigit():
            raise ConfigError(f"--stage-clocks is {text!r}; write stage=clocks, as in 2=1200,1410")
        found[int(stage)] = _numbers(clocks, "--stage-clocks", int)
        if not found[int(stage)]:
            raise ConfigError(f"--stage-clocks is {text!r} and names no clock; write 2=1200,1410")
    return found


def _point(plan: Plan) -> dict[str, Any]:
    return {
        "time_s": plan.time_s,
        "energy_j": plan.energy_j,
        "bound_j": plan.bound_j,
        "gap": plan.gap,
        "switches": plan.switches,
        "target": plan.target,
    }


def _report(
    planner: Planner, plans: tuple[Plan, ...], profile: Profile, solve_s: float, compile_s: float
) -> dict[str, Any]:
    switch = planner.problem.switch
    return {
        "points": [_point(p) for p in plans],
        "shortest_s": planner.shortest_s,
        "least_energy_s": planner.least_energy_s,
        "longest_useful_s": planner.longest_useful_s,
        "solve_s": solve_s,
        "compile_s": compile_s,
        "method": planner.method,
        "switch_delay_s": switch.delay_s,
        "switch_energy_j": switch.energy_j,
        "switches_unknown": switch == FREE_SWITCHES and planner.options.switch_delay_s is None,
        "smoothing": planner.smoothing,
        "source": profile.device.source.value,
        "emulated": profile.device.source.is_emulated,
    }


def _show(report: dict[str, Any], target: Target | None) -> None:
    table = Table("time \\[s]", "energy [J]", "bound [J]", "gap [%]", "switches")
    for point in [*report["points"], *([report["chosen"]] if "chosen" in report else [])]:
        gap = "" if point["gap"] is None else f"{point['gap'] * 100:.3f}"
        table.add_row(
            f"{point['time_s']:.6g}",
            f"{point['energy_j']:.6g}",
            f"{point['bound_j']:.6g}",
            gap,
            str(point["switches"]),
        )
    console = Console()
    console.print(table)
    kind = " (emulated)" if report["emulated"] else ""
    console.print(
        f"shortest {report['shortest_s']:.6g} s, least energy at {report['least_energy_s']:.6g} s, "
        f"longest useful {report['longest_useful_s']:.6g} s; solved in {report['solve_s']:.2f} s "
        f"by {report['method']}; energy from {report['source']}{kind}"
    )
    if len(report["points"]) < report["points_asked"]:
        console.print(
            f"{report['points_asked']} points were asked for; {len(report['points'])} plans differ"
        )
    wanted = getattr(target, "time_s", None)
    if wanted is not None and wanted < report["shortest_s"]:
        console.print(
            f"no plan takes {wanted:.6g} s: the shortest iteration takes "
            f"{report['shortest_s']:.6g} s, and this is its plan"
        )
    if report["switches_unknown"]:
        console.print("clock switches are free here: their delay is not known; see --switch-delay")
