"""What the hooks add to an instruction, in place, in the frameworks' own execution loops.

Every framework executes its own schedule with instructions that do nothing, with and without the
hooks in turns; the rest of the loop cancels out. The session is real and applies a plan that
changes clocks at every instruction.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kareus_pp.runtime.events import read_events
from kareus_pp.runtime.messages import APPLY
from kareus_pp.runtime.session import Session

MEASUREMENTS = [
    "benchmarks.hooks_deepspeed:measure",
    "benchmarks.hooks_megatron:measure",
    "benchmarks.hooks_torch:measure",
]
"""One function for each framework, as `module:function`; each yields rows."""
LIMIT_US = 5.0


@dataclass(frozen=True)
class Row:
    """One schedule of one framework.

    Attributes:
        framework: Name and version.
        schedule: Name of the schedule.
        added_us_median: Time that the hooks add to one instruction, in microseconds.
        stream_equal: Whether the recorded stream is the framework's own order on every stage.
    """

    framework: str
    schedule: str
    added_us_median: float
    stream_equal: bool


def added_us(
    bare: Callable[[], None], hooked: Callable[[], None], instructions: int, repeats: int = 200
) -> float:
    """Median over `repeats` of the time that `hooked` takes longer than `bare`, per instruction.

    Args:
        bare: Executes one step without hooks.
        hooked: Executes the same step with hooks.
        instructions: Hooked instructions of a step.
        repeats: Pairs of steps; the two of a pair follow each other.
    """

    def time_s(step: Callable[[], None]) -> float:
        # The session's thread works off the step before, or it would slow the bare one.
        time.sleep(0.0005)
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    for _ in range(10):
        bare(), hooked()
    pairs = [(time_s(bare), time_s(hooked)) for _ in range(repeats)]
    return statistics.median(b - a for a, b in pairs) / instructions * 1e6


def await_applied(session: Session, step: Callable[[], None]) -> None:
    """Run steps until one has followed the plan of the session.

    Raises:
        RuntimeError: None did within half a minute.
    """
    events = session.config.output / f"events-rank{session.topology.rank}.jsonl"
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s:
        step()
        time.sleep(0.01)
        if session.phase == APPLY and any(
            event["event"] == "step" and event["phase"] == APPLY for event in read_events(events)
        ):
            return
    raise RuntimeError(f"the plan was not applied: {session.standing_down or 'no reason is known'}")


def measure_all(names: Iterable[str]) -> list[Row]:
    """Rows of all frameworks that are installed; the others are named on stderr."""
    rows: list[Row] = []
    for name in names:
        module, function = name.split(":")
        try:
            # Frameworks print; stdout belongs to the rows.
            with contextlib.redirect_stdout(sys.stderr):
                rows += getattr(importlib.import_module(module), function)()
        except ModuleNotFoundError as error:
            print(f"{name} is left out: {error.name} is not installed", file=sys.stderr)
    # A framework's process group that is left open can abort the process at its end.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
    return rows


def main() -> None:
    """Print the rows; exit status 1 where a stream differs or a median is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    as_json = parser.parse_args().json
    rows = measure_all(MEASUREMENTS)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        table = Table("framework", "schedule", "added us (median)", "stream equal")
        for row in rows:
            table.add_row(
                row.framework, row.schedule, f"{row.added_us_median:.2f}", str(row.stream_equal)
            )
        Console().print(table)
    sys.exit(any(not r.stream_equal or r.added_us_median > LIMIT_US for r in rows))


if __name__ == "__main__":
    main()
