"""Frontiers of 1F1B, interleaved 1F1B and zero-bubble H1 beside each other, from one profile.

Interleaved 1F1B comes thrice: with asynchronous sends, and as Megatron-Core executes it with and
without overlapped ones. The profile has a forward and a backward for every stage. A chunk of an
interleaved stage is an equal share of both; the halves of a split backward are half of it each.
What a real model adds to that (more messages, activations kept longer) is not in the figures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kareus_pp.builders import build_schedule
from kareus_pp.planner import frontier
from kareus_pp.profile import DeviceFacts, Option, Origin, Profile, Source
from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.setting import Setting
from kareus_pp.simulate.gpu_model import Work, load_gpu_model

STAGES, MICROBATCHES, CHUNKS, POINTS = 4, 16, 2, 8
SCHEDULES = {
    "1f1b": ("1f1b", 1, "asynchronous"),
    "interleaved": ("interleaved", CHUNKS, "asynchronous"),
    "interleaved, overlapped": ("interleaved", CHUNKS, "overlapped"),
    "interleaved, blocking": ("interleaved", CHUNKS, "blocking"),
    "zb-h1": ("zb-h1", 1, "asynchronous"),
}
# Seconds of a forward at the highest clock: the last stage holds the head.
FORWARD_S = (0.030, 0.030, 0.030, 0.040)


@dataclass(frozen=True)
class Row:
    """One plan of one frontier; energy over all stages, `gap` to the proven bound."""

    schedule: str
    time_s: float
    energy_j: float
    gap: float | None


def emulated_profile() -> Profile:
    """Four stages of compute-bound work on an emulated GPU."""
    gpu = load_gpu_model("a100")
    options: dict[InstructionClass, tuple[Option, ...]] = {}
    unit = Work(1e12, 1e9)
    for stage, forward_s in enumerate(FORWARD_S):
        forward = unit * (forward_s / gpu.time_s(unit, gpu.top_mhz))
        for kind, work in ((Kind.FORWARD, forward), (Kind.BACKWARD, 2 * forward)):
            options[InstructionClass(stage, kind)] = tuple(
                Option(
                    Setting(mhz),
                    gpu.time_s(work, mhz),
                    gpu.energy_j(work, mhz),
                    origin=Origin.PREDICTED,
                )
                for mhz in gpu.clocks_mhz[:: max(1, len(gpu.clocks_mhz) // 16)]
            )
    waiting_w = gpu.waiting_power_w(gpu.top_mhz)
    device = DeviceFacts(name="a100", source=Source.EMULATED)
    return Profile(options, (waiting_w,) * STAGES, device=device)


def shared_out(profile: Profile, chunks: int) -> Profile:
    """The profile with chunk classes and split backwards derived from forwards and backwards."""
    options: dict[InstructionClass, tuple[Option, ...]] = {}
    for cls, whole in profile.options.items():
        kinds = {cls.kind: 1.0}
        if cls.kind is Kind.BACKWARD:
            kinds |= {Kind.INPUT_GRADIENT: 0.5, Kind.WEIGHT_GRADIENT: 0.5}
        for kind, part in kinds.items():
            for chunk in range(chunks):
                share = part / chunks
                options[cls._replace(kind=kind, chunk=chunk)] = tuple(
                    replace(o, time_s=o.time_s * share, energy_j=o.energy_j * share) for o in whole
                )
    return replace(profile, options=options)


def measure(profile: Profile, points: int = POINTS) -> list[Row]:
    """The frontier of every schedule."""
    rows = []
    for title, (name, chunks, p2p) in SCHEDULES.items():
        schedule = build_schedule(name, STAGES, MICROBATCHES, chunks, p2p)
        found = frontier(schedule, shared_out(profile, chunks), points=points)
        for plan in found.plans:
            assert plan.time_s is not None
            assert plan.energy_j is not None
            rows.append(Row(title, plan.time_s, plan.energy_j, plan.gap))
    return rows


def main() -> None:
    """Print one table: a row for each point, a column for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--profile", type=Path, help="profile of four stages; emulated without")
    arguments = parser.parse_args()
    profile = Profile.load(arguments.profile) if arguments.profile else emulated_profile()
    rows = measure(profile)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table("point", *SCHEDULES)
    columns = [[row for row in rows if row.schedule == title] for title in SCHEDULES]
    for point in range(max(map(len, columns))):
        cells = [
            f"{c[point].time_s:.3f} s  {c[point].energy_j:.0f} J" if point < len(c) else ""
            for c in columns
        ]
        table.add_row(str(point), *cells)
    Console(width=130).print(table)
    print(
        f"energies: {profile.device.source.value}; largest gap {max(r.gap or 0 for r in rows):.2%}"
    )


if __name__ == "__main__":
    main()
