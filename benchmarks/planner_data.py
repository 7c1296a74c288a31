"""Measured profiles, and what the published tables and peers say of them."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from kareus_pp.profile import Profile
from kareus_pp.profile_csv import load_any_profile
from kareus_pp.schedule import InstructionClass
from kareus_pp.setting import OverlapSetting

# Blocking power of a waiting GPU in watts, from the README of the data.
BLOCKING_W = {"a100_sxm": 83.64, "a40": 70.38}
# Perseus (SOSP 2024), intrinsic savings in emulation, percent of the energy of all instructions at
# the highest clock, at the same iteration time; by microbatches.
PUBLISHED_SAVINGS = {
    "gpt3-175b+a100_sxm": {12: 15.2, 24: 14.2, 48: 13.6, 96: 13.3},
    "gpt3-175b+a40": {12: 11.8, 24: 10.2, 48: 9.3, 96: 8.9},
    "bloom+a100_sxm": {12: 10.5, 24: 7.1, 48: 5.2, 96: 4.3},
}
MICROBATCHES = (12, 24, 48, 96)


def data_folder() -> Path:
    """The folder of measured data; ends the program with one sentence where it is absent."""
    root = Path(__file__).resolve().parent.parent
    folder = Path(os.environ.get("KAREUS_PP_DATA", root.parent / "shared" / "data")) / "sosp24"
    if not folder.is_dir():
        sys.exit(f"the measured data folder {folder} is absent; set KAREUS_PP_DATA")
    return folder


def measured_profiles() -> dict[str, Profile]:
    """The measured stage profiles by name."""
    found = {}
    for path in sorted((data_folder() / "stage_profile").glob("*.csv")):
        found[path.stem] = load_any_profile(path, [BLOCKING_W[path.stem.split("+")[1]]])
    return found


def deeper(profile: Profile, stages: int, spread: float, seed: int) -> Profile:
    """More stages from one inner stage of a profile, unbalanced by a relative spread."""
    random = np.random.default_rng(seed)
    options = {}
    for stage in range(stages):
        factor = float(1 + spread * random.standard_normal())
        for cls, own in profile.options.items():
            if cls.stage == 1:
                options[InstructionClass(stage, cls.kind)] = tuple(
                    replace(o, time_s=o.time_s * factor, energy_j=o.energy_j * factor) for o in own
                )
    return replace(profile, options=options, blocking_power_w=profile.blocking_power_w[:1] * stages)


def with_assumed_overlap(profile: Profile) -> Profile:
    """The profile with an overlapped option at every clock, whose cost is assumed."""
    setting = OverlapSetting.parse("mlp@0:0")
    options = {}
    for cls, own in profile.options.items():
        clocks = [o.setting.clock_mhz or 0 for o in own]
        low, span = min(clocks), max(clocks) - min(clocks) or 1
        options[cls] = own + tuple(
            replace(
                o,
                setting=o.setting._replace(overlap=setting),
                time_s=o.time_s * (1 - 0.1 * height),
                energy_j=o.energy_j * (1.06 - 0.03 * height),
            )
            for o, height in zip(own, [(clock - low) / span for clock in clocks], strict=True)
        )
    return replace(profile, options=options)


def noisy(profile: Profile, noise: float, seed: int) -> Profile:
    """The profile with relative Gaussian noise on times and energies, declared as such."""
    random = np.random.default_rng(seed)
    return replace(
        profile,
        options={
            cls: tuple(
                replace(
                    o,
                    time_s=o.time_s * float(1 + noise * random.standard_normal()),
                    energy_j=o.energy_j * float(1 + noise * random.standard_normal()),
                    time_sd_s=noise * o.time_s,
                    energy_sd_j=noise * o.energy_j,
                )
                for o in own
            )
            for cls, own in profile.options.items()
        },
    )
