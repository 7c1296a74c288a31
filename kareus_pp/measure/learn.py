"""Learning a profile from runs: times, energies, overhead, intervals and a report in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kareus_pp.errors import ProfileError
from kareus_pp.measure.crossval import NORMAL_90, CrossValidation, cross_validate
from kareus_pp.measure.model import JobModel
from kareus_pp.measure.reject import reject_outliers
from kareus_pp.measure.replay import Replay
from kareus_pp.measure.report import FitReport, report_on
from kareus_pp.measure.runs import Runs, validate_runs
from kareus_pp.measure.table import Entry, Layout, entry_of, layout_of
from kareus_pp.plan import Settings
from kareus_pp.profile import DeviceFacts, Option, Origin, Overhead, Profile
from kareus_pp.schedule import InstructionClass
from kareus_pp.setting import Setting

LEARNED_WINS = 0.9
"""Blocking power is learned although measured if that lowers the error at least to this share."""


@dataclass(frozen=True)
class Prediction:
    """What a plan is predicted to cost, with the half-widths of 90 % intervals.

    A value is None where the plan uses a clock that is unknown for a class, or where energy was
    not read.
    """

    time_s: float | None
    time_half_s: float | None
    energy_j: float | None
    energy_half_j: float | None


@dataclass(frozen=True)
class Learned:
    """What was learned from runs.

    Attributes:
        profile: Options of every class at every useful clock, for the planner.
        report: Fit quality.
        model: The fitted models.
        validation: How well plans were predicted that a fit did not see.
    """

    profile: Profile
    report: FitReport
    model: JobModel = field(repr=False)
    validation: CrossValidation

    def predict(self, plans: Sequence[Settings]) -> tuple[Prediction, ...]:
        """Iteration time and total energy of plans on the same schedule.

        Raises:
            ProfileError: A plan uses an overlap setting that was never run.
        """
        if not plans:
            return ()
        found = self.model.predict([self.model.layout.apply(plan) for plan in plans])
        return tuple(
            Prediction(
                _number(found.time_s[i]),
                _number(found.time_sd_s[i] * self.validation.time_factor),
                _number(found.total_j[i]),
                _number(found.energy_sd_j[i] * self.validation.energy_factor),
            )
            for i in range(len(plans))
        )


def learn(runs: Runs) -> Learned:
    """Learn time and energy of every instruction class at every clock in the useful range.

    The useful range goes from the lowest clock that was run to the highest supported one.

    Raises:
        ProfileError: The runs are inconsistent, or hold nothing that can be used.
    """
    validate_runs(runs)
    layout = layout_of(runs)
    runs, rejections = reject_outliers(runs)
    entries = [entry for run in runs.runs if (entry := entry_of(run, layout)) is not None]
    if not entries:
        raise ProfileError(
            "the runs hold no usable iteration; record at least one that is not rejected"
        )
    replay = Replay(runs.schedule)
    blocking = runs.blocking_power_w
    validation = cross_validate(entries, layout, replay, blocking)
    if blocking is not None and validation.energy_error is not None:
        other = cross_validate(entries, layout, replay, None)
        if (other.energy_error or np.inf) < LEARNED_WINS * validation.energy_error:
            validation, blocking = other, None
    model = JobModel(entries, layout, replay, blocking)
    how = (
        "learned"
        if runs.blocking_power_w is None
        else "as measured"
        if blocking is not None
        else "learned, which predicts left-out plans better than the measured one"
    )
    report = report_on(model, entries, validation, rejections, how)
    return Learned(
        _profile(runs, layout, model, entries, validation, how), report, model, validation
    )


def _profile(
    runs: Runs,
    layout: Layout,
    model: JobModel,
    entries: Sequence[Entry],
    validation: CrossValidation,
    blocking: str,
) -> Profile:
    lowest = min(float(entry.applied.mhz.min()) for entry in entries)
    options: dict[InstructionClass, tuple[Option, ...]] = {}
    for key, cost_key in enumerate(layout.keys):
        if model.times.knows(key) and model.energy.knows(key):
            found = _options(layout, model, key, lowest, validation)
            options[cost_key.cls] = options.get(cost_key.cls, ()) + found
    empty = model.energy.is_empty
    return Profile(
        options=options,
        blocking_power_w=(0.0,) * runs.schedule.stages
        if empty
        else tuple(float(value) for value in model.energy.blocking_w()),
        overhead=Overhead(iteration_s=max(0.0, model.overhead.constant_s)),
        device=DeviceFacts(
            name=runs.facts.get("gpu", ""),
            clocks_mhz=layout.clocks_mhz,
            source=runs.source,
            scope=runs.scope,
        ),
        fingerprint=dict(runs.facts),
        provenance={
            "method": "learned from whole iterations",
            "plans": str(len(entries)),
            "schedule": runs.schedule.signature,
            "blocking_power": blocking,
            "energy": "inferred from whole iterations, at visited clocks, too",
        },
    )


def _options(
    layout: Layout, model: JobModel, key: int, lowest: float, validation: CrossValidation
) -> tuple[Option, ...]:
    cost_key = layout.keys[key]
    fixed = cost_key.cls.kind.is_fixed
    clocks = np.array([mhz for mhz in layout.clocks_mhz if mhz >= lowest], dtype=float)
    if fixed:
        clocks = clocks[-1:]
    time_s, time_sd = model.times.predict(key, clocks)
    power_w, power_sd = model.energy.power_w(key, clocks)
    visited = set(model.times.visited_mhz(key))
    widen_time = max(1.0, validation.time_factor / NORMAL_90)
    widen_energy = max(1.0, validation.energy_factor / NORMAL_90)
    return tuple(
        Option(
            Setting(None if fixed else int(mhz), cost_key.overlap),
            float(t),
            float(t * p),
            float(t * t_sd * widen_time),
            float(t * np.hypot(p_sd, p * t_sd) * widen_energy),
            Origin.MEASURED if mhz in visited else Origin.PREDICTED,
        )
        for mhz, t, t_sd, p, p_sd in zip(clocks, time_s, time_sd, power_w, power_sd, strict=True)
        if np.isfinite(t)
    )


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
