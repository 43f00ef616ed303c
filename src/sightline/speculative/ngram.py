"""Guesses that a sequence repeats itself: what followed its last few tokens before follows them again.

    ... the quick brown fox jumps ... the quick brown ▮
            └── the same three ──┘   └──────┬────────┘
                               guess: fox jumps ...

Summaries, edits and code quote what they were given, so that this costs nothing and is often right. Does not know
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sightline.core import speculation
from sightline.core.speculation import Speculation
from sightline.speculative.drafter import Drafter, DrafterContext, DrafterKind, DrafterOfTexts, TextDrafter


class NgramDrafter(TextDrafter):
    """Looks the last tokens up in an index of all runs of tokens, which grows with the sequence.

    A token costs one entry for each length of runs, and a look-up does not depend on the sequence's length.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        """Compares runs of `longest` tokens, and shorter ones down to `shortest` if there is none."""
        self._lengths = tuple(range(longest, shortest - 1, -1))
        self._after: dict[tuple[int, ...], int] = {}
        """Where the token behind the latest run of these tokens is. Of a run at the very end nothing follows yet."""
        self._num_indexed = 0
        """Tokens whose runs are in the index: all but the last ones."""

    @classmethod
    def of(cls, config: Speculation) -> NgramDrafter:
        return cls(config.prompt_lookup_max, config.prompt_lookup_min)

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._index(tokens)
        for length in self._lengths:
            place = self._after.get(tuple(tokens[-length:])) if length < len(tokens) else None
            if place is not None:
                return _continued(tokens, place, most)
        return ()

    def _index(self, tokens: Sequence[int]) -> None:
        """Adds the runs that end before the last token."""
        for end in range(self._num_indexed, len(tokens) - 1):
            for length in self._lengths:
                if length <= end + 1:
                    self._after[tuple(tokens[end + 1 - length : end + 1])] = end + 1
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)


def _continued(tokens: Sequence[int], place: int, most: int) -> Sequence[int]:
    """The tokens from `place` on. At the end they go on with themselves, as a text does that repeats one word."""
    known = list(tokens[place : place + most])
    period = len(tokens) - place
    while len(known) < most:
        known.append(known[len(known) - period])
    return known


def _make(context: DrafterContext) -> Drafter:
    return DrafterOfTexts(partial(NgramDrafter.of, context.speculation), context.speculation.num_branches)


NGRAM = DrafterKind(speculation.NGRAM, _make)
