"""The core: partitions, agreement, communicators, autograd boundary, soak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from kareus_pp.errors import OverlapError
from kareus_pp.overlap.agreement import Agreement, digest
from kareus_pp.overlap.communicators import check_grids, launched_grids
from kareus_pp.overlap.partitions import (
    Partition,
    Segment,
    Slot,
    build_program,
    candidate_settings,
    relative_name,
)
from kareus_pp.overlap.swaps import derived_state
from kareus_pp.setting import SEQUENTIAL, OverlapSetting
from tests.overlap import core_cases
from tests.overlap.ranks import Ranks


def test_partitions_of_a_block_are_found(two_ranks: Ranks) -> None:
    size = 4 * core_cases.WIDTH * 8
    for found in two_ranks.run(core_cases.partitions):
        assert found == [
            ("forward", "mlp", "all-reduce", size, 3, ["entry", "f:up", "f:down"]),
            ("backward", "pointwise", "all-reduce", size, 1, ["entry", "b:layer"]),
            ("backward", "mlp", "all-reduce", size, 2, ["entry", "b:down", "b:up", "b:layer"]),
        ]


def test_user_mistakes_are_said_in_words(two_ranks: Ranks) -> None:
    for small, evaluation, partition, slot, *others in two_ranks.run(core_cases.refused):
        assert "microbatch size is 1" in small
        assert "block.train()" in evaluation
        assert "'attention'" in partition
        assert "it has mlp" in partition
        assert "slots 0 to 2 (entry, f:up, f:down)" in slot
        again, phase, kind, closed = others
        assert again == slot
        assert "'forward' or 'backward'" in phase
        assert "OverlapSetting.parse" in kind
        assert "is closed" in closed


def test_forward_and_backward_that_differ_still_give_the_gradient(two_ranks: Ranks) -> None:
    for error, reasons, executed in two_ranks.run(core_cases.inconsistent_backward):
        assert error <= 1e-12
        assert len(reasons) == 1
        assert "halves run one after the other" in reasons[0]
        assert ("backward", "serial") in executed
        assert ("backward", "split") not in executed


def test_only_the_slots_in_use_are_hooked(two_ranks: Ranks) -> None:
    for (every, first, second, third), executed, error in two_ranks.run(core_cases.skipped_step):
        assert every > first == third > 0
        assert second == 0
        assert dict(executed)["forward", "split"] == 2
        assert dict(executed)["forward", "sequential"] == 1
        assert error <= 1e-12


@pytest.mark.parametrize(("setting", "hooks"), [("mlp@0:0", False), ("mlp@1:0", True)])
def test_a_step_that_launches_at_beginnings_needs_no_hooks(
    two_ranks: Ranks, setting: str, hooks: bool
) -> None:
    """The beginning of a partition is known without a hook."""
    for counts in two_ranks.run(core_cases.hooks_of_step, setting):
        assert len(counts) > 2, "the step itself was seen"
        assert {count > 0 for count in counts} == {hooks}


@pytest.mark.parametrize("wish", ["agree", "differ", "late"])
def test_ranks_agree_or_all_refuse(two_ranks: Ranks, wish: str) -> None:
    """Rule 28: all ranks of a communicator take the same option."""
    second = wish == "agree"
    for answers, split, sequential in two_ranks.run(core_cases.agreement, wish):
        assert answers == [True, second, True, True]
        assert split == 3 + second
        assert sequential == 1 - second


def test_a_rank_that_declines_makes_the_others_refuse_at_once() -> None:
    store = HashStore()
    one, other = (Agreement(store, "group", rank, 2, timeout_s=60.0) for rank in range(2))
    other.decline(0)
    assert not one.agree(0, ["split"])
    for step in (1, 2, 3):
        one.decline(step)
        other.decline(step)
    assert not store.check([f"{one._prefix}/0/decision"]), "what is past is deleted"
    assert not store.check([f"{one._prefix}/0/0"])
    assert not store.check([f"{one._prefix}/0/1"])


def test_what_was_said_before_is_no_answer() -> None:
    """Attached anew, steps count from 0 again; a rank must not take old words for its peer's."""
    store = HashStore()
    one = Agreement(store, "again", 0, 2, timeout_s=0.01)
    store.set(f"{one._prefix}/0/1", digest(["split"]))
    assert one.agree(0, ["split"])
    assert not one.agree(0, ["split"]), "a step is agreed on once"
    anew = Agreement(store, "again", 0, 2, timeout_s=0.01)
    assert not anew.agree(0, ["split"]), "the other said nothing yet"


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "a", None])
def test_a_timeout_that_is_none_is_refused(timeout_s: Any) -> None:
    with pytest.raises(OverlapError, match=r"timeout of an agreement is .*above 0"):
        Agreement(HashStore(), "group", 0, 2, timeout_s)


def test_a_rank_that_never_answers_is_given_up() -> None:
    """A job whose other rank is without the plugin is not held up at every step."""
    store = HashStore()
    alone = Agreement(store, "group", 0, 2, timeout_s=0.01)
    for step in range(3):
        assert not alone.agree(step, ["split"])
    assert store.get(f"{alone._prefix}/2/decision") == b"refused"
    assert not alone.agree(3, ["split"])
    assert store.get(f"{alone._prefix}/3/0") == b"declined"
    assert not store.check([f"{alone._prefix}/3/decision"]), "it did not wait"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("mask", "has no batch dimension 0 of size 4"),
        ("loss", "has no batch dimension 0 of size 4"),
        ("number", "an output of type float cannot be put together of two halves"),
    ],
)
def test_outputs_that_cannot_be_joined_do_not_stop_a_training(
    two_ranks: Ranks, what: str, words: str
) -> None:
    """Rule 25: the observed step is the framework's own, whatever the block returns."""
    for errors, reasons, found in two_ranks.run(core_cases.unjoinable, what):
        assert max(errors) <= 1e-12
        (reason,) = reasons
        assert words in reason
        assert words in found


@pytest.mark.parametrize("what", ["dataclass", "dictionary", "list in an object"])
def test_tensors_in_a_container_unknown_to_torch_are_refused(two_ranks: Ranks, what: str) -> None:
    """Their gradients would be lost, so that even the observed step ends."""
    for _, _, found in two_ranks.run(core_cases.unjoinable, what):
        name = "Named" if what == "dictionary" else "Hidden"
        assert f"an output of type {name} holds tensors" in found


def test_a_block_that_is_recomputed_from_outside_is_never_split(two_ranks: Ranks) -> None:
    for found, reasons, split in two_ranks.run(core_cases.recomputed):
        assert found <= 1e-12, "the recomputation drops what the forward dropped"
        assert split == 0
        assert "before a reentrant recomputation" in reasons[0]
        assert "recomputed as a whole" in reasons[1]


def test_the_handle_of_a_collective_can_be_polled(two_ranks: Ranks) -> None:
    for worst, split in two_ranks.run(core_cases.handle_of_a_collective):
        assert worst <= 1e-12
        assert split == 1


def test_communicators_by_number_of_sms(two_ranks: Ranks) -> None:
    """Rule 26: limits on SMs are per communicator, and said to be none where there are none."""
    for chosen, error, limits in two_ranks.run(core_cases.communicators):
        assert chosen == [0, 0, 2, 2, 4, 4, 8, 8]
        assert error <= 1e-12
        assert not limits, "gloo limits no SMs"


def test_not_to_split_is_always_a_candidate() -> None:
    """Rules 27 and 28: sequential is an option; the others are whole settings, not parts."""
    assert candidate_settings([]) == (SEQUENTIAL,)
    slots = tuple(Slot(number, name, ()) for number, name in enumerate(["entry", "f:up"]))
    partition = Partition("mlp", "forward", slots, "all-reduce", 8, 1)
    assert [str(s) for s in candidate_settings([partition], (4, 8))] == [
        "sequential",
        "mlp@0:4",
        "mlp@0:8",
        "mlp@1:4",
        "mlp@1:8",
    ]


def test_launched_grids_are_read_from_a_trace() -> None:
    """Rule 26: what was launched is checked before a setting is trusted."""

    def kernel(name: str, *grid: int) -> dict[str, object]:
        return {"cat": "kernel", "name": name, "args": {"grid": list(grid)}}

    trace = {
        "traceEvents": [
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 8, 1, 1),
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 4, 1, 1),
            kernel("gemm", 132, 1, 1),
            {"cat": "cpu_op", "name": "nccl:all_reduce"},
        ]
    }
    assert launched_grids(trace) == {"ncclDevKernel_AllReduce_Sum_bf16_RING_LL": {4, 8}}
    check_grids(trace, 8)
    with pytest.raises(OverlapError, match="8 thread blocks where 4 were allowed"):
        check_grids(trace, 4)


def test_soak(two_ranks: Ranks) -> None:
    for found in two_ranks.run(core_cases.soak, 120):
        check_soak(found)


@pytest.mark.slow
def test_long_soak(two_ranks: Ranks) -> None:
    for found in two_ranks.run(core_cases.soak, 2000):
        check_soak(found)


def check_soak(found: dict[str, float]) -> None:
    assert found["injected_failures"] > 0
    assert found["max_rel_error"] <= 1e-12
    assert found["tensors_grown"] <= 8
    assert found["memory_grown_bytes"] < 100_000
    assert found["nanobatch_threads"] == 2
    assert found["hooks_after"] == 0


def test_derived_random_state_is_a_function_of_the_state() -> None:
    first, second = (torch.Generator().manual_seed(seed).get_state() for seed in (1, 2))
    assert torch.equal(derived_state(first), derived_state(first.clone()))
    assert not torch.equal(derived_state(first), first)
    assert not torch.equal(derived_state(first), derived_state(second))


def test_layers_share_their_partitions_and_the_first_may_lack_slots() -> None:
    def layer(number: int, entry: list[str]) -> Segment:
        boundaries = [
            ("entry", entry),
            (f"f:layers.{number}", []),
            (f"f:layers.{number}.norm", ["native_layer_norm.default"] if number else []),
            (f"f:layers.{number}.linear", ["mm.default"]),
        ]
        return Segment(boundaries, "all-reduce", 8 + number)

    program = build_program("forward", [layer(0, []), layer(1, ["add.Tensor"]), Segment([])])
    (partition,) = program.partitions
    assert (partition.kind, partition.count, partition.bytes) == ("mlp", 2, 9)
    assert [slot.name for slot in partition.slots] == ["entry", "f:norm", "f:linear"]
    assert program.event_at(1, 1) == "f:layers.1.norm"
    assert program.event_at(0, 1) == "f:layers.0.linear", "the next one that it has"
    assert program.kind_at(2) is None
    program.check(OverlapSetting.parse("mlp@2:0"))
    with pytest.raises(OverlapError, match="slots 0 to 2"):
        program.check(OverlapSetting.parse("mlp@3:0"))


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("b:2", "layer"),
        ("f:layers.3.mlp.linear_fc1", "mlp.linear_fc1"),
        ("b:layers.3", "layers"),
        ("f:up", "up"),
        ("b:0.experts.2.down", "down"),
    ],
)
def test_boundaries_are_named_relative_to_their_layer(event: str, name: str) -> None:
    assert relative_name(event) == name


def test_a_nanobatch_takes_over_the_state_of_its_caller(two_ranks: Ranks) -> None:
    """Engine threads off, autocast, function modes and grad mode, as seen inside a block."""
    for state in two_ranks.run(core_cases.state_inside):
        assert state == {
            "thread": "kareus-nanobatch-0",
            "engine_threads": False,
            "autocast": True,
            "function_modes": 1,
            "grad": True,
        }
