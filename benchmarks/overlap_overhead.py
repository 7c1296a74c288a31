"""Overhead of overlap per layer, on CPU with gloo and 8 tiny Megatron-Core layers.

    python -m benchmarks.overlap_overhead [--json] [--repeats 60]

Attached but sequential beside the unmodified block, and overlapped beside two runs of half the
batch, in one process and alternating. There is nothing to gain here: gloo computes on the same
cores. The figures are the cost of the machinery.
"""

from __future__ import annotations

import argparse
import json

from tests.overlap import overhead_case
from tests.overlap.ranks import ranks


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument(
        "--repeats", type=int, default=60, help="repetitions; the least counts, noise only adds"
    )
    arguments = parser.parse_args()
    with ranks(2, timeout_s=300) as two:
        rows = two.run(overhead_case.overhead, arguments.repeats)[0]
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        print(f"{row['case']} against {row['against']}")
        for label, value in row.items():
            if label not in ("case", "against"):
                print(f"  {label}: {value}")


if __name__ == "__main__":
    main()
