"""Guesses from a sequence's own text: an index finds what a scan would find."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.scheduler.sequence import Draft, DraftRoom
from sightline.speculative.drafter import DrafterOfTexts
from sightline.speculative.ngram import NgramDrafter
from support.scheduling import make_sequence


def scanned(tokens: Sequence[int], most: int, longest: int, shortest: int) -> list[int]:
    """The same guess, by looking at every place."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if length < len(tokens) and list(tokens[place - length : place]) == list(tokens[-length:]):
                text = list(tokens)
                for at in range(place, place + most):
                    text.append(text[at])
                return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    steps=st.lists(st.integers(1, 40), max_size=8),
    most=st.integers(1, 9),
    shortest=st.integers(1, 3),
    longer=st.integers(0, 2),
)
def test_an_index_that_grows_finds_what_a_scan_finds(
    tokens: list[int], steps: list[int], most: int, shortest: int, longer: int
) -> None:
    drafter = NgramDrafter(shortest + longer, shortest)
    for end in [*sorted(steps), len(tokens)]:
        known = tokens[: min(end, len(tokens))]
        assert list(drafter.propose(known, most)) == scanned(known, most, shortest + longer, shortest)


def test_the_latest_place_of_the_longest_run_counts() -> None:
    drafter = NgramDrafter(2, 1)
    assert list(drafter.propose([1, 2, 7, 3, 2, 8, 1, 2], 2)) == [7, 3], "two tokens before one"
    assert list(NgramDrafter(2, 1).propose([5, 2, 7, 3, 2, 8, 1, 2], 2)) == [8, 1], "the latest"


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4]])
def test_what_was_never_there_is_not_guessed(tokens: list[int]) -> None:
    assert list(NgramDrafter(3, 2).propose(tokens, 4)) == []


def test_a_text_that_repeats_one_word_goes_on_with_it() -> None:
    assert list(NgramDrafter(2, 1).propose([9, 4, 4, 4], 5)) == [4] * 5
    assert list(NgramDrafter(2, 1).propose([9, 4, 5, 4, 5], 5)) == [4, 5, 4, 5, 4]


def scanned_several(tokens: Sequence[int], most: int, longest: int, shortest: int, count: int) -> list[list[int]]:
    """The same guesses, by looking at every place."""
    found: dict[int, list[int]] = {}
    for length in range(longest, shortest - 1, -1):
        if length >= len(tokens):
            continue
        for place in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[place - length : place]) == list(tokens[-length:]) and tokens[place] not in found:
                text = list(tokens)
                for at in range(place, place + most):
                    text.append(text[at])
                found[tokens[place]] = text[len(tokens) :]
    return list(found.values())[:count]


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    steps=st.lists(st.integers(1, 40), max_size=8),
    most=st.integers(1, 9),
    shortest=st.integers(1, 3),
    longer=st.integers(0, 2),
    count=st.integers(2, 4),
)
def test_several_continuations_are_those_that_a_scan_finds(
    tokens: list[int], steps: list[int], most: int, shortest: int, longer: int, count: int
) -> None:
    drafter = NgramDrafter(shortest + longer, shortest, count)
    for end in [*sorted(steps), len(tokens)]:
        known = tokens[: min(end, len(tokens))]
        found = [list(each) for each in drafter.propose_several(known, most, count)]
        assert found == scanned_several(known, most, shortest + longer, shortest, count)


def test_places_with_different_tokens_behind_them_are_branches() -> None:
    tokens = [1, 2, 7, 3, 1, 2, 8, 4, 1, 2]
    drafter = DrafterOfTexts(lambda: NgramDrafter(2, 1, 2), 2)
    sequence = make_sequence("a", 1, 40)
    sequence.tokens = tokens
    assert drafter.propose([DraftRoom(sequence, 4, 2)]) == [Draft((8, 4, 7, 3), (-1, 0, -1, 2))]
    assert drafter.propose([DraftRoom(sequence, 3, 2)]) == [Draft((8, 4, 7), (-1, 0, -1))]
