"""Overlap against the unmodified frameworks: errors and launch slots hit, case by case.

    python -m benchmarks.overlap_equality [--json] [--settings 75]

Megatron-Core 0.20 is run from the checkout that `KAREUS_PP_MEGATRON_020` names, and skipped, saying
so, where it names none. Gloo on CPU; float64 but where the case says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from tests.overlap import cases, deepspeed_case, pipeline_case
from tests.overlap.ranks import Ranks, ranks

NEW_VERSION = "KAREUS_PP_MEGATRON_020"


def main() -> None:
    """Run all cases and print one row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--settings", type=int, default=75, help="slot settings of each case")
    parser.add_argument("--steps", type=int, default=20, help="steps of the pipeline cases")
    arguments = parser.parse_args()
    rows = []
    for row in _rows(arguments.settings, arguments.steps):
        rows.append(row)
        if not arguments.json:
            error = row["max_rel_error"]
            shown = row.get("skipped") or f"{error:.1e}  slots {row['slots_hit']}"
            print(f"{row['case']:45} {row['version']:22} {shown}", flush=True)
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=1))


def _rows(settings: int, steps: int) -> Iterator[dict[str, Any]]:
    yield from _megatron_rows("", settings, steps)
    path = os.environ.get(NEW_VERSION, "")
    if path:
        yield from _megatron_rows(path, settings, steps)
    else:
        yield {
            "case": "all",
            "version": "megatron-core 0.20",
            "max_rel_error": None,
            "slots_hit": None,
            "skipped": f"skipped: {NEW_VERSION} names no checkout",
        }
    with ranks(4, timeout_s=300) as four:
        for case, arguments in deepspeed_case.CASES.items():
            yield _row(four, deepspeed_case.train, f"DeepSpeed PP 2 x TP 2, {case}", **arguments)


def _megatron_rows(path: str, settings: int, steps: int) -> Iterator[dict[str, Any]]:
    with ranks(2, path, timeout_s=300) as two:
        for case, arguments in cases.EQUALITY.items():
            yield _row(two, cases.equality, case, settings=settings, **arguments)
        for case, changes in cases.DROPOUT.items():
            yield _row(two, cases.dropout, case, changes, settings=settings)
    with ranks(4, path, timeout_s=300) as four:
        yield _row(four, cases.grad_reduce, "DDP overlap_grad_reduce", steps=20)
        for virtual in (None, 2):
            for share in (0.0, 0.3):
                name = "1F1B" if virtual is None else "interleaved"
                case = f"PP 2 x TP 2, {name}, {share:.0%} sequential"
                yield _row(
                    four, pipeline_case.pipeline, case, virtual, steps=steps, sequential_share=share
                )


def _row(group: Ranks, function: Callable[..., Any], case: str, *args: Any, **kw: Any) -> Any:
    found = group.run(function, case, *args, **kw)
    row = dict(found[0])
    row["max_rel_error"] = max(other["max_rel_error"] for other in found)
    row["executed"] = {" ".join(key): n for key, n in row.get("executed", {}).items()}
    return row


if __name__ == "__main__":
    main()
