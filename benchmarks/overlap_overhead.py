"""Overhead of overlap per layer, on CPU with 8 tiny Megatron-Core layers.

    python -m benchmarks.overlap_overhead [--json] [--rounds 40] [--gloo]

Attached but sequential beside the unmodified block, and overlapped beside two runs of half the
batch, in one process and alternating. The first row of each set compares the unmodified block with
itself: what it shows is noise. There is nothing to gain here; the figures are the cost of the
machinery, without communication (torch's fake backend), and on request between two processes with
gloo, where the noise of the communication is larger than the cost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from typing import Any

from tests.overlap import overhead_case
from tests.overlap.ranks import ranks


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument(
        "--rounds", type=int, default=40, help="rounds; the median of their differences counts"
    )
    parser.add_argument("--gloo", action="store_true", help="measure between two processes too")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds} and must be 1 or more")
    rows = _rows(arguments.rounds, arguments.gloo)
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        print(f"{row['case']} against {row['against']} ({row['setup']})")
        for label, value in row.items():
            if label not in ("case", "against", "setup"):
                print(f"  {label}: {value}")


def _rows(rounds: int, gloo: bool) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one_core in (True, False):
        setup = f"no communication, {'one core' if one_core else 'any core'}"
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[setup] = pool.apply(overhead_case.overhead_alone, (rounds, one_core))
    if gloo:
        with ranks(2, timeout_s=900) as two:
            found["gloo, two processes"] = two.run(overhead_case.overhead, rounds)[0]
    return [{"setup": setup, **row} for setup, rows in found.items() for row in rows]


if __name__ == "__main__":
    main()
