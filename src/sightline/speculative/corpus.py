"""Texts that were served, kept to guess from: what followed a run of tokens in an earlier text follows it again.

    buffer   … │ text │-1│ text │-1│ text │-1│ …          oldest first, each with an end mark
                  ▲ first             ▲ latest place of each run, by the run's hash

Every caller has an index of its own: guesses are a question of time, and time would tell one caller what another one
wrote. An index is arrays that are written for a whole text at once. A run has one place in it, found by its hash and
compared token by token; of two runs with one place, the later counts. Does not know sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from sightline.core.speculation import LEAST_CORPUS_TOKENS

_END = -1
"""Follows the last token of a text."""
_WORD = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
"""An odd number with well mixed bits, 2^64 divided by the golden ratio."""


def counted(text: Sequence[int]) -> int:
    """The tokens that a text counts for."""
    return max(LEAST_CORPUS_TOKENS, len(text) + 1)


class CorpusIndex:
    """The texts of one caller, and where runs of tokens were last seen in them."""

    def __init__(self, longest: int, shortest: int) -> None:
        """Finds runs of `longest` tokens, and shorter ones down to `shortest`."""
        self._longest, self._shortest = longest, shortest
        self._factors = [pow(_FACTOR, distance + 1, 1 << 64) for distance in range(longest)]
        """By a token's distance from the end of its run."""
        self._first = self._end = 0
        """The part of the buffer that has texts."""
        self._sizes: deque[int] = deque()
        """Entries of each text in the buffer, with its end mark."""
        self.num_tokens = 0
        """The tokens that the texts count for."""
        self._resize(LEAST_CORPUS_TOKENS)

    @property
    def num_bytes(self) -> int:
        """The size of its arrays."""
        return self._buffer.nbytes + self._places.nbytes

    def add(self, text: Sequence[int]) -> None:
        """Takes in a text."""
        size = len(text) + 1
        self._make_room(size)
        start, self._end = self._end, self._end + size
        self._buffer[start : self._end - 1] = text
        self._buffer[self._end - 1] = _END
        self._index(start, self._end - 1)
        self._sizes.append(size)
        self.num_tokens += counted(text)

    def drop_oldest(self) -> int:
        """Drops the oldest text; returns what it counted for. Places in it are passed over, and overwritten in time."""
        size = self._sizes.popleft()
        self._first += size
        dropped = max(LEAST_CORPUS_TOKENS, size)
        self.num_tokens -= dropped
        return dropped

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Finds the longest run that `tokens` end with, and returns up to `most` tokens that followed it where it was
        seen last; none if there is no such run."""
        ending = list(tokens[-self._longest :])
        hashed, shift, found = 0, self._shift, 0
        for length, factor in enumerate(self._factors[: len(ending)], 1):
            hashed = (hashed + (ending[-length] + 1) * factor) & _WORD
            if length < self._shortest:
                continue
            place = int(self._places[length - self._shortest, (hashed * _FACTOR & _WORD) >> shift])
            if place - length >= self._first and self._buffer[place - length : place].tolist() == ending[-length:]:
                found = place
        following = self._buffer[found : min(found + most, self._end)].tolist() if found else []
        return following[: following.index(_END)] if _END in following else following

    @property
    def _shift(self) -> int:
        """Leaves as many bits of a hash as the slots have."""
        num_slots: int = self._places.shape[1]
        return 65 - num_slots.bit_length()

    def _index(self, start: int, end: int) -> None:
        """Notes the runs of a text that something follows."""
        text = self._buffer[start:end].astype(np.uint64) + np.uint64(1)
        hashed = np.zeros_like(text)
        for length, factor in enumerate(self._factors[: max(0, len(text) - 1)], 1):
            # Entry i is the run that ends with token length - 1 + i.
            hashed = hashed[1 if length > 1 else 0 :] + text[: len(text) - length + 1] * np.uint64(factor)
            if length >= self._shortest:
                slots = (hashed[:-1] * np.uint64(_FACTOR)) >> np.uint64(self._shift)
                # Of equal slots, the last assignment stays.
                self._places[length - self._shortest, slots] = np.arange(start + length, end, dtype=np.int32)

    def _make_room(self, size: int) -> None:
        """Moves the texts to the front of the buffer, or of a larger one, if too little of it is left."""
        if self._end + size <= len(self._buffer):
            return
        kept, needed = self._buffer[self._first : self._end].copy(), 2 * (self._end - self._first + size)
        is_larger = needed > len(self._buffer)
        if is_larger:
            self._resize(needed)
        else:
            np.maximum(self._places - self._first, 0, out=self._places)
        self._buffer[: len(kept)] = kept
        self._first, self._end = 0, len(kept)
        if is_larger:
            for start, end in pairwise(accumulate(self._sizes, initial=0)):
                self._index(start, end - 1)

    def _resize(self, count: int) -> None:
        """Makes a buffer of `count` entries, and an index without runs with slots for half as many or more."""
        slots = 1 << (count // 2 - 1).bit_length()
        self._buffer: npt.NDArray[np.int32] = np.empty(count, np.int32)
        self._places: npt.NDArray[np.int32] = np.zeros((self._longest - self._shortest + 1, slots), np.int32)
        """[lengths, slots]: where the token behind a run is in the buffer; 0 if there is none."""


class Corpora:
    """The texts of all callers, of a limited number of tokens together."""

    def __init__(self, max_tokens: int, longest: int, shortest: int) -> None:
        self._max_tokens, self._longest, self._shortest = max_tokens, longest, shortest
        self._by_caller: dict[str, CorpusIndex] = {}
        self.num_tokens = 0
        """The tokens that the texts of all callers count for."""

    @property
    def num_bytes(self) -> int:
        """The size of all arrays."""
        return sum(each.num_bytes for each in self._by_caller.values())

    def add(self, caller: str, text: Sequence[int]) -> None:
        """Takes in a text of a caller. Where the limit is passed, the caller with the most loses its oldest texts: one
        that has no more than an equal share loses nothing to others."""
        text = text[-(self._max_tokens - 1) :]
        if len(text) <= self._shortest:
            return
        index = self._by_caller.get(caller)
        if index is None:
            index = self._by_caller[caller] = CorpusIndex(self._longest, self._shortest)
        while index.num_tokens + counted(text) > self._max_tokens:
            self.num_tokens -= index.drop_oldest()
        index.add(text)
        self.num_tokens += counted(text)
        while self.num_tokens > self._max_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        caller, index = max(self._by_caller.items(), key=lambda item: item[1].num_tokens)
        self.num_tokens -= index.drop_oldest()
        if not index.num_tokens:
            del self._by_caller[caller]

    def propose(self, caller: str, tokens: Sequence[int], most: int) -> list[int]:
        """Guesses what follows tokens of a caller, from texts of the same caller."""
        index = self._by_caller.get(caller)
        return [] if index is None else index.propose(tokens, most)
