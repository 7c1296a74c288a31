"""Where overlap holds back by itself, and what mistakes lead to: words."""

from __future__ import annotations

import pytest

from tests.overlap import limits_cases
from tests.overlap.ranks import Ranks

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
    "no gradient": "no output of it has a gradient",
    "no such dimension": "no input has a batch dimension 7",
    "text": "'mlp@1:0' is no overlap setting; use OverlapSetting.parse",
    "one text": "'mlp@1:0' is no overlap setting; use OverlapSetting.parse",
    "step": "the step 'a' is no number",
    "negative step": "the step -1 is no number",
    "candidates": "-1 candidates cannot be given",
    "attached already": "is attached already; close the executor",
    "attached within": "attach either the outer or the inner one",
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
        assert "did not agree on 'mlp@2:0' for this step, but on mlp@1:4" in besides
        assert error <= 1e-12
        assert executed["forward", "split"] == executed["backward", "split"] == 1


@pytest.mark.parametrize("others", [(4,), ()])
def test_ranks_with_other_levels_are_told(two_ranks: Ranks, others: tuple[int, ...]) -> None:
    """They would make other communicators, and wait for each other."""
    first, second = two_ranks.run(limits_cases.different_levels, others)
    assert "for the levels (4, 8), because the ranks have different settings" in first
    assert ("for the levels (4,), because the ranks" in second) == bool(others)


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


def test_a_wrapper_around_an_attached_block_stays(two_ranks: Ranks) -> None:
    for error, calls in two_ranks.run(limits_cases.wrapped_later):
        assert (error, calls) == (0, 2)


def test_finding_partitions_changes_nothing(two_ranks: Ranks) -> None:
    for kept in two_ranks.run(limits_cases.search_leaves_no_trace):
        assert all(kept.values()), kept
