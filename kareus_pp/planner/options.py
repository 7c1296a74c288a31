"""Options of the planner itself: solver, limits and prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from kareus_pp.errors import ConfigError
from kareus_pp.evaluate import SwitchPrice
from kareus_pp.profile import Profile

if TYPE_CHECKING:
    from kareus_pp.config import PlannerConfig

Solver = Literal["highs", "cbc"]
Smoothing = Literal["auto", "none", "physical", "local", "exponential"]


@dataclass(frozen=True)
class PlannerOptions:
    """How plans are made.

    Attributes:
        solver: Solver behind PuLP.
        time_limit_s: Time for one plan in seconds; the best plan so far is returned with its gap.
        switch_delay_s: Delay of a clock switch in seconds. None: as the profile's device facts
            say, and not priced where they do not know it (a CSV, for example).
        switch_energy_j: Energy of a clock switch in joules, on top of the blocking power that is
            drawn during its delay; None: 0.
        min_dwell_s: Least time between two clock switches of a stage in seconds.
        max_switches: Most clock switches of a stage in one iteration, the one at its start
            included.
        power_cap_w: Most average power over all stages, one GPU each, in watts.
        clocks_mhz: Clocks to use; empty: all that were profiled.
        stage_clocks_mhz: Clocks to use on single stages, instead of `clocks_mhz`.
        smoothing: Treatment of noise on the profile, see `kareus_pp.planner.smoothing`.
        seed: Seed of the search.
    """

    solver: Solver = "highs"
    time_limit_s: float = 20.0
    switch_delay_s: float | None = None
    switch_energy_j: float | None = None
    min_dwell_s: float = 0.0
    max_switches: int | None = None
    power_cap_w: float | None = None
    clocks_mhz: tuple[int, ...] = ()
    stage_clocks_mhz: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    smoothing: Smoothing = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values; raises `ConfigError` naming the first that is not allowed."""
        for name, allowed in (("solver", Solver), ("smoothing", Smoothing)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ConfigError(
                    f"planner {name} is {value!r}; use one of {', '.join(get_args(allowed))}"
                )
        for name in ("time_limit_s", "power_cap_w", "max_switches"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"planner {name} is {value!r} and must be above 0")
        for name in ("switch_delay_s", "switch_energy_j", "min_dwell_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"planner {name} is {value!r} and must be 0 or more, and finite")

    @classmethod
    def from_config(cls, config: PlannerConfig) -> PlannerOptions:
        """Options from the `planner` section of the configuration."""
        return cls(
            solver=config.solver,
            time_limit_s=config.time_limit_s,
            switch_delay_s=config.switch_delay_s,
            switch_energy_j=config.switch_energy_j,
            min_dwell_s=config.min_dwell_s,
            max_switches=config.max_switches,
            power_cap_w=config.power_cap_w,
            clocks_mhz=config.clocks_mhz,
        )

    def switch_price(self, profile: Profile) -> SwitchPrice:
        """Price of one clock switch."""
        delay = self.switch_delay_s
        if delay is None:
            delay = profile.device.switch_latency_s
        return SwitchPrice(delay or 0.0, self.switch_energy_j or 0.0)

    def allowed_clocks(self, stage: int) -> frozenset[int] | None:
        """Clocks that a stage may use; None where all may be used."""
        clocks = self.stage_clocks_mhz.get(stage, self.clocks_mhz)
        return frozenset(clocks) or None
