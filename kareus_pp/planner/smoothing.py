"""Noise on a profile: a planner picks lucky readings, so curves are smoothed before they are used.

Three treatments: *physical*, `t = a + b / min(f, knee)` with effective energy convex and falling in
time; *local*, straight lines through neighbouring clocks, not across jumps; *exponential*, the fit
of energy by `a exp(b t) + c` that lowtime uses (times are left as they are). `auto` smooths only
what is declared to be noisy (options with standard deviations above half a percent, measured, at
eight clocks or more) and chooses by the residual of the physical fit: no larger than the noise, the
fit holds; larger, the curve has features that it lacks, and local lines are worth their own error
only where noise is large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from kareus_pp.planner.options import Smoothing
from kareus_pp.planner.problem import FloatArray
from kareus_pp.profile import Option, Origin, Profile
from kareus_pp.schedule import InstructionClass
from kareus_pp.setting import OverlapSetting

FEWEST = 8
NOISY = 0.005
# Lines through neighbouring clocks miss what is between jumps by about this much.
LOCAL_ERROR = 0.02
_REACH = 4


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
    options = dict(profile.options)
    methods: dict[InstructionClass, Smoothing] = {}
    changes: list[float] = []
    noises: list[float] = []
    for cls, own in profile.options.items():
        watts = profile.blocking_power_w[cls.stage] if cls.stage < profile.stages else 0.0
        noise = declared_noise(own)
        if noise is not None:
            noises.append(noise)
        if method == "none" or cls.kind.is_fixed:
            continue
        groups: dict[OverlapSetting, list[int]] = {}
        for number, option in enumerate(own):
            if option.setting.clock_mhz and option.time_s > 0 and option.energy_j > 0:
                groups.setdefault(option.setting.overlap, []).append(number)
        smoothed = list(own)
        for numbers in groups.values():
            group = sorted((own[n] for n in numbers), key=lambda o: o.setting.clock_mhz or 0)
            chosen = _choose(group, watts, noise) if method == "auto" else method
            if chosen == "none" or len(group) < FEWEST:
                continue
            new = _apply(group, watts, chosen)
            methods[cls] = chosen
            changes += [a.time_s / b.time_s - 1 for a, b in zip(new, group, strict=True)]
            by_setting = {o.setting: o for o in new}
            for n in numbers:
                smoothed[n] = by_setting[own[n].setting]
        options[cls] = tuple(smoothed)
    residual = float(np.sqrt(np.mean(np.square(changes)))) if changes else 0.0
    mean = float(np.mean(noises)) if noises else None
    return Smoothed(replace(profile, options=options), methods, residual, mean)


def declared_noise(options: tuple[Option, ...]) -> float | None:
    """Mean relative standard deviation of measured times; None where it is not declared."""
    known = [
        o.time_sd_s / o.time_s
        for o in options
        if o.time_sd_s is not None and o.time_s > 0 and o.origin is Origin.MEASURED
    ]
    return float(np.mean(known)) if len(known) == len(options) and known else None


def _choose(group: list[Option], watts: float, noise: float | None) -> Smoothing:
    if noise is None or noise < NOISY or len(group) < FEWEST:
        return "none"
    _, time, _ = _arrays(group, watts)
    fitted, _ = physical(*_arrays(group, watts))
    residual = float(np.sqrt(np.mean((fitted / time - 1) ** 2)))
    # The spread of a root mean square of n readings is about 1 / sqrt(2 n): allow three of it.
    if residual <= noise * (1 + 3 / np.sqrt(2 * len(group))):
        return "physical"
    return "local" if noise >= LOCAL_ERROR else "none"


def _arrays(group: list[Option], watts: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    clock = np.array([float(o.setting.clock_mhz or 0) for o in group])
    time = np.array([o.time_s for o in group])
    return clock, time, np.array([o.energy_j for o in group]) - watts * time


def _apply(group: list[Option], watts: float, method: Smoothing) -> list[Option]:
    clock, time, cost = _arrays(group, watts)
    fit = {"physical": physical, "local": local, "exponential": exponential}[method]
    new_time, new_cost = fit(clock, time, cost)
    return [
        replace(
            option,
            time_s=float(max(t, 0.0)),
            energy_j=float(c + watts * t),
            origin=Origin.PREDICTED,
        )
        for option, t, c in zip(group, new_time, new_cost, strict=True)
    ]


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
    for knee in clock[len(clock) // 3 :]:
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


def local(clock: FloatArray, time: FloatArray, cost: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Straight lines through neighbouring clocks, split where the time jumps.

    A jump is a step between neighbours that differs from the median step by more than five times
    the median deviation, and by more than two percent.

    Args:
        clock: MHz, ascending.
        time: Seconds.
        cost: Effective energies in joules.

    Returns:
        Smoothed times and effective energies.
    """
    step = np.diff(np.log(time))
    off = np.abs(step - np.median(step))
    jumps = np.flatnonzero((off > 5 * np.median(off)) & (off > 0.02)) + 1
    new_time, new_cost = time.copy(), cost.copy()
    for part in np.split(np.arange(len(clock)), jumps):
        for at in part:
            near = part[(part >= at - _REACH) & (part <= at + _REACH)]
            if len(near) < 3:
                continue
            x = clock[near] - clock[at]
            new_time[at] = np.polyfit(x, time[near], 1)[1]
            new_cost[at] = np.polyfit(x, cost[near], 1)[1]
    return new_time, new_cost


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
