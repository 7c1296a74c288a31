"""How well unseen plans are predicted on measured training runs, and what bad readings do to it.

1. Half of the plans to learn from, by chance, mean over seeds.
2. Eight plans, chosen by the experiment design.
3. Every workload with the model constants that predict the other workloads best.
4. Throttling, drifting temperature, a counter reset, an outlier iteration and a clock that is
   never reached, put into a job whose truth is known: what is rejected, and the error that remains.

Run: `python -m benchmarks.learning [--json] [--data FOLDER] [--seeds N]`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.learning_faults import inject_all
from kareus_pp.measure import energy_model, overhead, time_model
from kareus_pp.measure.design import choose_by_design
from kareus_pp.measure.holdout import Holdout, choose_by_chance, count_of, hold_out, summary
from kareus_pp.measure.model import JobModel
from kareus_pp.measure.reject import reject_outliers
from kareus_pp.measure.replay import Replay
from kareus_pp.measure.runs import Runs
from kareus_pp.measure.runs_file import load_runs
from kareus_pp.measure.table import entry_of, layout_of

VARIANTS = tuple((length, smooth) for length in (0.1, 0.2, 0.4) for smooth in (True, False))
"""Length scale of the deviations in log f, and whether the overhead may vary."""


def data_folder() -> Path:
    root = Path(__file__).resolve().parent.parent
    return Path(os.environ.get("KAREUS_PP_DATA", root.parent / "shared" / "data"))


def row(holdouts: Sequence[Holdout]) -> dict[str, Any]:
    """Mean over the holdouts, worst plans with the standard error of their measurement."""
    found: list[dict[str, Any]] = [summary(holdout) for holdout in holdouts]
    plans = [c for holdout in holdouts for c in holdout.test]
    worst_time = max(plans, key=lambda c: abs(c.time_error or 0.0))
    worst_energy = max(plans, key=lambda c: abs(c.energy_error or 0.0))

    def errors_of(se: float | None, value: float | None) -> float | None:
        return None if se is None or not value else 3 * se / value

    def mean(name: str, part: str | None = None) -> float:
        return float(np.mean([f[name] if part is None else f[name][part] for f in found]))

    return {
        "time_mape": mean("time_mape"),
        "energy_mape": mean("energy_mape"),
        "time_max": abs(worst_time.time_error or 0.0),
        "time_max_3se": errors_of(worst_time.time_se_s, worst_time.time_s),
        "energy_max": abs(worst_energy.energy_error or 0.0),
        "energy_max_3se": errors_of(worst_energy.energy_se_j, worst_energy.energy_j),
        "coverage_time": mean("coverage_90", "time"),
        "coverage_energy": mean("coverage_90", "energy"),
        "width_time": mean("half_width_median", "time") / mean("time_mape"),
        "width_energy": mean("half_width_median", "energy") / mean("energy_mape"),
    }


def errors(runs: Runs, train: Sequence[int], variant: tuple[float, bool]) -> tuple[float, float]:
    """Mean absolute error of time and energy with other model constants, measured power as is."""
    layout = layout_of(runs)
    runs, _ = reject_outliers(runs)
    entries = {i: e for i, run in enumerate(runs.runs) if (e := entry_of(run, layout)) is not None}
    rest = [entries[i] for i in entries if i not in train]
    length, smooth = variant
    with (
        patch.object(time_model, "LENGTH", length),
        patch.object(energy_model, "LENGTH", length),
        patch.object(overhead, "MIN_PLANS", overhead.MIN_PLANS if smooth else 1 << 30),
    ):
        model = JobModel(
            [entries[i] for i in train], layout, Replay(runs.schedule), runs.blocking_power_w
        )
        found = model.predict([entry.applied for entry in rest])
    time_s = np.array([entry.time_s for entry in rest])
    energy_j = np.array([entry.energy_j.sum() for entry in rest])
    return (
        float(np.nanmean(np.abs(found.time_s / time_s - 1))),
        float(np.nanmean(np.abs(found.total_j / energy_j - 1))),
    )


def leave_one_out(workloads: dict[str, Runs], seeds: int) -> dict[str, Any]:
    """For each workload its error with the variant that is best on all others."""
    table: dict[str, dict[tuple[float, bool], tuple[float, float]]] = {}
    for name, runs in workloads.items():
        trains = [
            choose_by_chance(runs, count_of(0.5, len(runs.runs)), seed) for seed in range(seeds)
        ]
        table[name] = {}
        for variant in VARIANTS:
            found = np.array([errors(runs, train, variant) for train in trains]).mean(axis=0)
            table[name][variant] = (float(found[0]), float(found[1]))
    result = {}
    for name in workloads:
        others = [other for other in workloads if other != name]
        best = min(
            VARIANTS,
            key=lambda variant: sum(
                table[o][variant][part] / min(table[o][v][part] for v in VARIANTS)
                for o in others
                for part in (0, 1)
            ),
        )
        result[name] = {
            "length": best[0],
            "smooth_overhead": best[1],
            "time_mape": table[name][best][0],
            "energy_mape": table[name][best][1],
        }
    return result


def print_rows(title: str, rows: dict[str, dict[str, Any]]) -> None:
    print(title)
    print(
        f"{'':28s}{'time':>8s}{'worst':>8s}{'(3 SE)':>9s}{'energy':>8s}{'worst':>8s}{'(3 SE)':>9s}"
        f"{'inside 90 %':>14s}{'width / error':>15s}"
    )
    for name, r in rows.items():
        se = [
            f"{v:9.2%}" if v is not None else f"{'':9s}"
            for v in (r["time_max_3se"], r["energy_max_3se"])
        ]
        print(
            f"{name:28s}{r['time_mape']:8.2%}{r['time_max']:8.2%}{se[0]}"
            f"{r['energy_mape']:8.2%}{r['energy_max']:8.2%}{se[1]}"
            f"{r['coverage_time']:7.2f}{r['coverage_energy']:7.2f}"
            f"{r['width_time']:8.1f}{r['width_energy']:7.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    folder = arguments.data or data_folder() / "sosp24" / "runs"
    workloads = {
        path.name.removesuffix(".json.gz"): load_runs(path)
        for path in sorted(folder.glob("*.json.gz"))
    }
    result: dict[str, Any] = {}
    for name, anchor in (("half", True), ("half, pure chance", False)):
        result[name] = {
            workload: row(
                [
                    hold_out(
                        runs, choose_by_chance(runs, count_of(0.5, len(runs.runs)), seed, anchor)
                    )
                    for seed in range(arguments.seeds)
                ]
            )
            for workload, runs in workloads.items()
        }
    result["design"] = {
        workload: row([hold_out(runs, choose_by_design(runs, 8))])
        for workload, runs in workloads.items()
    }
    result["leave one workload out"] = (
        leave_one_out(workloads, arguments.seeds) if workloads else {}
    )
    result["faults"] = inject_all()
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    if not workloads:
        print(f"no measured runs in {folder}: their tables are left out")
    else:
        print_rows(f"half of the plans, {arguments.seeds} seeds (measured)", result["half"])
        print_rows(
            "the same by pure chance: the plan with the highest clocks may be left out",
            result["half, pure chance"],
        )
        print_rows("8 plans chosen by the design (measured)", result["design"])
        print("constants chosen on the other workloads, half of the plans (measured)")
        for name, r in result["leave one workload out"].items():
            print(
                f"{name:28s}{r['time_mape']:8.2%} time {r['energy_mape']:8.2%} energy, length "
                f"{r['length']}, overhead {'smooth' if r['smooth_overhead'] else 'constant'}"
            )
    print(
        "faults put into a job with known truth (synthetic): what is rejected, and options' error"
    )
    for name, r in result["faults"].items():
        print(
            f"{name:28s}rejected {r['rejected']}, kept {r['kept']} of {r['iterations']}; "
            f"time off {r['time_mean']:.2%} (worst {r['time_worst']:.2%}), energy off "
            f"{r['energy_mean']:.2%} (worst {r['energy_worst']:.2%}); without rejection energy off "
            f"{r['energy_unchecked']:.2%}"
        )


if __name__ == "__main__":
    main()
