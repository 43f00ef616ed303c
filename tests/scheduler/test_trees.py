"""The shape of guesses: what is refused, what continuations have in common, and which path is right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.core.batch import MaskKind
from sightline.scheduler.sequence import Draft, ScheduledRow
from sightline.scheduler.trees import check_path, checked_draft, depths, merged
from sightline.speculative.verification import right_guesses, tree_mask, tree_positions
from support.scheduling import make_sequence

CONTINUATIONS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=5)


def row_of(draft: Draft, context_len: int = 7) -> ScheduledRow:
    sequence = make_sequence("a", context_len + 1, 40)
    return ScheduledRow(sequence, 1, context_len, 1 + len(draft.tokens), True, False, *draft)


def paths(draft: Draft) -> list[list[int]]:
    """The tokens from the root to each guess."""
    found: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents or (), strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft((1, 2, 3), (-1, 0)), "expected a parent for each of 3 guesses, got 2 parents"),
        (Draft((1, 2), (-1, 1)), "expected the parent of guess 1 from -1 to 0, got 1"),
        (Draft((1, 2), (0, -1)), "expected the parent of guess 0 from -1 to -1, got 0"),
        (Draft((1, 2), (-1, -2)), "expected the parent of guess 1 from -1 to 0, got -2"),
        (Draft((1, 4, 4), (-1, 0, 0)), "expected children of one guess to be different tokens"),
        (Draft((1,) * 9), "expected a draft of at most 8 tokens, got 9"),
        (Draft((1, 10)), "expected tokens from 0 to 9, got"),
        (Draft((-1, 1)), "expected tokens from 0 to 9, got"),
        (Draft((1, -1), (-1, -1)), "expected tokens from 0 to 9, got"),
    ],
)
def test_a_malformed_draft_is_refused(draft: Draft, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_draft(draft, 8, 10, may_branch=True)


def test_a_tree_of_one_branch_is_a_chain_and_others_must_be_asked_for() -> None:
    assert checked_draft(Draft((5, 6, 5), (-1, 0, 1)), 3, 10, may_branch=False) == Draft((5, 6, 5))
    tree = Draft((5, 6, 5), (-1, 0, 0))
    assert checked_draft(tree, 3, 10, may_branch=True) == tree
    with pytest.raises(ValueError, match="expected one continuation, got a tree; give num_branches"):
        checked_draft(tree, 3, 10, may_branch=False)


@given(CONTINUATIONS, st.integers(0, 12))
def test_a_tree_holds_its_continuations_and_shares_what_they_have_in_common(
    continuations: list[list[int]], most: int
) -> None:
    draft = merged(continuations, most)
    assert len(draft.tokens) <= most
    checked_draft(draft, most, 10, may_branch=True)
    every = {tuple(each[:end]) for each in continuations for end in range(1, len(each) + 1)}
    held = [tuple(path) for path in paths(draft)]
    assert len(held) == len(set(held)) == min(most, len(every))
    assert set(held) <= every
    assert [len(path) for path in held] == depths(draft.parents or ())


@given(CONTINUATIONS, st.lists(st.integers(0, 2), min_size=6, max_size=6), st.integers(0, 2))
def test_the_right_path_is_the_longest_one_of_what_is_chosen(
    continuations: list[list[int]], truth: list[int], other: int
) -> None:
    draft = merged(continuations, 12)
    held = paths(draft)
    # Behind a path that is right the truth is chosen, behind others anything.
    chosen = [truth[0], *(truth[len(each)] if each == truth[: len(each)] else other for each in held)]
    path = right_guesses(row_of(draft), chosen)
    right = [each for each in held if each == truth[: len(each)]]
    assert len(path) == max(map(len, right), default=0)
    check_path(path, draft.parents or (), draft.tokens, truth[: len(path)])


@given(CONTINUATIONS)
def test_a_guess_sees_its_path_and_stands_at_its_end(continuations: list[list[int]]) -> None:
    draft = merged(continuations, 12)
    row, held = row_of(draft), [[], *paths(draft)]
    mask, positions = tree_mask(row), tree_positions(row)
    assert mask.kind is MaskKind.TREE
    assert mask.tree is not None
    assert positions == [row.context_len + len(path) for path in held]
    for guess, path in enumerate(held):
        seen = [other for other, each in enumerate(held) if each == path[: len(each)]]
        assert mask.tree[guess].nonzero().flatten().tolist() == seen


@pytest.mark.parametrize(
    ("path", "tokens"), [((1,), (6,)), ((0, 2), (5, 7)), ((0, 1), (5, 7)), ((0,), ()), ((2, 0), (7, 5))]
)
def test_a_path_that_is_not_one_of_the_tree_is_refused(path: Sequence[int], tokens: Sequence[int]) -> None:
    parents, guesses = (-1, 0, -1), (5, 6, 7)
    check_path((0, 1), parents, guesses, (5, 6))
    with pytest.raises(ValueError, match="expected a path"):
        check_path(path, parents, guesses, tokens)
