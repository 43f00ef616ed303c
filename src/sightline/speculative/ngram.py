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
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.speculative.corpus import Corpora
from sightline.speculative.drafter import (
    Drafter,
    DrafterContext,
    DrafterKind,
    DrafterOfTexts,
    ObservedStep,
    TextDrafter,
)


class NgramDrafter(TextDrafter):
    """Looks the last tokens up in an index of all runs of tokens, which grows with the sequence.

    A token costs one entry for each length of runs, and a look-up does not depend on the sequence's length.
    """

    def __init__(self, longest: int, shortest: int, num_branches: int = 1) -> None:
        """Compares runs of `longest` tokens, and shorter ones down to `shortest` if there is none.

        Remembers as many places of a run as there are branches.
        """
        self._lengths = tuple(range(longest, shortest - 1, -1))
        self._num_branches = num_branches
        self._after: dict[tuple[int, ...], tuple[int, ...]] = {}
        """By run: the places of the tokens that followed it, the latest first. They are different tokens. A run at the
        very end is not in it: nothing follows yet."""
        self._num_indexed = 0
        """Tokens whose runs are in the index: all but the last one."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        found = self.propose_several(tokens, most, 1)
        return found[0] if found else ()

    def propose_several(self, tokens: Sequence[int], most: int, count: int) -> Sequence[Sequence[int]]:
        """Continuations that begin with different tokens. Those of longer runs come first, then later ones."""
        self._index(tokens)
        places: dict[int, int] = {}
        for length in self._lengths:
            for place in self._after.get(tuple(tokens[-length:]), ()) if length < len(tokens) else ():
                places.setdefault(tokens[place], place)
            if len(places) >= count:
                break
        return [_continued(tokens, place, most) for place in list(places.values())[:count]]

    def _index(self, tokens: Sequence[int]) -> None:
        """Adds the runs that end before the last token."""
        for end in range(self._num_indexed, len(tokens) - 1):
            for length in self._lengths:
                if length <= end + 1:
                    self._add(tuple(tokens[end + 1 - length : end + 1]), end + 1, tokens)
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)

    def _add(self, run: tuple[int, ...], place: int, tokens: Sequence[int]) -> None:
        if self._num_branches > 1:
            others = [each for each in self._after.get(run, ()) if tokens[each] != tokens[place]]
            self._after[run] = (place, *others[: self._num_branches - 1])
        else:
            self._after[run] = (place,)


def _continued(tokens: Sequence[int], place: int, most: int) -> Sequence[int]:
    """The tokens from `place` on. At the end they go on with themselves, as a text does that repeats one word."""
    known = list(tokens[place : place + most])
    period = len(tokens) - place
    while len(known) < most:
        known.append(known[len(known) - period])
    return known


class NgramOfCorpus(Drafter):
    """Guesses from a sequence's own text and, where that has no guess, from texts that its caller was served before."""

    def __init__(self, own: Drafter, corpora: Corpora, longest: int) -> None:
        """`longest` is the longest run that is compared."""
        self._own, self._corpora, self._longest = own, corpora, longest
        self._served: set[SequenceState] = set()
        """Sequences whose texts are taken in when they end."""

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        self._served.update([each.sequence for each in rooms])
        drafts = self._own.propose(rooms)
        return [draft if draft.tokens else self._guess(room) for draft, room in zip(drafts, rooms, strict=True)]

    def _guess(self, room: DraftRoom) -> Draft:
        """Guesses one continuation from the caller's earlier texts: they record one place for each run of tokens."""
        sequence, most = room.sequence, room.most if room.longest is None else room.longest
        return Draft(tuple(self._corpora.propose(sequence.caller, sequence.tokens, most)))

    def observe(self, step: ObservedStep) -> None:
        self._served.update([each.row.sequence for each in step.rows])
        self._own.observe(step)

    def forget(self, sequence: SequenceState) -> None:
        """Takes the text in. What the prefix cache had of it came from a text that was taken in before."""
        self._own.forget(sequence)
        if sequence in self._served:
            self._served.remove(sequence)
            if sequence.num_generated:
                self._corpora.add(sequence.caller, sequence.tokens[max(0, sequence.num_cached - self._longest) :])


def _make(context: DrafterContext) -> Drafter:
    config = context.speculation
    longest, shortest = config.prompt_lookup_max, config.prompt_lookup_min
    own = DrafterOfTexts(partial(NgramDrafter, longest, shortest, config.num_branches), config.num_branches)
    if not config.corpus_tokens:
        return own
    return NgramOfCorpus(own, Corpora(config.corpus_tokens, longest, shortest), longest)


NGRAM = DrafterKind(speculation.NGRAM, _make)
