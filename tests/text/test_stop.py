"""Stop strings cut the text at the same place however it is divided, and nothing beyond the cut is ever shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sightline.text.stop import StopMatcher

few_letters = st.text("ab ", max_size=30)
stop_strings = st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=4)


def first_complete(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the text ends, and by which stop string: the plain way, over the whole text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def divided(text: str, cuts: Sequence[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


@settings(max_examples=150, deadline=None)
@given(few_letters, stop_strings, st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_however_divided_the_text_is_cut_where_the_whole_text_would_be(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    found = first_complete(text, stops)
    expected = text if found is None else text[: found[0] if include else found[0] - len(found[1])]
    shown = ""
    for piece in divided(text, cuts):
        shown += matcher.push(piece)
        assert expected.startswith(shown), "text at or beyond a stop string was shown"
    assert shown + matcher.flush() == expected
    assert matcher.matched == (None if found is None else found[1])
    assert matcher.flush() == ""


@settings(max_examples=100, deadline=None)
@given(few_letters, stop_strings)
def test_where_no_stop_string_lies_in_another_the_cut_is_at_the_earliest(text: str, stops: list[str]) -> None:
    assume(not any(left in right for left in stops for right in stops if left != right))
    found = [start for start in (text.find(stop) for stop in stops) if start >= 0]
    matcher = StopMatcher(stops)
    assert matcher.push(text) + matcher.flush() == text[: min(found, default=len(text))]


@settings(max_examples=100, deadline=None)
@given(few_letters, stop_strings)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(letter) for letter in text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(
            stop.startswith(text[start:]) for stop in stops for start in range(len(shown)) if text[start:]
        ), "a longer end of the text may begin a stop string"


@settings(max_examples=100, deadline=None)
@given(few_letters, few_letters, stop_strings)
def test_a_stop_string_that_may_not_end_yet_is_text(early: str, late: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(letter, may_end=False) for letter in early)
    assert matcher.matched is None
    shown += "".join(matcher.push(letter) for letter in late) + matcher.flush()
    whole = early + late
    ends = [end for end in range(len(early) + 1, len(whole) + 1) if whole[:end].endswith(tuple(stops))]
    if ends:
        longest = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
        whole = whole[: ends[0] - len(longest)]
    assert shown == whole


def test_nothing_follows_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("abcE", "N", "Dxyz", "more")] == ["abc", "", "", ""]
    assert (matcher.matched, matcher.flush()) == ("END", "")


def test_a_beginning_that_turns_out_not_to_be_one_is_given_out() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.push(letter) for letter in "aaacaab"] == ["", "", "a", "aac", "", "", ""]
    assert matcher.matched == "aab"


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_stop_strings_of_nothing_are_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(stops)
