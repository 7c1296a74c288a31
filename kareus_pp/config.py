"""The configuration: one model, three doors (DeepSpeed JSON, Megatron arguments, a file)."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from kareus_pp.errors import ConfigError, TargetError
from kareus_pp.target import Target, parse_target

Mode = Literal["auto", "observe", "profile", "apply"]
DeviceName = Literal["auto", "nvml", "zeusd", "command", "emulated", "dry-run"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _check_target(text: str) -> str:
    try:
        parse_target(text)
    except TargetError as error:
        raise ValueError(str(error)) from None
    return text


class ProfilingConfig(_Section):
    """Budget of the profile phase."""

    plans: PositiveInt = Field(12, description="most frequency plans to try")
    iterations_per_plan: PositiveInt = Field(3, description="iterations of each plan")
    max_slowdown_percent: PositiveFloat = Field(
        30.0, description="no plan is predicted slower than this against default clocks"
    )
    sample_period_s: PositiveFloat = Field(0.02, description="period of device readings")


class PlannerConfig(_Section):
    """How plans are made."""

    solver: Literal["highs", "cbc"] = Field("highs", description="solver behind PuLP")
    time_limit_s: PositiveFloat = Field(20.0, description="time for one plan")
    points: PositiveInt = Field(10, description="points of the frontier")
    switch_delay_s: NonNegativeFloat | None = Field(
        None, description="delay of a clock switch; none: as measured"
    )
    switch_energy_j: NonNegativeFloat | None = Field(
        None, description="energy of a clock switch; none: as measured"
    )
    min_dwell_s: NonNegativeFloat = Field(0.0, description="least time between clock switches")
    max_switches: PositiveInt | None = Field(
        None, description="most clock switches of a stage in one iteration"
    )
    power_cap_w: PositiveFloat | None = Field(
        None, description="most average power of all stages together"
    )
    clocks_mhz: tuple[PositiveInt, ...] = Field(
        (), description="clocks to use; none: all that were profiled"
    )


class EmulatedConfig(_Section):
    """The emulated device; read by `device.emulated` only."""

    gpu_model: str = Field("a100", description="name or path of a GPU model file")
    work_scale: PositiveFloat = Field(
        1.0, description="factor on the work that is counted from the stage's modules"
    )
    sequence_length: PositiveInt = Field(
        1024, description="tokens of a sample, where the framework does not tell"
    )
    time_factors: tuple[PositiveFloat, ...] = Field(
        (), description="hidden factor on each stage's true time"
    )
    power_factors: tuple[PositiveFloat, ...] = Field(
        (), description="hidden factor on each stage's true power"
    )
    seed: int = Field(0, description="seed of the measurement noise")
    noise: NonNegativeFloat = Field(0.0, description="relative noise of times, standard deviation")
    overlap_factor: PositiveFloat = Field(
        1.0, description="hidden factor on the true time of instructions that overlap"
    )


class OverlapConfig(_Section):
    """Overlap of tensor-parallel communication with compute."""

    enabled: bool = Field(False, description="split microbatches where the plan says so")
    levels: tuple[PositiveInt, ...] = Field(
        (), description="numbers of SMs to make communicators for, three or four at most"
    )
    timeout_s: PositiveFloat = Field(
        10.0, description="longest wait for the other tensor-parallel ranks before a step"
    )
    allow_untested: bool = Field(
        False, description="Transformer Engine and context parallelism too, which were never run"
    )
    candidates: NonNegativeInt = Field(
        3, description="most overlap settings that the profile phase tries, besides sequential"
    )


class CommandConfig(_Section):
    """A site command that may set clocks where the trainer may not."""

    lock: str = Field("", description="command template with {uuid} and {mhz}")
    unlock: str = Field("", description="command template with {uuid}")


class KareusConfig(_Section):
    """All that a user can set; every door fills this model."""

    enabled: bool = Field(True, description="off: nothing is hooked")
    mode: Mode = Field("auto", description="auto: observe, profile, plan, apply, watch")
    device: DeviceName = Field("auto", description="auto: NVML where there is a GPU, else dry-run")
    target: Annotated[str, AfterValidator(_check_target)] = Field(
        "fastest", description="how to choose a plan"
    )
    plan: Path | None = Field(None, description="plan file to apply")
    profile: Path | None = Field(None, description="profile file to start from")
    output: Path = Field(Path("kareus"), description="folder for events, runs, profile, plans")
    observe_steps: PositiveInt = Field(2, description="steps observed at default clocks")
    sample_always: bool = Field(
        False, description="read the device in steady state too, for the energy of every step"
    )
    min_dwell_s: NonNegativeFloat = Field(
        0.0, description="the clock controller keeps a clock for at least this long"
    )
    profiling: ProfilingConfig = ProfilingConfig()
    planner: PlannerConfig = PlannerConfig()
    emulated: EmulatedConfig = EmulatedConfig()
    command: CommandConfig = CommandConfig()
    overlap: OverlapConfig = OverlapConfig()

    @property
    def parsed_target(self) -> Target:
        """The target as typed data."""
        return parse_target(self.target)


def parse_config(
    values: Mapping[str, Any] | None, origin: str = "the kareus config"
) -> KareusConfig:
    """Validate a configuration.

    Raises:
        ConfigError: One sentence for the first fault; an unknown key names the nearest known one.
    """
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{origin} is {values!r:.60} and must be an object, as in {{'enabled': true}}"
        )
    try:
        return KareusConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None


def load_config(path: str | os.PathLike[str]) -> KareusConfig:
    """Read a configuration from a YAML or JSON file.

    A DeepSpeed config may be named too: its `kareus` object counts.

    Raises:
        ConfigError: The file is absent or malformed, or a value is not allowed.
    """
    return parse_config(read_config_file(path), origin=f"the config file {os.fspath(path)!r}")


def read_config_file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The values of a YAML or JSON config file, not yet validated; raises `ConfigError`."""
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {name!r} ({error.strerror}); name an existing file"
        ) from None
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the config file {name!r} is not valid YAML or JSON ({reason:.120}); correct it"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"the config file {name!r} must hold an object of keys and values")
    inner: Mapping[str, Any] = values.get("kareus", values)
    return inner


def _explain(error: ValidationError, origin: str) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.0)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{origin} has an unknown key {place!r}; {hint}known keys: {', '.join(known)}"
    reason = first["msg"].removeprefix("Value error, ")
    return f"{origin} has {place} = {first['input']!r:.60}, which is not allowed: {reason}"


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = KareusConfig
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)
