"""Profiles: what every instruction class costs at every setting, and how that is known."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt

from kareus_pp._files import read_document, validated, write_document
from kareus_pp.errors import FormatError, ProfileError
from kareus_pp.schedule import InstructionClass
from kareus_pp.setting import Setting

FORMAT_VERSION = 1


class Source(str, enum.Enum):
    """Where energy readings came from; never mixed within one profile."""

    COUNTER = "counter"
    INSTANT_POWER = "instant-power"
    AVERAGE_POWER = "average-power"
    EMULATED = "emulated"
    FILE = "file"

    @property
    def is_emulated(self) -> bool:
        """True where no physical GPU was read."""
        return self is Source.EMULATED


class Origin(str, enum.Enum):
    """How the numbers of one option came about."""

    MEASURED = "measured"
    PREDICTED = "predicted"


@dataclass(frozen=True)
class Option:
    """A setting with its cost for one instruction class.

    Attributes:
        setting: Clock and overlap setting.
        time_s: Duration in seconds.
        energy_j: Energy of one GPU during the instruction, static part included, in joules.
        time_sd_s: Standard deviation of `time_s`; None where unknown.
        energy_sd_j: Standard deviation of `energy_j`; None where unknown.
        origin: Measured at this setting, or predicted by a learned model.
    """

    setting: Setting
    time_s: float
    energy_j: float
    time_sd_s: float | None = None
    energy_sd_j: float | None = None
    origin: Origin = Origin.MEASURED


@dataclass(frozen=True)
class DeviceFacts:
    """What the profile knows of the GPUs it was taken on.

    Attributes:
        name: Device name as reported by the driver or the GPU model.
        clocks_mhz: Supported SM clocks, ascending.
        source: Source of the energy readings.
        scope: What the readings cover: `gpu` or `module`; `""` where unknown.
        switch_latency_s: Delay of a clock change; None where not measured.
    """

    name: str = ""
    clocks_mhz: tuple[int, ...] = ()
    source: Source = Source.FILE
    scope: str = ""
    switch_latency_s: float | None = None


@dataclass(frozen=True)
class Overhead:
    """Time of an iteration that the instructions do not show.

    Attributes:
        iteration_s: Added once to every iteration (load, optimizer step), in seconds.
        p2p_s: Added where a dependency crosses stages, in seconds.
    """

    iteration_s: float = 0.0
    p2p_s: float = 0.0


@dataclass(frozen=True)
class Profile:
    """The options of every instruction class and the blocking power of every stage.

    Attributes:
        options: For each instruction class its options.
        blocking_power_w: For each stage, power of one waiting GPU in watts.
        overhead: Time that the dependency graph does not see.
        device: Device facts.
        fingerprint: Effective model, precision, recompute, ZeRO, ... settings, as text.
        provenance: How and when the profile was taken, as text.
    """

    options: Mapping[InstructionClass, tuple[Option, ...]]
    blocking_power_w: tuple[float, ...]
    overhead: Overhead = field(default_factory=Overhead)
    device: DeviceFacts = field(default_factory=DeviceFacts)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.blocking_power_w)

    @cached_property
    def _by_setting(self) -> Mapping[tuple[InstructionClass, Setting], Option]:
        return {(cls, o.setting): o for cls, options in self.options.items() for o in options}

    def options_of(self, cls: InstructionClass) -> tuple[Option, ...]:
        """The options of a class.

        Raises:
            ProfileError: The class is not in the profile.
        """
        try:
            return self.options[cls]
        except KeyError:
            raise ProfileError(
                f"the profile has no options for instruction class {cls}; it has "
                f"{', '.join(map(str, list(self.options)[:8])) or 'none'}; profile this schedule"
            ) from None

    def option(self, cls: InstructionClass, setting: Setting) -> Option:
        """The option of a class at a setting; a default clock means the highest clock known.

        Raises:
            ProfileError: The class, or this setting of it, is not in the profile.
        """
        found = self._by_setting.get((cls, setting))
        if found is not None:
            return found
        options = self.options_of(cls)
        same = [o for o in options if o.setting.overlap == setting.overlap]
        if same and (setting.clock_mhz is None or cls.kind.is_fixed):
            return max(same, key=lambda o: o.setting.clock_mhz or 1 << 30)
        raise ProfileError(
            f"the profile has no option {setting} for instruction class {cls}; it has "
            f"{', '.join(str(o.setting) for o in options[:8]) or 'none'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `from_dict` reads it back."""
        return {
            "device": {
                "name": self.device.name,
                "clocks_mhz": list(self.device.clocks_mhz),
                "source": self.device.source.value,
                "scope": self.device.scope,
                "switch_latency_s": self.device.switch_latency_s,
            },
            "blocking_power_w": list(self.blocking_power_w),
            "overhead": {"iteration_s": self.overhead.iteration_s, "p2p_s": self.overhead.p2p_s},
            "fingerprint": dict(self.fingerprint),
            "provenance": dict(self.provenance),
            "options": {
                str(cls): [
                    {
                        "setting": str(o.setting),
                        "time_s": o.time_s,
                        "energy_j": o.energy_j,
                        "time_sd_s": o.time_sd_s,
                        "energy_sd_j": o.energy_sd_j,
                        "origin": o.origin.value,
                    }
                    for o in options
                ]
                for cls, options in self.options.items()
            },
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Profile:
        """Read and validate the JSON form.

        Raises:
            FormatError: A value is missing, malformed, negative or not finite; an option is there
                twice; or a stage has no blocking power.
        """
        file = validated(_ProfileFile, body, "profile")
        profile = cls(
            options={
                InstructionClass.parse(name): tuple(
                    Option(
                        Setting.parse(o.setting),
                        o.time_s,
                        o.energy_j,
                        o.time_sd_s,
                        o.energy_sd_j,
                        o.origin,
                    )
                    for o in options
                )
                for name, options in file.options.items()
            },
            blocking_power_w=tuple(file.blocking_power_w),
            overhead=Overhead(file.overhead.iteration_s, file.overhead.p2p_s),
            device=DeviceFacts(
                file.device.name,
                tuple(file.device.clocks_mhz),
                file.device.source,
                file.device.scope,
                file.device.switch_latency_s,
            ),
            fingerprint=file.fingerprint,
            provenance=file.provenance,
        )
        profile._check()
        return profile

    def _check(self) -> None:
        for cls, options in self.options.items():
            if cls.stage >= self.stages:
                raise FormatError(
                    f"the profile has options of instruction class {cls} and the blocking power "
                    f"of {self.stages} stages; give one for every stage"
                )
            settings = [option.setting for option in options]
            if len(set(settings)) < len(settings):
                twice = next(s for s in settings if settings.count(s) > 1)
                raise FormatError(
                    f"the profile has option {twice} of instruction class {cls} more than once; "
                    f"keep one of them"
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file, atomically."""
        write_document(path, "profile", FORMAT_VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file; raises `FormatError` for anything malformed."""
        return cls.from_dict(read_document(path, "profile", FORMAT_VERSION))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _OptionFile(_Strict):
    setting: str
    time_s: NonNegativeFloat
    energy_j: NonNegativeFloat
    time_sd_s: NonNegativeFloat | None = None
    energy_sd_j: NonNegativeFloat | None = None
    origin: Origin = Origin.MEASURED


class _OverheadFile(_Strict):
    iteration_s: NonNegativeFloat = 0.0
    p2p_s: NonNegativeFloat = 0.0


class _DeviceFile(_Strict):
    name: str = ""
    clocks_mhz: list[PositiveInt] = []
    source: Source = Source.FILE
    scope: str = ""
    switch_latency_s: NonNegativeFloat | None = None


class _ProfileFile(_Strict):
    options: dict[str, list[_OptionFile]]
    blocking_power_w: list[NonNegativeFloat]
    overhead: _OverheadFile = _OverheadFile()
    device: _DeviceFile = _DeviceFile()
    fingerprint: dict[str, str] = {}
    provenance: dict[str, str] = {}
