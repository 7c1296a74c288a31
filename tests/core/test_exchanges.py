"""What blocking exchanges make stages wait for, against a machine that executes them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kareus_pp.builders import P2p, build_interleaved
from kareus_pp.errors import FormatError, ScheduleError
from kareus_pp.evaluate import start_times
from kareus_pp.exchanges import Exchange, interleaved_exchanges, waits_of
from kareus_pp.plan import default_settings
from kareus_pp.planner import plan
from kareus_pp.profile import Option, Overhead, Profile
from kareus_pp.schedule import Instruction, Kind, Schedule, Wait, validate_schedule
from kareus_pp.setting import Setting
from kareus_pp.simulate.gpu_model import Work, load_gpu_model
from kareus_pp.simulate.virtual import VirtualPipeline
from kareus_pp.target import Deadline, Fastest

Rows = Sequence[Sequence[Exchange]]


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[Schedule, Rows]:
    """An interleaved schedule of Megatron's with its waits, and the exchanges they come from."""
    stages, chunks = draw(st.integers(2, 5)), draw(st.integers(2, 3))
    microbatches = draw(st.integers(stages, 4 * stages))
    group = draw(st.integers(stages, 2 * stages))
    rest = microbatches % group
    assume(group <= microbatches and not 0 < rest < stages)
    p2p = draw(st.sampled_from(["overlapped", "blocking"]))
    schedule = build_interleaved(stages, microbatches, chunks, group, p2p)
    return schedule, exchanges_of(schedule, group, overlapped=p2p == "overlapped")


def exchanges_of(schedule: Schedule, group: int, overlapped: bool) -> Rows:
    rows = []
    for stage, row in enumerate(schedule.order):
        chunk_of = [i.chunk for i in row if i.kind is Kind.FORWARD]
        warmup = (schedule.chunks - 1) * group + 2 * (schedule.stages - stage - 1)
        warmup = min(warmup, len(chunk_of))
        rows.append(interleaved_exchanges(stage, schedule.stages, chunk_of, warmup, overlapped))
    return rows


def execute(schedule: Schedule, exchanges: Rows, duration_s: dict[Instruction, float]) -> float:
    """Execute stage by stage with message queues, data included; the time of the last end.

    A blocking exchange is over when the other side of each of its messages has been handed over.
    """
    stages = schedule.stages
    programs = [
        sorted(
            [(e.position, 0, n, e) for n, e in enumerate(row)]
            + [(n, 1, 0, i) for n, i in enumerate(schedule.order[stage])],
            key=lambda entry: entry[:3],
        )
        for stage, row in enumerate(exchanges)
    ]
    posted: defaultdict[tuple[int, int, str], list[float]] = defaultdict(list)
    end: dict[Instruction, float] = {}
    data = replace(schedule, waits=frozenset())
    needs = defaultdict(list)
    for edge in data.edges:
        needs[data.instructions[edge.after]].append(data.instructions[edge.before])
    now, at = [0.0] * stages, [0] * stages
    handed = [False] * stages

    def others(stage: int, exchange: Exchange, mine: dict[str, int]) -> list[float] | None:
        found = []
        for message in exchange.messages:
            step, answer = {"N": (1, "p"), "P": (-1, "n"), "p": (-1, "N"), "n": (1, "P")}[message]
            queue = posted[(stage + step) % stages, -step, answer]
            if len(queue) <= mine[message]:
                return None
            found.append(queue[mine[message]])
        return found

    counts: list[dict[str, int]] = [dict.fromkeys("NPnp", 0) for _ in range(stages)]
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while at[stage] < len(programs[stage]):
                what = programs[stage][at[stage]][3]
                if isinstance(what, Instruction):
                    if any(i not in end for i in needs[what]):
                        break
                    begin = max([now[stage], *(end[i] for i in needs[what])])
                    now[stage] = end[what] = begin + duration_s[what]
                else:
                    if not handed[stage]:
                        for message in what.messages:
                            step = 1 if message in "Nn" else -1
                            posted[stage, step, message].append(now[stage])
                        handed[stage] = moved = True
                    if what.blocking:
                        there = others(stage, what, counts[stage])
                        if there is None:
                            break
                        now[stage] = max([now[stage], *there])
                    for message in what.messages:
                        counts[stage][message] += 1
                    handed[stage] = False
                at[stage] += 1
                moved = True
    assert len(end) == len(schedule.instructions), "the stages wait for each other"
    return max(end.values())


def span(schedule: Schedule, duration_s: dict[Instruction, float]) -> float:
    values = np.array([duration_s[i] for i in schedule.instructions])
    return float(np.max(start_times(schedule, values) + values))


@settings(deadline=None, max_examples=60)
@given(interleaved(), st.integers(0, 2**32 - 1))
def test_waits_are_what_executing_the_exchanges_takes(
    case: tuple[Schedule, Rows], seed: int
) -> None:
    schedule, exchanges = case
    validate_schedule(schedule)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        per_stage = rng.uniform(0.3, 3.0, schedule.stages)
        duration = {
            i: float(per_stage[i.stage] * rng.uniform(0.5, 1.5)) for i in schedule.instructions
        }
        with_waits = span(schedule, duration)
        assert with_waits == pytest.approx(execute(schedule, exchanges, duration), rel=1e-9)
        assert with_waits >= span(replace(schedule, waits=frozenset()), duration) - 1e-12


@settings(deadline=None, max_examples=30)
@given(interleaved())
def test_no_wait_follows_from_the_others(case: tuple[Schedule, Rows]) -> None:
    schedule, exchanges = case
    bare = replace(schedule, waits=frozenset())
    assert waits_of(bare, exchanges) == schedule.waits
    for wait in itertools.islice(sorted(schedule.waits), 5):
        without = replace(schedule, waits=schedule.waits - {wait})
        # Nothing else takes time: only the wait has the second start when the first has ended.
        duration = dict.fromkeys(schedule.instructions, 0.0) | {wait[0]: 1.0}
        second = schedule.index[wait[1]]
        values = [duration[i] for i in schedule.instructions]
        assert start_times(schedule, values)[second] == 1.0
        assert start_times(without, values)[second] == 0.0


def test_a_small_schedule_in_full() -> None:
    modes: tuple[P2p, ...] = ("asynchronous", "overlapped", "blocking")
    asynchronous, overlapped, blocking = (build_interleaved(3, 3, 2, p2p=p2p) for p2p in modes)
    assert len({s.signature for s in (asynchronous, overlapped, blocking)}) == 3
    assert len({s.order for s in (asynchronous, overlapped, blocking)}) == 1
    assert not asynchronous.waits
    # In 2F0.1 2B0.1 2F1.1 2B1.1 the last stage exchanges after each pair, and once more between
    # where sends are overlapped: stage 1 goes on to 1F2.1 when it has handed 1F1.1 over.
    assert texts(overlapped.waits - blocking.waits) == {"2F0.1>1F2.1"}
    assert texts(blocking.waits - overlapped.waits) == {"2B0.1>1F2.1", "1B0.1>2F2.1", "1B1.1>2B0"}
    assert {"0F2>2F1", "1F0>0F2", "2B0>0B2.1"} < texts(blocking.waits & overlapped.waits)


def texts(waits: frozenset[Wait]) -> set[str]:
    return {f"{before}>{after}" for before, after in waits}


def test_one_stage_or_one_chunk_waits_for_nobody() -> None:
    assert not build_interleaved(1, 4, 2, p2p="blocking").waits
    assert not build_interleaved(4, 4, 1, p2p="blocking").waits


SMALL = Schedule.from_dict(
    {
        "order": ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
        "model_order": ["0.0", "1.0"],
    }
)


def rows(*texts: str) -> Rows:
    return [[Exchange.parse(text) for text in row.split()] for row in texts]


def test_a_sender_waits_for_its_receiver() -> None:
    """Stage 1 takes the second activation after its first forward: until then stage 0 waits."""
    assert texts(waits_of(SMALL, rows("1N 2N", "0p 1p"))) == {"1F0>0F2"}
    assert waits_of(SMALL, rows("1N 2N~", "0p 1p")) == frozenset()


def test_messages_without_a_counterpart_are_named() -> None:
    with pytest.raises(
        ScheduleError, match="stage 0 sends 2 messages to stage 1, which receives 1"
    ):
        waits_of(SMALL, rows("1N 2N", "0p"))


def test_exchanges_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ScheduleError, match="stages wait for each other"):
        waits_of(SMALL, rows("1N 1n", "0P 0p"))


@pytest.mark.parametrize("text", ["", "3", "Np", "3Nx", "3N~~", "-1N", "3 N"])
def test_malformed_exchange(text: str) -> None:
    with pytest.raises(FormatError, match="is not an exchange"):
        Exchange.parse(text)


@given(st.integers(0, 999), st.text("NPnp", min_size=1, max_size=4), st.booleans())
def test_exchange_text_form(position: int, messages: str, blocking: bool) -> None:
    exchange = Exchange(position, messages, blocking)
    assert Exchange.parse(str(exchange)) == exchange


@pytest.mark.parametrize(
    ("waits", "reason"),
    [
        ("0F0>0F1", "both are of the same stage"),
        ("1F0>0F9", "0F9 is not executed"),
        ("1F1>0F0", "can never start"),
    ],
)
def test_inconsistent_waits(waits: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Schedule.from_dict(SMALL.to_dict() | {"waits": waits})


def test_malformed_wait() -> None:
    with pytest.raises(FormatError, match="'0F0' is not a wait"):
        Schedule.from_dict(SMALL.to_dict() | {"waits": "0F0"})


def test_files_of_schedules_without_waits_are_as_before() -> None:
    assert "waits" not in SMALL.to_dict()
    # Signatures name files and tie plans to jobs: they must not change between releases.
    assert build_interleaved(2, 2, 2).signature == "2030933a79cc77d7"


def test_the_planner_s_figures_are_those_of_the_emulated_pipeline() -> None:
    schedule = build_interleaved(3, 6, 2, p2p="blocking")
    gpu = load_gpu_model("a100")
    gpu = gpu.model_copy(
        update={
            "switch_latency_s": 0.0,
            "counter_tick_s": 0.0,
            "thermal": gpu.thermal.model_copy(update={"leakage_w_per_c": 0.0}),
        }
    )
    works = {
        cls: Work(1e12 * (1 + 0.4 * cls.stage) * (1 if cls.kind is Kind.FORWARD else 2), 1e9)
        for cls in schedule.classes
    }
    clocks = gpu.clocks_mhz[::8]
    profile = Profile(
        {
            cls: tuple(Option(Setting(f), gpu.time_s(w, f), gpu.energy_j(w, f)) for f in clocks)
            for cls, w in works.items()
        },
        (gpu.waiting_power_w(gpu.top_mhz),) * 3,
        Overhead(0.01, 0.0),
    )
    fastest = plan(schedule, profile, Fastest())
    assert fastest.time_s is not None
    for target in (Fastest(), Deadline(1.1 * fastest.time_s)):
        found = plan(schedule, profile, target)
        pipeline = VirtualPipeline(schedule, works, gpu, overhead=profile.overhead)
        assert pipeline.run(found.settings).iter_time_s == pytest.approx(found.time_s, rel=1e-9)
    bare = replace(schedule, waits=frozenset())
    blind = plan(bare, profile, Fastest())
    pipeline = VirtualPipeline(schedule, works, gpu, overhead=profile.overhead)
    assert blind.time_s is not None
    assert pipeline.run(blind.settings).iter_time_s > 1.02 * blind.time_s
    assert pipeline.run(default_settings(schedule)).iter_time_s <= 1.001 * fastest.time_s
