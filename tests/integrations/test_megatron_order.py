"""Megatron-Core's schedules, run for real over gloo: what hooks record and what they change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kareus_pp.builders import build_1f1b, build_interleaved
from kareus_pp.exchanges import Exchange, waits_of
from kareus_pp.plan import Plan
from kareus_pp.schedule import Instruction, Schedule, validate_schedule
from kareus_pp.setting import Setting
from tests.integrations.world import run_world

# Megatron itself asks for this with two stages: without it, messages of both directions mix.
OVERLAPPED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
CASES: dict[str, dict[str, Any]] = {
    "no pipelining": {"pp": 1, "microbatches": 3},
    "1f1b": {"pp": 4, "microbatches": 8},
    "1f1b, fewer microbatches than stages": {"pp": 4, "microbatches": 2},
    "1f1b, two pipelines": {"pp": 2, "microbatches": 5},
    "interleaved": {"pp": 4, "chunks": 2, "microbatches": 8},
    "interleaved, all in warm-up": {"pp": 4, "chunks": 2, "microbatches": 4},
    "interleaved, uneven groups": {
        **{"pp": 4, "chunks": 3, "microbatches": 14, "group": 5},
        "config": {"microbatch_group_size_per_vp_stage": 5},
    },
    "interleaved, overlapped sends": {
        **{"pp": 4, "chunks": 2, "microbatches": 8},
        "config": OVERLAPPED,
    },
    "interleaved, two pipelines": {
        **{"pp": 2, "chunks": 2, "microbatches": 6},
        "config": OVERLAPPED,
    },
    "interleaved, groups of 3": {
        **{"pp": 2, "chunks": 2, "microbatches": 9, "group": 3},
        "config": {**OVERLAPPED, "microbatch_group_size_per_vp_stage": 3},
    },
    "tensor parallel": {"pp": 2, "tp": 2, "microbatches": 4},
    "overlapped gradient reduction": {"pp": 2, "microbatches": 3, "ddp": True},
    "interleaved, overlapped reduction": {
        **{"pp": 2, "chunks": 2, "microbatches": 4, "ddp": True},
        "config": OVERLAPPED,
    },
    "overlapped parameter gathering": {"pp": 2, "microbatches": 3, "ddp": True, "gather": True},
    "fused": {
        **{"pp": 4, "chunks": 2, "microbatches": 8, "fused": True},
    },
}
OLDEST = "0.12.3"
OLDEST_CASES = [name for name in CASES if name != "fused"]
RANKS = 4


def record(names: list[str], *path: Path, prepare: str = "") -> dict[str, list[dict[str, Any]]]:
    """For each case what every rank recorded."""
    ranks = run_world(
        "tests.integrations.megatron_cases:orders",
        RANKS,
        prepare=prepare,
        path=path,
        cases=[CASES[name] for name in names],
    )
    return {name: [rank[number] for rank in ranks] for number, name in enumerate(names)}


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[dict[str, Any]]]:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    return record(list(CASES))


@pytest.fixture(scope="module")
def recorded_oldest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("megatron-core")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, f"megatron-core=={OLDEST}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"megatron-core {OLDEST} cannot be installed: {done.stderr[-200:]}")
    return record(OLDEST_CASES, folder)


@pytest.fixture(scope="module")
def recorded_020() -> dict[str, list[dict[str, Any]]]:
    return record(list(CASES), megatron_020(), prepare="tests.integrations.megatron_stubs")


def megatron_020() -> Path:
    """The checkout of Megatron-LM 0.20 that the environment names; skips where it names none."""
    folder = os.environ.get("KAREUS_PP_MEGATRON_020")
    if not folder:
        pytest.skip("no Megatron-LM 0.20 checkout; set KAREUS_PP_MEGATRON_020 to one")
    return Path(folder)


def check(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["recorded"] == rank["own"]
        assert rank["equal"], "losses or gradients differ with the hooks on"
        assert rank["gradients"] > 0
        assert rank["finite"]
        calls = [call.split()[0] for call in rank["calls"]]
        assert calls == ["step_begin", "step_end", "close"]
    schedule = as_schedule(ranks)
    validate_schedule(schedule)
    settings = tuple(tuple(Setting(1410) for _ in row) for row in schedule.order)
    plan = Plan(schedule, settings)
    assert Plan.from_dict(plan.to_dict()) == plan


def as_schedule(ranks: list[dict[str, Any]]) -> Schedule:
    """The schedule that the leader would make of the streams of all ranks."""
    rows: dict[int, tuple[Instruction, ...]] = {}
    seen: defaultdict[int, set[int]] = defaultdict(set)
    for number, rank in enumerate(ranks):
        place = rank["topology"]
        assert place["rank"] == number
        row = tuple(map(Instruction.parse, rank["recorded"]))
        assert rows.setdefault(place["stage"], row) == row
        seen[place["stage"]].add(place["replica"])
    copies = set(range(ranks[0]["topology"]["replicas"]))
    assert all(replicas == copies for replicas in seen.values())
    model_order = tuple((stage, chunk) for stage, chunk in ranks[0]["topology"]["model_order"])
    schedule = Schedule(tuple(rows[stage] for stage in sorted(rows)), model_order)
    exchanges = {rank["topology"]["stage"]: rank["exchanges"] for rank in ranks}
    return replace(
        schedule,
        waits=waits_of(
            schedule, [list(map(Exchange.parse, exchanges[stage])) for stage in sorted(rows)]
        ),
    )


@pytest.mark.parametrize("name", CASES)
def test_the_stream_is_megatrons_own_and_nothing_else_changes(
    recorded: dict[str, list[dict[str, Any]]], name: str
) -> None:
    check(name, recorded[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OLDEST_CASES)
def test_the_oldest_supported_version(
    recorded_oldest: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert recorded_oldest[name][0]["fingerprint"]["version"] == OLDEST
    check(name, recorded_oldest[name])


@pytest.mark.parametrize("name", CASES)
def test_a_checkout_of_the_newest_version(
    recorded_020: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert recorded_020[name][0]["fingerprint"]["version"].startswith("0.20")
    check(name, recorded_020[name])


BUILT: dict[str, Schedule] = {
    "1f1b": build_1f1b(4, 8),
    "1f1b, fewer microbatches than stages": build_1f1b(4, 2),
    "interleaved": build_interleaved(4, 8, 2, p2p="blocking"),
    "interleaved, all in warm-up": build_interleaved(4, 4, 2, p2p="blocking"),
    "interleaved, uneven groups": build_interleaved(4, 14, 3, 5, p2p="blocking"),
    "interleaved, overlapped sends": build_interleaved(4, 8, 2, p2p="overlapped"),
    "interleaved, two pipelines": build_interleaved(2, 6, 2, p2p="overlapped"),
    "interleaved, groups of 3": build_interleaved(2, 9, 2, 3, p2p="overlapped"),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_recorded_schedule_has_the_signature_of_the_built_one(
    recorded: dict[str, list[dict[str, Any]]], name: str
) -> None:
    found = as_schedule(recorded[name])
    assert found.waits == BUILT[name].waits
    assert found.signature == BUILT[name].signature


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_the_oldest_supported_version_exchanges_alike(
    recorded_oldest: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert as_schedule(recorded_oldest[name]).signature == BUILT[name].signature


@pytest.mark.parametrize("name", BUILT)
def test_a_checkout_of_the_newest_version_exchanges_alike(
    recorded_020: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert as_schedule(recorded_020[name]).signature == BUILT[name].signature


def test_the_last_backward_of_every_chunk_reduces_gradients(
    recorded: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in recorded["overlapped gradient reduction"]:
        assert rank["communicating"] == [f"{rank['topology']['stage']}B2+comm"]
    for rank in recorded["interleaved, overlapped reduction"]:
        stage = rank["topology"]["stage"]
        assert rank["communicating"] == [f"{stage}B3.1+comm", f"{stage}B3+comm"]
    assert not any(rank["communicating"] for rank in recorded["1f1b"])


def test_the_first_forward_of_every_chunk_gathers_parameters(
    recorded: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in recorded["overlapped parameter gathering"]:
        stage = rank["topology"]["stage"]
        assert rank["communicating"] == [f"{stage}F0+comm", f"{stage}B2+comm"]


def test_fused_pairs_are_classes_of_their_own(recorded: dict[str, list[dict[str, Any]]]) -> None:
    for rank in recorded["fused"]:
        fused = [text.removesuffix("+comm") for text in rank["communicating"]]
        assert fused, "the steady phase fuses"
        assert [Instruction.parse(text).kind.value for text in fused] == ["F", "B"] * (
            len(fused) // 2
        )
        alone = set(rank["recorded"]) - set(fused)
        first = rank["recorded"].index(fused[0])
        assert set(rank["recorded"][:first]) <= alone, "warm-up forwards run alone"
