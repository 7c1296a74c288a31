"""The planner's gaps, frontiers, scaling, noise, switches and savings, beside peers and bounds.

`python -m benchmarks.planner` runs all sections (about 20 minutes, lowtime included);
`--section NAME` one of them, `--fast` smaller versions of all without lowtime at 24 microbatches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import planner_quality, planner_studies
from benchmarks.planner_data import data_folder
from kareus_pp.planner.warmup import compile_loops


def _sections(
    fast: bool, seconds: float | None, microbatches: list[int] | None
) -> dict[str, Callable[[], dict[str, Any]]]:
    def limit(usual: float) -> float:
        return seconds if seconds is not None else usual

    counts = tuple(microbatches or ((12, 24) if fast else (12, 24, 48, 96)))
    return {
        "gaps": lambda: planner_quality.gaps(limit(0.0 if fast else 10.0), counts),
        "held-out": planner_quality.held_out,
        "frontier": lambda: planner_quality.frontiers(
            100,
            tuple(microbatches or ((12, 24) if fast else (12, 24, 96))),
            (12,) if fast else (12, 24),
        ),
        "scaling": lambda: planner_quality.scaling(
            ((8, 512),) if fast else ((8, 512), (16, 512), (64, 1024)), limit(8.0)
        ),
        "noise": lambda: planner_studies.noise(3 if fast else 20),
        "switches": lambda: planner_studies.switches(limit(1.0 if fast else 5.0)),
        "splitting": lambda: planner_studies.splitting(limit(1.0 if fast else 8.0)),
        "savings": lambda: planner_studies.savings(limit(0.0 if fast else 2.0)),
    }


def main() -> None:
    """Run the chosen sections and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--section", action="append", help="only this section; may be repeated")
    parser.add_argument("--fast", action="store_true", help="smaller versions of all sections")
    parser.add_argument("--seconds", type=float, help="time limit of a plan, instead of the usual")
    parser.add_argument(
        "--microbatches", type=int, action="append", help="only this many, in gaps and frontier"
    )
    arguments = parser.parse_args()
    sections = _sections(arguments.fast, arguments.seconds, arguments.microbatches)
    wanted = arguments.section or list(sections)
    unknown = [name for name in wanted if name not in sections]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; use one of {', '.join(sections)}")
    data_folder()
    report: dict[str, Any] = {"compile_s": compile_loops()}
    for name in wanted:
        report[name] = sections[name]()
        if not arguments.json:
            _show(name, report[name])
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"compilation of inner loops: {report['compile_s']:.1f} s, not counted above")


def _show(name: str, section: dict[str, Any]) -> None:
    console = Console(width=220)
    for key, value in section.items():
        if not isinstance(value, list):
            console.print(f"{name}: {key} {value}")
            continue
        columns = list(dict.fromkeys(column for row in value for column in row))
        table = Table(*columns, title=f"{name}: {key}")
        for row in value:
            table.add_row(*(_text(row.get(column, "")) for column in columns))
        console.print(table)


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
