"""A soak of the overlap executor: random settings and injected exceptions.

python -m benchmarks.overlap_soak [--json] [--steps 2000]
"""

from __future__ import annotations

import argparse
import json

from tests.overlap import core_cases
from tests.overlap.ranks import ranks


def main() -> None:
    """Run the soak on two ranks and print what grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--steps", type=int, default=2000, help="training steps")
    arguments = parser.parse_args()
    with ranks(2, timeout_s=1200) as two:
        rows = two.run(core_cases.soak, arguments.steps)
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        for rank, row in enumerate(rows):
            print(f"rank {rank}: " + ", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
