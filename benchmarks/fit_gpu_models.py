"""Fit the GPU models of the package to measured stage profiles and print the errors.

    python -m benchmarks.fit_gpu_models [--data FOLDER] [--write] [--json]

Without `--write` the files in configs/gpu_models stay as they are and only their errors are shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import yaml

from kareus_pp._files import write_text
from kareus_pp.simulate.fit import (
    Assumed,
    Curve,
    fit_errors,
    fit_gpu_model,
    read_curves,
    to_yaml_values,
)
from kareus_pp.simulate.gpu_model import GpuModel, Thermal, load_gpu_model

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "a100": ("gpt3-175b+a100_sxm.csv", "bloom+a100_sxm.csv"),
    "a40": ("gpt3-175b+a40.csv",),
}
# Datasheet peaks (dense bf16, memory) times an attained share of 0.6 and 0.8; waiting power as
# measured with the data; the rest is assumed, see docs/emulation.md.
ASSUMED = {
    "a100": Assumed(
        name="NVIDIA A100-SXM4-80GB",
        flops_per_s=0.6 * 312e12,
        bytes_per_s=0.8 * 2.039e12,
        waiting_w=83.64,
        static_share=0.75,
        switch_latency_s=0.001,
        thermal=Thermal(
            ambient_c=30.0, resistance_c_per_w=0.085, time_constant_s=20.0, reference_c=60.0,
            leakage_w_per_c=0.2,
        ),
    ),
    "a40": Assumed(
        name="NVIDIA A40",
        flops_per_s=0.6 * 149.7e12,
        bytes_per_s=0.8 * 0.696e12,
        waiting_w=70.38,
        static_share=0.75,
        switch_latency_s=0.001,
        thermal=Thermal(
            ambient_c=30.0, resistance_c_per_w=0.14, time_constant_s=20.0, reference_c=65.0,
            leakage_w_per_c=0.15,
        ),
    ),
}  # fmt: skip


def fit(name: str, data: Path) -> tuple[GpuModel, list[Curve]]:
    """Fit one model; returns it with the curves it was fitted to."""
    curves = [c for file in FILES[name] for c in read_curves(data / "stage_profile" / file)]
    origin = (
        f"fitted by benchmarks.fit_gpu_models to Perseus (SOSP 2024), stage_profile "
        f"{', '.join(FILES[name])}; its times are a tenth of a real microbatch, so is the latency"
    )
    return fit_gpu_model(curves, ASSUMED[name], origin), curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "sosp24")
    parser.add_argument("--write", action="store_true", help="fit and write the model files")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.data.is_dir():
        sys.exit(f"no measured data in {args.data}; name the folder with --data")
    rows = []
    for name, files in FILES.items():
        if args.write:
            model, curves = fit(name, args.data)
            text = yaml.safe_dump(
                to_yaml_values(model), sort_keys=False, default_flow_style=None, width=96
            )
            write_text(ROOT / "configs" / "gpu_models" / f"{name}.yaml", text)
        else:
            model = load_gpu_model(name)
            curves = [c for f in files for c in read_curves(args.data / "stage_profile" / f)]
        rows += [{"gpu": name, **dataclasses.asdict(e)} for e in fit_errors(model, curves)]
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    print("relative errors in percent: mean and greatest over the clocks")
    for row in rows:
        print(
            f"{row['gpu']:5} {row['label']:32} time {100 * row['time_mean']:5.2f} "
            f"{100 * row['time_max']:6.2f}   energy {100 * row['energy_mean']:5.2f} "
            f"{100 * row['energy_max']:6.2f}"
        )


if __name__ == "__main__":
    main()
