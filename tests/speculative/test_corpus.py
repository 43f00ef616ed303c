"""Guesses from texts that were served before: the index finds what a scan finds, within each caller's own texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.device import DeviceKind
from sightline.core.ledger import Ledger
from sightline.core.speculation import Speculation
from sightline.scheduler.sequence import DraftRoom, RowResult, ScheduledRow, SequenceState
from sightline.speculative import corpus
from sightline.speculative.corpus import Corpora, CorpusIndex
from sightline.speculative.drafter import Drafter, DrafterContext, ObservedRow, ObservedStep
from sightline.speculative.methods import find
from support.scheduling import make_sequence

ALPHABET = 3
TEXTS = st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=30)


def scanned(texts: Sequence[Sequence[int]], tokens: Sequence[int], most: int, longest: int, shortest: int) -> list[int]:
    """The same guess, by looking at every place of every text, the latest first."""
    for length in range(min(longest, len(tokens)), shortest - 1, -1):
        for text in reversed(texts):
            for place in range(len(text) - 1, length - 1, -1):
                if list(text[place - length : place]) == list(tokens[-length:]):
                    return list(text[place : place + most])
    return []


class Roomy(CorpusIndex):
    """Has so many slots that no two runs of the tests share one."""

    def _resize(self, count: int) -> None:
        super()._resize(count)
        self._places = np.zeros((len(self._places), 1 << 16), np.int32)


def slots_of_all_runs(index: CorpusIndex, longest: int) -> list[list[int]]:
    """The slots that the runs of each length have, in an index of its own."""
    runs: list[list[int]] = [[]]
    found: list[list[int]] = []
    for _ in range(longest):
        runs = [[*run, token] for run in runs for token in range(ALPHABET)]
        found.append([])
        for run in runs:
            hashed = sum((token + 1) * factor for token, factor in zip(reversed(run), index._factors, strict=False))
            found[-1].append((hashed * corpus._FACTOR & corpus._WORD) >> index._shift)
    return found


def test_the_runs_of_these_tests_have_slots_of_their_own() -> None:
    for slots in slots_of_all_runs(Roomy(5, 1), 5):
        assert len(set(slots)) == len(slots)


@settings(deadline=None)
@given(
    texts=st.lists(TEXTS, max_size=12),
    drops=st.lists(st.booleans(), min_size=12, max_size=12),
    tokens=TEXTS,
    most=st.integers(1, 9),
    shortest=st.integers(1, 3),
    longer=st.integers(0, 2),
)
def test_an_index_finds_what_a_scan_of_the_texts_that_are_left_finds(
    texts: list[list[int]], drops: list[bool], tokens: list[int], most: int, shortest: int, longer: int
) -> None:
    index, left = Roomy(shortest + longer, shortest), deque[list[int]]()
    for text, drop in zip(texts, drops, strict=False):
        index.add(text)
        left.append(text)
        if drop:
            index.drop_oldest()
            left.popleft()
        found = index.propose(tokens, most)
        assert found == scanned(left, tokens, most, shortest + longer, shortest)
    assert index.num_tokens == 64 * len(left)


@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=30), kept=st.integers(1, 5), tokens=TEXTS)
def test_an_index_whose_runs_share_slots_still_guesses_only_what_followed(
    texts: list[list[int]], kept: int, tokens: list[int]
) -> None:
    """Texts move within the buffer, and the buffer grows."""
    index, left = CorpusIndex(4, 2), deque[list[int]]()
    for text in texts:
        index.add(text)
        left.append(text)
        if len(left) > kept:
            index.drop_oldest()
            left.popleft()
        found = index.propose(tokens, 5)
        followed = [
            scanned([each[:end]], tokens, 5, n, n) for each in left for end in range(len(each) + 1) for n in (2, 3, 4)
        ]
        assert not found or found in followed


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=300)), max_size=30))
def test_the_limit_holds_and_whoever_has_an_equal_share_loses_nothing(added: list[tuple[str, list[int]]]) -> None:
    corpora, limit, given_ = Corpora(600, 3, 2), 600, dict.fromkeys("abc", 0)
    for caller, text in added:
        corpora.add(caller, text)
        given_[caller] += max(64, len(text) + 1) if len(text) > 2 else 0
        held = {name: each.num_tokens for name, each in corpora._by_caller.items()}
        assert corpora.num_tokens == sum(held.values()) <= limit
        for name, count in given_.items():
            assert count > limit // 3 or held.get(name, 0) == count


def test_no_text_of_one_caller_is_guessed_for_another() -> None:
    corpora = Corpora(10_000, 3, 2)
    corpora.add("a", [1, 2, 3, 4, 5, 6])
    assert corpora.propose("a", [9, 1, 2], 3) == [3, 4, 5]
    assert corpora.propose("b", [9, 1, 2], 3) == []
    corpora.add("b", [1, 2, 7, 7, 7])
    assert corpora.propose("a", [9, 1, 2], 3) == [3, 4, 5], "nor does it change a guess"
    assert corpora.propose("b", [9, 1, 2], 9) == [7, 7, 7], "and ends where the text ends"


def test_a_text_that_is_longer_than_the_limit_leaves_its_end() -> None:
    corpora = Corpora(100, 3, 2)
    corpora.add("a", list(range(1000)))
    assert corpora.num_tokens == 100
    found = [place for place in range(998) if corpora.propose("a", [place, place + 1], 1) == [place + 2]]
    assert len(found) > 99 // 2, "most runs have a slot"
    assert min(found) > 1000 - 100


@pytest.mark.parametrize("limit", [1 << 15, 33_500, 65_000])
def test_a_token_takes_as_much_memory_as_the_setting_says(limit: int) -> None:
    corpora = Corpora(limit, 4, 2)
    for start in range(0, 4 * limit, 500):
        corpora.add("a", range(start, start + 500))
    assert 0.95 * limit < corpora.num_tokens <= limit
    assert 19.5 <= corpora.num_bytes / limit <= 32.5


def drafter(corpus_tokens: int) -> Drafter:
    config = Speculation(corpus_tokens=corpus_tokens)
    return find("ngram").make(DrafterContext(config, DeviceKind.CPU, Ledger(), 512))


def sequence_of(tokens: list[int], num_generated: int = 1) -> SequenceState:
    sequence = make_sequence("r", len(tokens) - num_generated, 50)
    sequence.tokens = tokens
    return sequence


def guess(from_: Drafter, tokens: list[int]) -> tuple[int, ...]:
    sequence = sequence_of(tokens)
    [draft] = from_.propose([DraftRoom(sequence, 3)])
    return draft.tokens


def test_a_sequence_prefers_its_own_text_and_leaves_it_behind_when_it_ends() -> None:
    for limit, following in ((0, ()), (1000, (3, 4, 5))):
        ngram = drafter(limit)
        first = sequence_of([1, 2, 3, 4, 5, 6])
        ngram.propose([DraftRoom(first, 3)])
        assert guess(ngram, [9, 8, 1, 2]) == (), "the text is not there before its sequence ends"
        ngram.forget(first)
        ngram.forget(first)
        assert guess(ngram, [9, 8, 1, 2]) == following
        assert guess(ngram, [1, 2, 7, 1, 2]) == (7, 1, 2), "its own text first"


def test_a_sequence_that_was_never_guessed_for_counts_if_it_was_observed_and_generated() -> None:
    ngram = drafter(1000)
    unseen, seen = sequence_of([10, 2, 3, 4, 5, 6]), sequence_of([20, 2, 3, 4, 5, 6])
    silent = sequence_of([30, 2, 3, 4, 5, 6], num_generated=0)
    rows = [
        ObservedRow(ScheduledRow(each, 0, 0, 6, completes=False, scores_prompt=False), RowResult(6), 0)
        for each in (seen, silent)
    ]
    ngram.observe(ObservedStep(rows, None))
    for each in (unseen, seen, silent):
        ngram.forget(each)
    assert guess(ngram, [20, 2]) == (3, 4, 5)
    assert guess(ngram, [10, 2]) == guess(ngram, [30, 2]) == ()
