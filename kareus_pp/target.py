"""Targets: how to choose a plan on the time-energy frontier."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kareus_pp.errors import TargetError


@dataclass(frozen=True)
class Fastest:
    """The least energy at the shortest iteration."""


@dataclass(frozen=True)
class LeastEnergy:
    """The least energy, however long the iteration."""


@dataclass(frozen=True)
class Deadline:
    """The least energy in at most `time_s` seconds per iteration."""

    time_s: float


@dataclass(frozen=True)
class Slowdown:
    """The least energy at most `percent` slower than the shortest iteration."""

    percent: float


@dataclass(frozen=True)
class EnergyBudget:
    """The shortest iteration with at most `energy_j` joules."""

    energy_j: float


@dataclass(frozen=True)
class PowerCap:
    """The shortest iteration whose average power is at most `power_w` watts."""

    power_w: float


@dataclass(frozen=True)
class EnergyDelayProduct:
    """The least product of iteration time and energy."""


@dataclass(frozen=True)
class Cost:
    """The least cost, at a price per joule and a price per hour of the whole job."""

    per_joule: float
    per_hour: float


@dataclass(frozen=True)
class Straggler:
    """As `Deadline`: another pipeline needs `time_s` anyway, to finish sooner gains nothing."""

    time_s: float


Target = (
    Fastest
    | LeastEnergy
    | Deadline
    | Slowdown
    | EnergyBudget
    | PowerCap
    | EnergyDelayProduct
    | Cost
    | Straggler
)

_NAMES: dict[str, type] = {
    "fastest": Fastest,
    "least-energy": LeastEnergy,
    "deadline": Deadline,
    "slowdown": Slowdown,
    "energy-budget": EnergyBudget,
    "power-cap": PowerCap,
    "edp": EnergyDelayProduct,
    "cost": Cost,
    "straggler": Straggler,
}
_MAY_BE_ZERO = (Slowdown, Cost)
TARGET_HELP = (
    "fastest, least-energy, deadline:SECONDS, slowdown:PERCENT, energy-budget:JOULES, "
    "power-cap:WATTS, edp, cost:PER_JOULE,PER_HOUR or straggler:SECONDS"
)


def parse_target(text: str) -> Target:
    """Read the text form of a target, as in `slowdown:5`.

    Raises:
        TargetError: The name is unknown, or a number is missing, not finite or not positive.
    """
    name, _, rest = text.strip().partition(":")
    kind = _NAMES.get(name)
    if kind is None:
        raise TargetError(f"unknown target {text!r}; use {TARGET_HELP}")
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        raise TargetError(
            f"the target {text!r} has a malformed number; use {TARGET_HELP}"
        ) from None
    if len(numbers) != len(fields(kind)):
        raise TargetError(
            f"the target {text!r} has {len(numbers)} numbers and needs "
            f"{len(fields(kind))}; use {TARGET_HELP}"
        )
    lowest_allowed = kind in _MAY_BE_ZERO
    for number in numbers:
        if not math.isfinite(number) or number < 0 or (number == 0 and not lowest_allowed):
            raise TargetError(
                f"the target {text!r} needs finite numbers "
                f"{'of 0 or more' if lowest_allowed else 'above 0'}"
            )
    if kind is Cost and not any(numbers):
        raise TargetError(
            f"the target {text!r} puts no price on energy or time, so that every plan is as good; "
            f"give at least one of the two"
        )
    target: Target = kind(*numbers)
    return target


def format_target(target: Target) -> str:
    """The text form of a target; `parse_target` reads it back."""
    name = next(name for name, kind in _NAMES.items() if kind is type(target))
    numbers = ",".join(repr(float(getattr(target, part.name))) for part in fields(target))
    return f"{name}:{numbers}" if numbers else name
