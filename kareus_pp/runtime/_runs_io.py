"""Runs as a file between the leader and the background solver."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic import TypeAdapter

from kareus_pp._files import read_document, write_document
from kareus_pp.measure.runs import IterationRecord, PlanRun, Runs
from kareus_pp.profile import Source
from kareus_pp.schedule import Schedule
from kareus_pp.setting import Setting


def save_runs(runs: Runs, path: Path) -> None:
    """Write runs."""
    write_document(
        path,
        "runs",
        1,
        {
            "schedule": runs.schedule.to_dict(),
            "clocks_mhz": runs.clocks_mhz,
            "source": runs.source.value,
            "scope": runs.scope,
            "facts": dict(runs.facts),
            "runs": [
                {
                    "name": run.name,
                    "settings": [" ".join(map(str, row)) for row in run.settings],
                    "iterations": [dataclasses.asdict(i) for i in run.iterations],
                }
                for run in runs.runs
            ],
        },
    )


def load_runs(path: Path) -> Runs:
    """Read runs."""
    body = read_document(path, "runs", 1)
    records = TypeAdapter(tuple[IterationRecord, ...])
    return Runs(
        schedule=Schedule.from_dict(body["schedule"]),
        runs=tuple(
            PlanRun(
                tuple(tuple(Setting.parse(t) for t in row.split()) for row in run["settings"]),
                records.validate_python(run["iterations"]),
                run["name"],
            )
            for run in body["runs"]
        ),
        clocks_mhz=tuple(body["clocks_mhz"]),
        source=Source(body["source"]),
        scope=body["scope"],
        facts=body["facts"],
    )
