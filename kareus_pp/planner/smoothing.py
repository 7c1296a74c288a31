"""Noise on a profile: a planner picks lucky readings, so curves are smoothed before they are used.

Three treatments: *physical*, `t = a + b / min(f, knee)` with effective energy convex and falling in
time; *local*, the same on each side of jumps of the time (a GPU that throttles, a kernel that
changes), which are looked for in all classes of a kind together; *exponential*, the fit of energy
by `a exp(b t) + c` that lowtime uses (times are left as they are). `auto` smooths only what is
declared to be noisy (options with standard deviations above half a percent, measured, at eight
clocks or more) and chooses by the residual of the fit over the whole profile. Without jumps the
physical fit holds where the noise explains its residual. With jumps *local* is used where it errs
less than the readings do, in time and in energy. Else nothing is smoothed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from kareus_pp.planner.options import Smoothing
from kareus_pp.planner.problem import FloatArray, IntArray
from kareus_pp.profile import Option, Origin, Profile
from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.setting import OverlapSetting

FEWEST = 8
NOISY = 0.005
_WINDOW = 3
_LEAST_JUMP = 0.015


@dataclass(frozen=True)
class Smoothed:
    """A smoothed profile and what was done.

    Attributes:
        profile: The profile to plan on; what was smoothed is marked as predicted.
        methods: For every class that was smoothed the method.
        residual: Root mean square of the relative change of times that smoothing made.
        noise: Mean declared relative standard deviation of times; None where undeclared.
    """

    profile: Profile
    methods: dict[InstructionClass, Smoothing]
    residual: float
    noise: float | None

    @property
    def name(self) -> str:
        """The methods in use, in words."""
        return "+".join(sorted(set(self.methods.values()))) or "none"


def smooth(profile: Profile, method: Smoothing) -> Smoothed:
    """Smooth a profile.

    Args:
        profile: The profile.
        method: The treatment; `auto` chooses for each class.
    """
    groups = list(_groups(profile))
    noises = [g.noise for g in groups if g.noise is not None]
    noise = float(np.mean(noises)) if noises else None
    chosen = _choose(profile, groups, noise) if method == "auto" else method
    if chosen == "none" or not groups:
        return Smoothed(profile, {}, 0.0, noise)
    jumps = _jumps(groups, noise or 0.0) if chosen == "local" else {}
    options = {cls: list(own) for cls, own in profile.options.items()}
    changes: list[float] = []
    for group in groups:
        fit = {"physical": physical, "exponential": exponential}.get(chosen, physical)
        pieces = np.split(np.arange(len(group.clock)), jumps.get(group.cls.kind, []))
        time, cost = group.time.copy(), group.cost.copy()
        for piece in pieces:
            if len(piece) >= _WINDOW + 1:
                time[piece], cost[piece] = fit(
                    group.clock[piece], group.time[piece], group.cost[piece]
                )
        changes += (time / group.time - 1).tolist()
        for number, t, c in zip(group.numbers, time.tolist(), cost.tolist(), strict=True):
            options[group.cls][number] = replace(
                options[group.cls][number],
                time_s=max(t, 0.0),
                energy_j=c + group.watts * t,
                origin=Origin.PREDICTED,
            )
    return Smoothed(
        replace(profile, options={cls: tuple(own) for cls, own in options.items()}),
        {group.cls: chosen for group in groups},
        float(np.sqrt(np.mean(np.square(changes)))),
        noise,
    )


@dataclass(frozen=True)
class _Group:
    """Options of one class and overlap setting, by clock."""

    cls: InstructionClass
    numbers: list[int]
    clock: FloatArray
    time: FloatArray
    cost: FloatArray
    watts: float
    noise: float | None
    energy_noise: float


def _groups(profile: Profile) -> Iterator[_Group]:
    for cls, own in profile.options.items():
        if cls.kind.is_fixed or cls.stage >= profile.stages:
            continue
        watts = profile.blocking_power_w[cls.stage]
        by_overlap: dict[OverlapSetting, list[int]] = {}
        for number, option in enumerate(own):
            if option.setting.clock_mhz and option.time_s > 0 and option.energy_j > 0:
                by_overlap.setdefault(option.setting.overlap, []).append(number)
        for numbers in by_overlap.values():
            if len(numbers) < FEWEST:
                continue
            numbers.sort(key=lambda n: own[n].setting.clock_mhz or 0)
            time = np.array([own[n].time_s for n in numbers])
            noise = declared_noise(tuple(own[n] for n in numbers))
            energy_noises = [
                (own[n].energy_sd_j or 0.0) / own[n].energy_j for n in numbers if own[n].energy_sd_j
            ]
            yield _Group(
                cls,
                numbers,
                np.array([float(own[n].setting.clock_mhz or 0) for n in numbers]),
                time,
                np.array([own[n].energy_j for n in numbers]) - watts * time,
                watts,
                noise,
                float(np.mean(energy_noises)) if energy_noises else noise or 0.0,
            )


def declared_noise(options: tuple[Option, ...]) -> float | None:
    """Mean relative standard deviation of measured times; None where it is not declared."""
    known = [
        o.time_sd_s / o.time_s
        for o in options
        if o.time_sd_s is not None and o.time_s > 0 and o.origin is Origin.MEASURED
    ]
    return float(np.mean(known)) if len(known) == len(options) and known else None


def _choose(profile: Profile, groups: list[_Group], noise: float | None) -> Smoothing:
    if noise is None or noise < NOISY or any(g.noise is None for g in groups):
        return "none"
    if not any(len(jumps) for jumps in _jumps(groups, noise).values()):
        off = np.concatenate([physical(g.clock, g.time, g.cost)[0] / g.time - 1 for g in groups])
        residual = float(np.sqrt(np.mean(off**2)))
        # The spread of a root mean square of n readings is about 1 / sqrt(2 n): allow two of it,
        # and as much misfit as is not worth smoothing away.
        explained = float(np.hypot(noise, NOISY) * (1 + 2 / np.sqrt(2 * len(off))))
        return "physical" if residual <= explained else "none"
    # Split at its jumps, the fit errs by what noise does not explain of its residuals: worth it
    # where that is less than the noise itself, in time and in energy.
    split = smooth(profile, "local").profile
    time, energy = [], []
    for cls in {g.cls for g in groups}:
        for seen, found in zip(profile.options[cls], split.options[cls], strict=True):
            if found is not seen:
                time.append(found.time_s / seen.time_s - 1)
                energy.append(found.energy_j / seen.energy_j - 1)
    off_time, off_energy = (float(np.mean(np.square(part))) for part in (time, energy))
    blurred = float(np.mean([g.energy_noise for g in groups]))
    return "local" if off_time < 2 * noise**2 and off_energy < 2 * blurred**2 else "none"


def _jumps(groups: list[_Group], noise: float) -> dict[Kind, IntArray]:
    """Positions before which the time rises, for each kind, from all its classes together.

    Time falls with the clock; a rise is what the physical form cannot follow. It counts where the
    means of a few clocks after and before differ by four times what noise explains and by 1.5 %.
    """
    found: dict[Kind, IntArray] = {}
    for kind in {g.cls.kind for g in groups}:
        same = [g for g in groups if g.cls.kind is kind]
        first = same[0].clock
        same = [g for g in same if np.array_equal(g.clock, first)]
        curve = np.mean([np.log(g.time) for g in same], axis=0)
        means = np.convolve(curve, np.ones(_WINDOW) / _WINDOW, "valid")
        if len(means) <= _WINDOW:
            continue
        off = means[_WINDOW:] - means[:-_WINDOW]
        least = max(_LEAST_JUMP, 4 * noise * np.sqrt(2 / _WINDOW / len(same)))
        jumps = []
        for at in map(int, np.flatnonzero(off > least)):
            near = off[max(0, at - _WINDOW) : at + _WINDOW + 1]
            if off[at] == near.max():
                jumps.append(at + _WINDOW)
        found[kind] = np.array(jumps, np.int64)
    return found


def physical(
    clock: FloatArray, time: FloatArray, cost: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Fit `t = a + b / min(f, knee)`, and effective energy convex and falling in that time.

    Args:
        clock: MHz, ascending.
        time: Seconds.
        cost: Effective energies in joules.

    Returns:
        Fitted times and effective energies.
    """
    best: tuple[float, FloatArray] | None = None
    for knee in clock[min(len(clock) // 3, len(clock) - 1) :]:
        basis = np.stack([np.ones_like(clock), clock[0] / np.minimum(clock, knee)], axis=1)
        weights, error = nnls(basis / time[:, None], np.ones_like(time))
        if best is None or error < best[0]:
            best = (float(error), basis @ weights)
    assert best is not None
    fitted = best[1]
    return fitted, _convex_falling(fitted, cost)


def _convex_falling(time: FloatArray, cost: FloatArray) -> FloatArray:
    """Least squares by `c + sum b_k max(0, t_k - t)` with `b_k >= 0`: convex, falling."""
    scale = float(np.abs(cost).max()) or 1.0
    span = float(time.max() - time.min()) or 1.0
    knots = np.unique(time)[1:]
    ramps = np.maximum(0.0, knots[None, :] - time[:, None]) / span
    ones = np.ones((len(time), 1))
    basis = np.concatenate([ones, -ones, ramps], axis=1)
    weights, _ = nnls(basis, cost / scale)
    fitted: FloatArray = basis @ weights * scale
    return fitted


def exponential(
    clock: FloatArray, time: FloatArray, cost: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Fit effective energy by `a exp(b t) + c` and leave times as they are, as lowtime does.

    Args:
        clock: MHz, ascending.
        time: Seconds.
        cost: Effective energies in joules.

    Returns:
        The times, and fitted effective energies.
    """
    del clock
    span = float(time.max() - time.min()) or 1.0
    scaled = (time - time.min()) / span
    best: tuple[float, FloatArray] | None = None
    for rate in np.geomspace(0.1, 20.0, 60):
        basis = np.stack([np.exp(-rate * scaled), np.ones_like(scaled)], axis=1)
        weights, *_ = np.linalg.lstsq(basis, cost, rcond=None)
        fitted = basis @ weights
        error = float(((fitted - cost) ** 2).sum())
        if best is None or error < best[0]:
            best = (error, fitted)
    assert best is not None
    return time, best[1]
