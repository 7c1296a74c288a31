"""Profiles of several jobs or data-parallel replicas, put together.

Replicas of a stage can share the work: each profiles a part of the clocks, and their runs or their
profiles are merged. What does not belong together is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kareus_pp.errors import ProfileError
from kareus_pp.measure.runs import Runs
from kareus_pp.profile import DeviceFacts, Option, Origin, Overhead, Profile
from kareus_pp.schedule import InstructionClass
from kareus_pp.setting import Setting


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """One profile with the options of all; where several know a setting, their weighted mean.

    Measured options go before predicted ones; among equals the weight is the inverse variance.
    Blocking power and overhead are means.

    Raises:
        ProfileError: There is no profile, or two differ in fingerprint, device, number of stages,
            or source or scope of the energy readings.
    """
    if not profiles:
        raise ProfileError("there is no profile to merge; name at least one")
    first = profiles[0]
    for number, other in enumerate(profiles[1:], start=2):
        _check_alike(first, other, number)
    classes = dict.fromkeys(cls for profile in profiles for cls in profile.options)
    clocks = sorted({mhz for profile in profiles for mhz in profile.device.clocks_mhz})
    latencies = [
        p.device.switch_latency_s for p in profiles if p.device.switch_latency_s is not None
    ]
    return Profile(
        options={cls: _merge_class(profiles, cls) for cls in classes},
        blocking_power_w=tuple(
            float(np.mean([profile.blocking_power_w[stage] for profile in profiles]))
            for stage in range(first.stages)
        ),
        overhead=Overhead(
            float(np.mean([profile.overhead.iteration_s for profile in profiles])),
            float(np.mean([profile.overhead.p2p_s for profile in profiles])),
        ),
        device=DeviceFacts(
            first.device.name,
            tuple(clocks),
            first.device.source,
            first.device.scope,
            max(latencies, default=None),
        ),
        fingerprint=dict(first.fingerprint),
        provenance=_provenance(profiles),
    )


def extend_runs(earlier: Runs, later: Runs) -> Runs:
    """The plans of two recordings of one job, to learn from all of them.

    Raises:
        ProfileError: The recordings differ in schedule, facts, or source or scope of the readings.
    """
    for what, a, b in (
        ("schedule", earlier.schedule.signature, later.schedule.signature),
        ("shape", earlier.schedule.shape, later.schedule.shape),
        ("energy source", earlier.source.value, later.source.value),
        ("scope", earlier.scope, later.scope),
        ("facts", dict(earlier.facts), dict(later.facts)),
    ):
        if a != b:
            raise ProfileError(
                f"the recordings differ in {what} ({a!r} and {b!r}), so they cannot be learned "
                f"from together; learn from each on its own"
            )
    known = later.blocking_power_w or earlier.blocking_power_w
    return Runs(
        earlier.schedule,
        (*earlier.runs, *later.runs),
        tuple(sorted({*earlier.clocks_mhz, *later.clocks_mhz})),
        known,
        earlier.source,
        earlier.facts,
        earlier.scope,
    )


def _check_alike(first: Profile, other: Profile, number: int) -> None:
    keys = sorted({*first.fingerprint, *other.fingerprint})
    pairs = [
        (f"fingerprint {key!r}", first.fingerprint.get(key), other.fingerprint.get(key))
        for key in keys
    ]
    pairs += [
        ("device", first.device.name, other.device.name),
        ("energy source", first.device.source.value, other.device.source.value),
        ("scope", first.device.scope, other.device.scope),
        ("number of stages", str(first.stages), str(other.stages)),
    ]
    for what, a, b in pairs:
        if a != b:
            raise ProfileError(
                f"profile {number} differs from the first in {what} ({b!r} instead of {a!r}), so "
                f"they cannot be merged; profile this job again"
            )


def _merge_class(profiles: Sequence[Profile], cls: InstructionClass) -> tuple[Option, ...]:
    by_setting: dict[Setting, list[Option]] = {}
    for profile in profiles:
        for option in profile.options.get(cls, ()):
            by_setting.setdefault(option.setting, []).append(option)
    merged = [_merge_options(options) for options in by_setting.values()]
    return tuple(sorted(merged, key=lambda o: (str(o.setting.overlap), o.setting.clock_mhz or 0)))


def _merge_options(options: Sequence[Option]) -> Option:
    measured = [option for option in options if option.origin is Origin.MEASURED]
    used = measured or list(options)
    if len(used) == 1:
        return used[0]
    time_s, time_sd = _weighted([o.time_s for o in used], [o.time_sd_s for o in used])
    energy_j, energy_sd = _weighted([o.energy_j for o in used], [o.energy_sd_j for o in used])
    return Option(used[0].setting, time_s, energy_j, time_sd, energy_sd, used[0].origin)


def _weighted(
    values: Sequence[float], deviations: Sequence[float | None]
) -> tuple[float, float | None]:
    """Inverse-variance mean and its deviation, no smaller than the values' disagreement says.

    The plain mean and no deviation where one is unknown or zero.
    """
    known = [deviation for deviation in deviations if deviation]
    if len(known) != len(values):
        return float(np.mean(values)), None
    weight = 1 / np.array(known) ** 2
    mean = float(np.average(values, weights=weight))
    from_models = float(1 / math.sqrt(weight.sum()))
    from_scatter = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, max(from_models, from_scatter)


def _provenance(profiles: Sequence[Profile]) -> dict[str, str]:
    names = dict.fromkeys(name for profile in profiles for name in profile.provenance)
    found = {
        name: "; ".join(dict.fromkeys(p.provenance[name] for p in profiles if name in p.provenance))
        for name in names
    }
    return {**found, "merged": f"from {len(profiles)} profiles"}
