"""Where overlap holds back by itself, and what mistakes lead to: words."""

from __future__ import annotations

import pytest

from tests.overlap import limits_cases
from tests.overlap.ranks import Ranks, ranks

WORDS = {
    "no module": "None is no torch module",
    "a name": "'x' is no torch module",
    "a function": "is no torch module",
    "nothing": "no module to overlap in an empty list",
    "twice in a list": "given twice",
    "nested": "attach either the outer or the inner one",
    "a group's name": "the group is of type str",
    "no group of this rank": ("0 is no torch module", "give a process group that this rank is in"),
    "a level": "levels 8 must be positive whole numbers",
    "a level's name": "levels ('a',) must be positive whole numbers",
    "half an SM": "levels (4.5,) must be positive whole numbers",
    "batch dimension": "the batch dimension 'a' is none",
    "negative dimension": "the batch dimension -1 is none",
    "agreement": "make one with generic.group_agreement",
    "group forgotten": "the group is of type Tensor",
    "several": "a ModuleList is no block",
    "a list": "a list is no block",
    "no gradient": "no output of it has a gradient",
    "no such dimension": "no input has a batch dimension 7",
    "text": "'mlp@1:0' is no overlap setting; use OverlapSetting.parse",
    "one text": "'mlp@1:0' is no overlap setting; use OverlapSetting.parse",
    "no settings": "None is no overlap setting",
    "step": "the step 'a' is no number",
    "negative step": "the step -1 is no number",
    "candidates": "-1 candidates cannot be given",
    "attached already": "is attached already; close the executor",
    "attached within": "attach either the outer or the inner one",
    "within attached": "is within one that is attached",
    "closed": "is closed; attach a new one",
}


def test_mistakes_are_said_in_words(two_ranks: Ranks) -> None:
    for rank, found in enumerate(two_ranks.run(limits_cases.bad_arguments)):
        assert found.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert (words if isinstance(words, str) else words[rank]) in found[name], name


def test_a_step_has_only_the_settings_that_were_agreed_on(two_ranks: Ranks) -> None:
    """A rank that splits differently would hang the others."""
    for (before, besides), error, executed in two_ranks.run(limits_cases.held_to_what_was_agreed):
        assert "have not agreed on 'mlp@1:4' yet; call begin_step" in before
        assert "'mlp@2:0' is not among the settings of this step, which are mlp@1:4" in besides
        assert error <= 1e-12
        assert executed["forward", "split"] == executed["backward", "split"] == 1


@pytest.mark.parametrize(
    ("others", "patience_s", "words"),
    [((4,), 60.0, "the ranks have different settings"), ((), 0.3, "did not answer within 0.3 s")],
)
def test_ranks_with_other_levels_are_told(
    others: tuple[int, ...], patience_s: float, words: str
) -> None:
    """They would make other communicators, and wait for each other."""
    # Ranks of its own: those that did not attach alike cannot attach alike later.
    with ranks(2) as group:
        first, second = group.run(limits_cases.different_levels, others, patience_s)
    assert "no communicators were made for the levels (4, 8), because" in first
    assert words in first
    assert ("for the levels (4,), because the ranks" in second) == bool(others)


def test_a_step_has_only_the_settings_that_it_was_given(two_ranks: Ranks) -> None:
    """Only their boundaries are hooked: others would launch at the end of a partition."""
    for message, launches in two_ranks.run(limits_cases.held_to_what_was_given):
        assert "'mlp@1:4' is not among the settings of this step, which are mlp@2:0" in message
        assert launches["forward", "mlp", 1]
        assert launches["backward", "mlp", 1]
        assert not any(slot < 0 for _, kind, slot in launches if kind == "mlp")


def test_forwards_patched_on_an_instance_stay_patched(two_ranks: Ranks) -> None:
    for errors in two_ranks.run(limits_cases.patched_forwards):
        assert max(errors) <= 1e-12


def test_copies_of_an_attached_block_are_not_attached(two_ranks: Ranks) -> None:
    for errors in two_ranks.run(limits_cases.copies):
        assert max(errors) <= 1e-12


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("DDP", "counts one gradient of each parameter"),
        ("DDP within", "attach the blocks within that one"),
        ("checkpoint", "saved-tensor hooks"),
        ("save_on_cpu", "saved-tensor hooks"),
        ("hook on a parameter", "gradients of half a microbatch"),
    ],
)
def test_a_block_is_whole_where_it_cannot_be_split(two_ranks: Ranks, case: str, words: str) -> None:
    for error, reasons, split in two_ranks.run(limits_cases.surroundings, case):
        assert split == 0
        assert words in reasons[0]
        assert error == 0


def test_collectives_that_cannot_be_seen_are_said(two_ranks: Ranks) -> None:
    for found, reasons in two_ranks.run(limits_cases.unseen_collectives):
        assert "no collective of its process group was seen" in found
        assert "no collective of its process group was seen" in reasons[0]


def test_a_setting_taken_before_observation_is_checked_after_it(two_ranks: Ranks) -> None:
    for error, reasons, executed in two_ranks.run(limits_cases.taken_before_it_was_observed):
        assert error <= 1e-12
        assert executed["forward", "sequential"] == 1
        # The backward of the last step still has it.
        assert (executed["forward", "split"], executed["backward", "serial"]) == (1, 1)
        assert any("'nonsense', which the forward of this block" in reason for reason in reasons)
        assert any("'nonsense', which the backward of this block" in reason for reason in reasons)


def test_a_block_cannot_close_its_executor(two_ranks: Ranks) -> None:
    for message, error in two_ranks.run(limits_cases.closed_from_within):
        assert "cannot be closed from within a block" in message
        assert error <= 1e-12


def test_a_block_that_changes_its_input_is_whole_or_refused(two_ranks: Ranks) -> None:
    for error, reasons, message in two_ranks.run(limits_cases.changes_in_place):
        assert error == 0
        assert reasons == ["block 0 (InPlace): it changes its input in place"]
        assert "block 0 (InPlace) changes an input in place, which cannot be overlapped" in message


def test_a_backward_after_close_says_why(two_ranks: Ranks) -> None:
    for message in two_ranks.run(limits_cases.closed_before_backward):
        assert "was closed between this backward and its forward" in message


def test_a_wrapper_around_an_attached_block_stays(two_ranks: Ranks) -> None:
    for error, calls in two_ranks.run(limits_cases.wrapped_later):
        assert (error, calls) == (0, 2)


def test_finding_partitions_changes_nothing(two_ranks: Ranks) -> None:
    for kept in two_ranks.run(limits_cases.search_leaves_no_trace):
        assert all(kept.values()), kept
