"""What resets the clocks when a job dies: the crash table, under the real launchers.

`python -m benchmarks.crash [--json]`; stub GPUs, real torchrun and deepspeed, real guards.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.stub.crash import ACTIONS, LAUNCHERS, Row, crash


def run(launchers: tuple[str, ...], actions: tuple[str, ...]) -> list[Row]:
    """Do every action to a job of every launcher, one job after the other."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kareus-pp-crash-") as folder:
        for launcher in launchers:
            for action in actions:
                rows.append(crash(action, launcher, Path(folder) / f"job-{len(rows)}"))
    return rows


def main() -> None:
    """Run the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON rows")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="only this launcher")
    options = parser.parse_args()
    rows = run((options.launcher,) if options.launcher else LAUNCHERS, ACTIONS)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table("action", "launcher", "unlocked after", "left processes", "outlived the action")
    for row in rows:
        unlocked = "NEVER" if row.unlocked_s is None else f"{row.unlocked_s * 1e3:.1f} ms"
        table.add_row(
            row.action, row.launcher, unlocked, str(row.left_processes), str(row.outlived)
        )
    Console().print(table)
    print("stub GPUs; unlocked after: longest time from a rank's own death to its GPU's reset")


if __name__ == "__main__":
    main()
