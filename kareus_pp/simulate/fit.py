"""Fit a GPU model to measured times and energies of pipeline stages at locked clocks.

What every stage and kind has to do is not in the data, so each gets its own compute and memory
time; the GPU has one effective clock, one voltage curve and one set of powers for all of them.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from kareus_pp.errors import FormatError
from kareus_pp.simulate.gpu_model import GpuModel, Power, Rates, Thermal, Throttle, Work

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Measured time and energy of one stage and kind against the locked clock.

    Attributes:
        label: File, stage and kind, as in `gpt3-175b+a40 0 forward`.
        clock_mhz: Locked SM clocks in MHz, shape `(n,)`.
        time_s: Times in seconds, shape `(n,)`.
        energy_j: Energies of one GPU in joules, shape `(n,)`.
    """

    label: str
    clock_mhz: Array
    time_s: Array
    energy_j: Array


@dataclass(frozen=True)
class FitError:
    """Mean and greatest relative error of one curve, as fractions."""

    label: str
    time_mean: float
    time_max: float
    energy_mean: float
    energy_max: float


@dataclass(frozen=True)
class Assumed:
    """What the measurements do not tell; docs/emulation.md gives the sources.

    Attributes:
        name: Device name.
        flops_per_s: Attained at the highest clock.
        bytes_per_s: Attained memory bandwidth.
        waiting_w: Measured power of a waiting GPU at default clocks.
        static_share: Part of `waiting_w` that is drawn at any clock.
        switch_latency_s: Delay of a clock change.
        thermal: Thermal constants.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    waiting_w: float
    static_share: float
    switch_latency_s: float
    thermal: Thermal


def read_curves(path: str | os.PathLike[str]) -> tuple[Curve, ...]:
    """Read a CSV file with columns `stage,instruction,frequency,time,energy` (MHz, s, J).

    Raises:
        FormatError: A column is missing or a value is not a positive number.
    """
    rows: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    name = os.path.basename(os.fspath(path)).removesuffix(".csv")
    try:
        with open(path, newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                point = float(row["frequency"]), float(row["time"]), float(row["energy"])
                if min(point) <= 0:
                    raise ValueError(f"{point} must be positive")
                rows[f"{name} {row['stage']} {row['instruction']}"].append(point)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"cannot read stage measurements from {os.fspath(path)!r} ({error}); it needs columns "
            f"stage, instruction, frequency, time and energy"
        ) from None
    curves = []
    for label, points in rows.items():
        clock, time, energy = np.array(sorted(points)).T
        curves.append(Curve(label, clock, time, energy))
    return tuple(curves)


def fit_gpu_model(curves: Sequence[Curve], assumed: Assumed, origin: str = "") -> GpuModel:
    """Fit effective clock, voltage curve and powers by least squares on relative residuals."""
    clocks = sorted({int(c) for curve in curves for c in curve.clock_mhz})
    top = float(clocks[-1])

    def model_of(x: Array) -> GpuModel:
        knee, width, voltage_knee, rise, compute, memory = (float(v) for v in x)
        return GpuModel(
            name=assumed.name,
            origin=origin,
            clocks_mhz=tuple(clocks),
            rates=Rates(
                flops_per_s_per_mhz=assumed.flops_per_s / top, bytes_per_s=assumed.bytes_per_s
            ),
            power=Power(
                static_w=round(assumed.static_share * assumed.waiting_w, 3),
                compute_w=round(compute, 3),
                memory_w=round(memory, 3),
                waiting_w=assumed.waiting_w,
                voltage_knee_mhz=round(voltage_knee, 2),
                voltage_rise_per_mhz=round(rise, 8),
            ),
            throttle=Throttle(knee_mhz=round(knee, 2), width_mhz=round(width, 2)),
            thermal=assumed.thermal,
            switch_latency_s=assumed.switch_latency_s,
        )

    def residuals(x: Array) -> Array:
        model = model_of(x)
        parts = []
        for curve in curves:
            time, energy = predict(model, work_of(model, curve), curve.clock_mhz)
            parts += [np.log(time / curve.time_s), np.log(energy / curve.energy_j)]
        return np.concatenate(parts)

    start = np.array([0.95 * top, 30.0, 0.75 * top, 1e-3, 4 * assumed.waiting_w, assumed.waiting_w])
    lower = np.array([0.6 * top, 2.0, 0.3 * top, 0.0, 1.0, 0.0])
    upper = np.array([1.2 * top, 300.0, top, 1e-2, 2000.0, 1000.0])
    solution = least_squares(
        residuals,
        start,
        bounds=(lower, upper),
        x_scale=start,
        diff_step=np.full(len(start), 1e-3),
        loss="soft_l1",
        f_scale=0.03,
    )
    return model_of(solution.x)


def work_of(model: GpuModel, curve: Curve) -> Work:
    """The work that explains a curve's times best, on relative residuals."""
    effective = np.array([model.effective_mhz(f) for f in curve.clock_mhz])
    columns = np.stack(
        [
            1.0 / (model.rates.flops_per_s_per_mhz * effective) / curve.time_s * 1e12,
            1.0 / model.rates.bytes_per_s / curve.time_s * 1e9 * np.ones_like(effective),
        ],
        axis=1,
    )
    (teraflops, gigabytes), _ = nnls(columns, np.ones(len(effective)))
    return Work(float(teraflops) * 1e12, float(gigabytes) * 1e9)


def predict(model: GpuModel, work: Work, clock_mhz: Array) -> tuple[Array, Array]:
    """Times in seconds and energies in joules of `work` at each clock, shapes `(n,)`."""
    time = np.array([model.time_s(work, f) for f in clock_mhz])
    return time, time * np.array([model.power_w(work, f) for f in clock_mhz])


def fit_errors(model: GpuModel, curves: Sequence[Curve]) -> tuple[FitError, ...]:
    """Relative errors of the model on every curve, the work of each fitted to its times."""
    errors = []
    for curve in curves:
        time, energy = predict(model, work_of(model, curve), curve.clock_mhz)
        time_error = np.abs(time / curve.time_s - 1)
        energy_error = np.abs(energy / curve.energy_j - 1)
        errors.append(
            FitError(
                curve.label,
                float(time_error.mean()),
                float(time_error.max()),
                float(energy_error.mean()),
                float(energy_error.max()),
            )
        )
    return tuple(errors)


def to_yaml_values(model: GpuModel) -> Mapping[str, object]:
    """The values of a GPU-model file, in the order of the model."""
    return model.model_dump(mode="json")
