"""Whether what was learned supports a plan, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kareus_pp.measure.crossval import CrossValidation
from kareus_pp.measure.model import JobModel
from kareus_pp.measure.table import Entry
from kareus_pp.schedule import InstructionClass

MAX_ERROR = 0.03
"""A profile whose left-out plans are predicted worse than this supports no plan."""
MAX_DURATION_SPREAD = 0.15
"""Nor one in which instructions of one class at one clock differ more than this."""


@dataclass(frozen=True)
class FitReport:
    """How far the learned profile can be trusted, in words.

    Attributes:
        supports_planning: False where the data do not support a plan.
        reasons: Why not, one sentence each.
        notes: What else a user should know, one sentence each.
        unknown_classes: Classes that never varied in clock: known at the visited clock only.
        time_error: Mean absolute relative error of iteration times of plans that a fit did not
            see; None with too few plans.
        energy_error: The same of total energies; None also where energy was not read.
        rejected: How often each ground for rejection occurred.
    """

    supports_planning: bool
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unknown_classes: tuple[InstructionClass, ...] = ()
    time_error: float | None = None
    energy_error: float | None = None
    rejected: Mapping[str, int] | None = None


def report_on(
    model: JobModel,
    entries: Sequence[Entry],
    validation: CrossValidation,
    rejected: Mapping[str, int],
    blocking: str,
) -> FitReport:
    """Judge a fit."""
    keys = model.layout.keys
    unknown = tuple(key.cls for number, key in enumerate(keys) if not model.times.varied[number])
    blind = [stage for stage, count in enumerate(model.energy.readings) if not count]
    reasons = []
    if unknown:
        reasons.append(
            f"never run at two clocks: {', '.join(map(str, unknown[:8]))}; "
            f"their cost at other clocks is unknown"
        )
    if blind:
        reasons.append(f"no usable energy reading on stage {', '.join(map(str, blind))}")
    for what, error in (("time", validation.time_error), ("energy", validation.energy_error)):
        if error is not None and error > MAX_ERROR:
            reasons.append(
                f"{what} of plans that the fit did not see is off by {error:.1%} on average, "
                f"more than {MAX_ERROR:.0%}"
            )
    unsteady = _unsteady(model, entries)
    if unsteady:
        reasons.append(
            f"durations at one clock differ too much for a plan to hold: {', '.join(unsteady[:8])}"
        )
    return FitReport(
        supports_planning=not reasons,
        reasons=tuple(reasons),
        notes=tuple(_notes(model, entries, validation, rejected, blocking)),
        unknown_classes=tuple(dict.fromkeys(unknown)),
        time_error=validation.time_error,
        energy_error=validation.energy_error,
        rejected=rejected,
    )


def _unsteady(model: JobModel, entries: Sequence[Entry]) -> list[str]:
    """Classes whose durations scatter around their curve."""
    ratio = np.concatenate(
        [entry.duration_s / model.times.durations_s(entry.applied) for entry in entries]
    )
    key = np.concatenate([entry.applied.key for entry in entries])
    found = []
    for number, cost_key in enumerate(model.layout.keys):
        values = ratio[(key == number) & np.isfinite(ratio)]
        if len(values) and not cost_key.cls.kind.is_fixed:
            middle = float(np.median(values))
            if 1.4826 * float(np.median(np.abs(values - middle))) > MAX_DURATION_SPREAD:
                found.append(str(cost_key))
    return found


def _notes(
    model: JobModel,
    entries: Sequence[Entry],
    validation: CrossValidation,
    rejected: Mapping[str, int],
    blocking: str,
) -> list[str]:
    notes = [f"learned from {len(entries)} plans"]
    if validation.time_error is not None:
        notes.append(f"time of plans that a fit did not see: {validation.time_error:.2%} off")
    if validation.energy_error is not None:
        notes.append(f"energy of plans that a fit did not see: {validation.energy_error:.2%} off")
    if validation.time_error is None:
        notes.append("too few plans to leave some out: intervals come from the models alone")
    notes.append(f"blocking power: {blocking}")
    overhead = "varies with how busy the stages are" if model.overhead.smooth else "is constant"
    notes.append(f"overhead of an iteration: {model.overhead.constant_s:.3g} s, {overhead}")
    notes += [f"rejected {count} times: {reason}" for reason, count in rejected.items()]
    return notes
