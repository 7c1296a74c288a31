"""A GPU model: time and power of a piece of work at an SM clock, from a file of a few constants.

The formulas, with `f` the requested SM clock and `u` the share of the time that computes:

* effective clock `f_e = f - w log(1 + exp((f - k) / w))`: the power limit of the board holds the
  clock at about `k`, a knee of width `w` (kernels differ in power, so the knee is soft);
* time `t = flops / (r f_e) + bytes / b`: compute scales with the clock, memory and links do not;
* `phi(f) = f V(f)^2`, relative to the highest clock, with a voltage `V` that is constant up to a
  knee and rises linearly above it: the dynamic power of CMOS circuits;
* power `static + (u compute + (1 - u) memory) phi(f_e)`, plus leakage with temperature: the SMs
  are clocked while memory or links limit, too;
* waiting power `static + (waiting - static) phi(f)`: a waiting GPU spins in a kernel, at the clock
  that it holds;
* temperature follows `T' = (ambient + R p - T) / tau`.

The constants of the files that come with the package were fitted to measurements (`simulate.fit`);
docs/emulation.md says which were and which were assumed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from kareus_pp.errors import ConfigError

FORMAT: Final = "kareus-pp/gpu-model"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True)
class Work:
    """What one instruction has to do.

    Attributes:
        flops: Floating-point operations.
        bytes: Bytes that pass through GPU memory.
    """

    flops: float
    bytes: float

    def __post_init__(self) -> None:
        for name, value in (("flops", self.flops), ("bytes", self.bytes)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value} and must be finite and not negative")

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> Work:
        return Work(self.flops * factor, self.bytes * factor)

    __rmul__ = __mul__

    def scaled(self, scale: float) -> Work:
        """The same work of a model and a microbatch that are larger alike.

        Hidden size and tokens both grow by `s = scale ** (1/3)`: the flops of a matrix product grow
        by `s^3`, its operands, weights and activations, by `s^2`. So a toy model keeps the ratio of
        flops to bytes that a model of the emulated size has.
        """
        return Work(self.flops * scale, self.bytes * scale ** (2 / 3))


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Rates(_Part):
    """How fast work is done."""

    flops_per_s_per_mhz: PositiveFloat = Field(description="flops per second for each MHz")
    bytes_per_s: PositiveFloat = Field(description="bytes per second, at any clock")


class Power(_Part):
    """Power in watts at the reference temperature; dynamic parts at the highest clock."""

    static_w: PositiveFloat = Field(description="drawn whenever the GPU is on")
    compute_w: NonNegativeFloat = Field(description="added while computing")
    memory_w: NonNegativeFloat = Field(description="added while memory or links limit")
    waiting_w: PositiveFloat = Field(description="in all, while waiting at the highest clock")
    voltage_knee_mhz: PositiveFloat = Field(description="voltage is constant up to here")
    voltage_rise_per_mhz: NonNegativeFloat = Field(description="relative rise above the knee")

    @model_validator(mode="after")
    def _waiting_is_least(self) -> Power:
        if self.waiting_w < self.static_w:
            raise ValueError(f"waiting_w {self.waiting_w} is below static_w {self.static_w}")
        return self


class Throttle(_Part):
    """The power limit of the board as a soft limit on the clock."""

    knee_mhz: PositiveFloat
    width_mhz: PositiveFloat


class Thermal(_Part):
    """First-order thermal state."""

    ambient_c: float
    resistance_c_per_w: NonNegativeFloat
    time_constant_s: PositiveFloat
    reference_c: float = Field(description="temperature that the power figures hold at; at start")
    leakage_w_per_c: NonNegativeFloat = Field(description="static power above the reference")

    @model_validator(mode="after")
    def _is_stable(self) -> Thermal:
        if self.leakage_w_per_c * self.resistance_c_per_w >= 0.5:
            raise ValueError("leakage_w_per_c times resistance_c_per_w must stay below 0.5")
        return self


def _ascending(clocks: tuple[int, ...]) -> tuple[int, ...]:
    if not clocks or list(clocks) != sorted(set(clocks)):
        raise ValueError("the clocks must ascend, each once, at least one")
    return clocks


class GpuModel(_Part):
    """An emulated GPU; read with `load_gpu_model`."""

    format: Literal["kareus-pp/gpu-model"] = FORMAT
    version: Literal[1] = FORMAT_VERSION
    name: str = Field(description="device name; profiles show it with the word emulated")
    origin: str = Field("", description="where the numbers come from")
    clocks_mhz: Annotated[tuple[PositiveInt, ...], AfterValidator(_ascending)]
    rates: Rates
    power: Power
    throttle: Throttle | None = None
    thermal: Thermal
    switch_latency_s: NonNegativeFloat
    counter_tick_s: NonNegativeFloat = 0.1

    @property
    def top_mhz(self) -> int:
        """The highest clock, which is also the default clock."""
        return self.clocks_mhz[-1]

    @cached_property
    def _top_phi(self) -> float:
        return self._raw_phi(self.top_mhz)

    def _raw_phi(self, mhz: float) -> float:
        above = max(0.0, mhz - self.power.voltage_knee_mhz)
        return mhz * (1.0 + self.power.voltage_rise_per_mhz * above) ** 2

    def phi(self, mhz: float) -> float:
        """Clock times voltage squared, relative to the highest clock."""
        return self._raw_phi(mhz) / self._top_phi

    def effective_mhz(self, mhz: float) -> float:
        """The clock that is held while computing when `mhz` is requested."""
        if self.throttle is None:
            return mhz
        excess = (mhz - self.throttle.knee_mhz) / self.throttle.width_mhz
        return mhz - self.throttle.width_mhz * _softplus(excess)

    def is_throttled(self, mhz: float) -> bool:
        """True where the power limit holds the clock more than 1 % below the request."""
        return self.effective_mhz(mhz) < 0.99 * mhz

    def time_s(self, work: Work, mhz: float) -> float:
        """Duration of `work` at a requested clock, in seconds."""
        return sum(self._times_s(work, mhz))

    def _times_s(self, work: Work, mhz: float) -> tuple[float, float]:
        compute = work.flops / (self.rates.flops_per_s_per_mhz * self.effective_mhz(mhz))
        return compute, work.bytes / self.rates.bytes_per_s

    def power_w(self, work: Work, mhz: float) -> float:
        """Mean power during `work` at a requested clock and the reference temperature, in watts."""
        compute_s, memory_s = self._times_s(work, mhz)
        share = compute_s / (compute_s + memory_s) if compute_s + memory_s else 0.0
        dynamic_w = share * self.power.compute_w + (1 - share) * self.power.memory_w
        return self.power.static_w + dynamic_w * self.phi(self.effective_mhz(mhz))

    def energy_j(self, work: Work, mhz: float) -> float:
        """Energy of `work` at a requested clock and the reference temperature, in joules."""
        return self.time_s(work, mhz) * self.power_w(work, mhz)

    def waiting_power_w(self, mhz: float) -> float:
        """Power of a GPU that waits, holding the clock `mhz`, at the reference temperature."""
        spin = self.power.waiting_w - self.power.static_w
        return self.power.static_w + spin * self.phi(mhz)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def gpu_model_names() -> tuple[str, ...]:
    """The names of the GPU models that come with the package."""
    folder = resources.files("kareus_pp.configs") / "gpu_models"
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml")))


@lru_cache(maxsize=16)
def load_gpu_model(name_or_path: str | os.PathLike[str]) -> GpuModel:
    """Read a GPU model: by its name among those of the package, or from a YAML file.

    Raises:
        ConfigError: The name is unknown, or the file is absent or malformed.
    """
    text = os.fspath(name_or_path)
    if text in gpu_model_names():
        file = resources.files("kareus_pp.configs") / "gpu_models" / f"{text}.yaml"
        return parse_gpu_model(file.read_text(encoding="utf-8"), text)
    try:
        return parse_gpu_model(Path(text).read_text(encoding="utf-8"), text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(
            f"cannot read the GPU model {text!r} ({reason}); name one of "
            f"{', '.join(gpu_model_names())}, or an existing YAML file"
        ) from None


def parse_gpu_model(text: str, origin: str = "text") -> GpuModel:
    """Validate the YAML text of a GPU model; raises `ConfigError`."""
    try:
        body = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the GPU model {origin!r} is not valid YAML ({reason:.120}); correct it"
        ) from None
    if not isinstance(body, Mapping):
        raise ConfigError(f"the GPU model {origin!r} must hold an object of keys and values")
    try:
        return GpuModel.model_validate(dict(body))
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None


def _explain(error: ValidationError, origin: str) -> str:
    first: Any = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the whole"
    if first["type"] == "extra_forbidden":
        return f"the GPU model {origin!r} has an unknown key {place!r}; remove it"
    if first["type"] == "missing":
        return f"the GPU model {origin!r} misses the key {place!r}; add it"
    reason = first["msg"].removeprefix("Value error, ")
    return (
        f"the GPU model {origin!r} has {place} = {first['input']!r:.60}, which is not allowed: "
        f"{reason}; correct it"
    )
