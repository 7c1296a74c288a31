"""Learning a profile from runs: times, energies, overhead, intervals and a report in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kareus_pp.errors import ProfileError
from kareus_pp.evaluate import start_times
from kareus_pp.measure.energy_model import EnergyModel, StagePower, fit_energy
from kareus_pp.measure.runs import Runs, validate_runs
from kareus_pp.measure.table import Applied, Entry, Floats, Layout, entry_of, layout_of
from kareus_pp.measure.time_model import TimeCurve, fit_time
from kareus_pp.profile import DeviceFacts, Option, Origin, Overhead, Profile
from kareus_pp.schedule import InstructionClass
from kareus_pp.setting import Setting


@dataclass(frozen=True)
class FitReport:
    """How far the learned profile can be trusted, in words.

    Attributes:
        supports_planning: False where the data do not support a plan.
        reasons: Why not, one sentence each.
        notes: What else a user should know, one sentence each.
        unknown_classes: Classes that never varied in clock: known at the visited clock only.
        time_error: Relative error of the iteration times of the runs themselves, mean absolute.
        energy_error: The same of the total energies; None where energy was not read.
    """

    supports_planning: bool
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unknown_classes: tuple[InstructionClass, ...] = ()
    time_error: float | None = None
    energy_error: float | None = None


@dataclass(frozen=True)
class Learned:
    """What was learned from runs.

    Attributes:
        profile: Options of every class at every useful clock, for the planner.
        report: Fit quality.
        layout: Schedule, cost keys and clocks.
        curves: Time over the clock for each cost key.
        energy: Powers.
        overhead_s: Iteration time beyond the dependency graph.
    """

    profile: Profile
    report: FitReport
    layout: Layout = field(repr=False)
    curves: tuple[TimeCurve | None, ...] = field(repr=False)
    energy: EnergyModel = field(repr=False)
    overhead_s: float = 0.0


def learn(runs: Runs) -> Learned:
    """Learn time and energy of every instruction class at every clock in the useful range.

    Raises:
        ProfileError: The runs are inconsistent, or hold nothing that can be used.
    """
    validate_runs(runs)
    layout = layout_of(runs)
    entries = [entry for run in runs.runs if (entry := entry_of(run, layout)) is not None]
    entries = [entry for entry in entries if len(entry.iter_time_s)]
    if not entries:
        raise ProfileError(
            "the runs hold no usable iteration; record at least one that is not rejected"
        )
    curves = fit_time(entries, layout)
    durations = [_filled(entry, curves) for entry in entries]
    overhead_s = float(
        np.median(
            [
                np.median(entry.iter_time_s) - replay_s(layout, predicted_s(entry.applied, curves))
                for entry in entries
            ]
        )
    )
    energy = fit_energy(entries, layout, durations, runs.blocking_power_w)
    profile = _profile(runs, layout, curves, energy, max(0.0, overhead_s))
    return Learned(
        profile, _report(layout, curves, energy), layout, curves, energy, max(0.0, overhead_s)
    )


def predicted_s(applied: Applied, curves: Sequence[TimeCurve | None]) -> Floats:
    """Duration of every instruction by the curves; NaN where a clock is unknown."""
    result = np.full(applied.mhz.shape, np.nan)
    for number, curve in enumerate(curves):
        mine = applied.key == number
        if curve is not None and np.any(mine):
            clocks, place = np.unique(applied.mhz[mine], return_inverse=True)
            result[mine] = curve.predict(clocks)[0][place]
    return result


def replay_s(layout: Layout, duration_s: Floats) -> float:
    """Length of the longest path through the schedule, in seconds."""
    return float(np.max(start_times(layout.schedule, duration_s) + duration_s))


def _filled(entry: Entry, curves: Sequence[TimeCurve | None]) -> Floats:
    return np.where(
        np.isfinite(entry.duration_s), entry.duration_s, predicted_s(entry.applied, curves)
    )


def _profile(
    runs: Runs,
    layout: Layout,
    curves: Sequence[TimeCurve | None],
    energy: EnergyModel,
    overhead_s: float,
) -> Profile:
    options: dict[InstructionClass, tuple[Option, ...]] = {}
    for number, (key, curve) in enumerate(zip(layout.keys, curves, strict=True)):
        power = energy.stages[key.cls.stage]
        if curve is not None and power is not None:
            found = _options(layout, number, curve, power)
            options[key.cls] = options.get(key.cls, ()) + found
    blocking = tuple(0.0 if power is None else power.blocking_w for power in energy.stages)
    return Profile(
        options=options,
        blocking_power_w=blocking,
        overhead=Overhead(iteration_s=overhead_s),
        device=DeviceFacts(
            name=runs.facts.get("gpu", ""),
            clocks_mhz=layout.clocks_mhz,
            source=runs.source,
            scope=runs.scope,
        ),
        fingerprint=dict(runs.facts),
        provenance={"method": "learned from iterations", "plans": str(len(runs.runs))},
    )


def _options(
    layout: Layout, number: int, curve: TimeCurve, power: StagePower
) -> tuple[Option, ...]:
    overlap = layout.keys[number].overlap
    if curve.fixed:
        clocks = np.array([float(layout.top_mhz)])
    else:
        clocks = np.array([float(mhz) for mhz in layout.clocks_mhz])
    time_s, time_sd = curve.predict(clocks)
    power_w, power_sd = power.power(number, clocks / layout.top_mhz)
    visited = {point.mhz for point in curve.points}
    return tuple(
        Option(
            Setting(None if curve.fixed else int(mhz), overlap),
            float(t),
            float(t * p),
            float(t * t_sd),
            float(np.hypot(t * p_sd, t * p * t_sd)),
            Origin.MEASURED if mhz in visited else Origin.PREDICTED,
        )
        for mhz, t, t_sd, p, p_sd in zip(clocks, time_s, time_sd, power_w, power_sd, strict=True)
        if np.isfinite(t)
    )


def _report(layout: Layout, curves: Sequence[TimeCurve | None], energy: EnergyModel) -> FitReport:
    unknown = tuple(
        key.cls
        for key, curve in zip(layout.keys, curves, strict=True)
        if curve is None or not (curve.varied or curve.fixed)
    )
    blind = [str(stage) for stage, power in enumerate(energy.stages) if power is None]
    reasons = []
    if unknown:
        reasons.append(
            f"never run at two clocks: {', '.join(map(str, unknown[:8]))}; "
            f"their cost at other clocks is unknown"
        )
    if blind:
        reasons.append(f"no usable energy reading on stage {', '.join(blind)}")
    return FitReport(not reasons, tuple(reasons), unknown_classes=unknown)
