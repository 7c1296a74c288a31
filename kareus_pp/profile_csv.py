"""Profiles from CSV tables: `stage,instruction,frequency,time,energy`, seconds and joules.

Such a table knows forward and backward of whole stages, no waiting power, and no split of a stage
into chunks or of a backward into input and weight gradient. What a schedule needs beyond that is
derived and marked as predicted.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kareus_pp.errors import FormatError, ProfileError
from kareus_pp.profile import DeviceFacts, Option, Origin, Profile, Source
from kareus_pp.schedule import InstructionClass, Kind, Schedule
from kareus_pp.setting import Setting

# Key of the provenance of profiles that came from a table.
TABLE = "table"
COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
_KINDS = {kind.word: kind for kind in Kind}
_HALVES = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


def load_any_profile(
    path: str | os.PathLike[str], blocking_power_w: Sequence[float] = ()
) -> Profile:
    """Read a profile, ours (JSON) or a CSV table.

    Args:
        path: The file.
        blocking_power_w: Power of a waiting GPU, one number for all stages or one for each; needed
            for a CSV table, and instead of the file's own in a JSON profile.

    Raises:
        FormatError: The file is malformed.
        ProfileError: The blocking power is missing or does not fit the stages.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise FormatError(
            f"cannot read the profile {os.fspath(path)!r} ({reason}); name an existing profile"
        ) from None
    if text.lstrip()[:1] in ("{", "["):
        profile = Profile.load(path)
        if not blocking_power_w:
            return profile
        return replace(
            profile, blocking_power_w=_for_stages(blocking_power_w, profile.stages, path)
        )
    return _parse(text, os.fspath(path), blocking_power_w)


def _for_stages(
    power: Sequence[float], stages: int, path: str | os.PathLike[str]
) -> tuple[float, ...]:
    for watts in power:
        if not (math.isfinite(watts) and watts >= 0):
            raise ProfileError(
                f"the blocking power {watts!r} W is not allowed; give watts of a waiting GPU, "
                f"finite and not negative"
            )
    if len(power) not in (1, stages):
        raise ProfileError(
            f"{len(power)} blocking powers were given and {os.fspath(path)!r} has {stages} stages; "
            f"give one number, or one for each stage"
        )
    return tuple(power) * (stages if len(power) == 1 else 1)


def _parse(text: str, path: str, blocking_power_w: Sequence[float]) -> Profile:
    reader = csv.DictReader(text.splitlines())
    names = [name.strip() for name in reader.fieldnames or ()]
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise FormatError(
            f"{path!r} is no profile: it is not JSON, and as CSV it lacks the columns "
            f"{', '.join(missing)}; it needs {','.join(COLUMNS)}"
        )
    reader.fieldnames = names
    found: dict[tuple[InstructionClass, int], list[tuple[float, float]]] = {}
    for row in reader:
        cls, clock, cost = _parse_row(row, f"{path!r}, line {reader.line_num}")
        found.setdefault((cls, clock), []).append(cost)
    options: dict[InstructionClass, list[Option]] = {}
    for (cls, clock), costs in found.items():
        # A repeated line is a repeated measurement.
        time_s, energy_j = (sum(part) / len(costs) for part in zip(*costs, strict=True))
        options.setdefault(cls, []).append(Option(Setting(clock), time_s, energy_j))
    if not options:
        raise FormatError(f"{path!r} has no rows; it needs at least one for each stage and kind")
    stages = 1 + max(cls.stage for cls in options)
    if not blocking_power_w:
        raise ProfileError(
            f"the CSV profile {path!r} does not tell the power of a waiting GPU; "
            f"give it in watts with --blocking-power"
        )
    return Profile(
        {cls: tuple(own) for cls, own in options.items()},
        _for_stages(blocking_power_w, stages, path),
        device=DeviceFacts(
            clocks_mhz=tuple(sorted({clock for _, clock in found})), source=Source.FILE
        ),
        provenance={TABLE: Path(path).name},
    )


def _parse_row(
    row: dict[str, str], where: str
) -> tuple[InstructionClass, int, tuple[float, float]]:
    numbers = {}
    for name in ("stage", "frequency", "time", "energy"):
        text = row.get(name) or ""
        try:
            numbers[name] = float(text)
        except ValueError:
            raise FormatError(f"{where}: {name} is {text!r} and must be a number") from None
        if not math.isfinite(numbers[name]) or numbers[name] < 0:
            raise FormatError(
                f"{where}: {name} is {text!r} and must be finite and not negative; "
                f"remove the line or measure it again"
            )
    word = (row.get("instruction") or "").strip().lower()
    if word not in _KINDS:
        raise FormatError(f"{where}: instruction is {word!r}; use one of {', '.join(_KINDS)}")
    for name in ("stage", "frequency"):
        if not numbers[name].is_integer() or (name == "frequency" and numbers[name] == 0):
            raise FormatError(f"{where}: {name} is {row[name]!r} and must be a whole number")
    cls = InstructionClass(int(numbers["stage"]), _KINDS[word])
    return cls, int(numbers["frequency"]), (numbers["time"], numbers["energy"])


def fit_to_schedule(profile: Profile, schedule: Schedule) -> Profile:
    """Derive what a schedule needs from forwards and backwards of whole stages.

    An input-gradient and a weight-gradient each take half the time and energy of their backward; a
    chunk takes its share, one of as many as there are chunks on the stage; microbatches with
    communication and of other shapes cost as those without. All that is derived is marked as
    predicted; what the table has is left as it is.

    Profiles that did not come from a table are returned as they are.

    Raises:
        ProfileError: The table has nothing to derive a class from.
    """
    if TABLE not in profile.provenance:
        return profile
    options = dict(profile.options)
    for cls in schedule.classes:
        if cls in options and schedule.chunks == 1:
            continue
        # With chunks, the table's own rows are whole stages, and chunk 0 takes its share as well.
        whole, share = InstructionClass(cls.stage, cls.kind), 1.0 / schedule.chunks
        if whole not in profile.options and cls.kind in _HALVES:
            whole, share = whole._replace(kind=Kind.BACKWARD), share / 2
        if whole not in profile.options:
            raise ProfileError(
                f"the schedule needs the instruction class {cls} and the profile has neither it "
                f"nor {whole}; it knows {profile.stages} stages: profile this pipeline"
            )
        options[cls] = tuple(
            replace(
                o, time_s=o.time_s * share, energy_j=o.energy_j * share, origin=Origin.PREDICTED
            )
            for o in profile.options[whole]
        )
    return replace(profile, options=options)
