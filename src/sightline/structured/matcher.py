"""A compiled grammar, and how far an answer has come in it.

    consumed tokens ─▶ GrammarMatcher ─▶ mask of the tokens that may come next, one bit each
                           └─ rollback: guesses that were only tried

Owns the state of llguidance's matcher and turns its errors into `GrammarError`. Does not know sequences or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from llguidance import LLMatcher
from numpy.typing import NDArray

from sightline.core.errors import GrammarError
from sightline.structured.vocabulary import Vocabulary


class CompiledGrammar:
    """A grammar that answers can be held to. Makes a matcher for each."""

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary) -> None:
        """`start` is at the beginning of the grammar and without an error."""
        self._start = start
        self._vocabulary = vocabulary

    def matcher(self) -> GrammarMatcher:
        """A matcher at the beginning, which shares nothing that changes with others."""
        return GrammarMatcher(self._start.deep_copy(), self._vocabulary)


class GrammarMatcher:
    """How far one answer has come in its grammar."""

    def __init__(self, state: LLMatcher, vocabulary: Vocabulary) -> None:
        self._state = state
        self._vocabulary = vocabulary
        self.num_consumed = 0
        """Tokens that it has taken, those of guesses included."""

    @property
    def is_complete(self) -> bool:
        """True if only the end may follow."""
        self._check()
        return self._state.is_stopped()

    def consume(self, tokens: Sequence[int]) -> None:
        """Takes tokens that the grammar admits. Raises `GrammarError` at one that it refuses."""
        for token in tokens:
            # In an error, an end token is taken all the same.
            if not self._state.consume_token(token) or self._state.is_error():
                raise GrammarError(f"expected a token that the grammar admits, got {token}: {self._why()}")
            self.num_consumed += 1

    def rollback(self, count: int) -> None:
        """Takes the last tokens back."""
        if count and not self._state.rollback(count):
            raise GrammarError(f"expected to take {count} tokens back, got: {self._why()}")
        self.num_consumed -= count

    def num_admitted(self, tokens: Sequence[int]) -> int:
        """How many of some tokens, from the first on, may come next. Changes nothing."""
        return self._state.validate_tokens(list(tokens))

    def mask(self) -> NDArray[numpy.int64]:
        """The tokens that may come next: bit i of word w is token 64 w + i. [num_words]."""
        vocabulary = self._vocabulary
        # llguidance fills words of 32 bits, for its own number of tokens.
        num_bytes = 4 * (-(-vocabulary.tokens.vocab_size // 32))
        mask = numpy.zeros(max(-(-num_bytes // 8), vocabulary.num_words), dtype=numpy.int64)
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, num_bytes)
        self._check()
        found = mask[: vocabulary.num_words]
        return found & vocabulary.unheard if vocabulary.unheard is not None and self.num_consumed == 0 else found

    def _check(self) -> None:
        if self._state.is_error():
            raise GrammarError(f"expected a grammar that can be followed, got: {self._why()}")

    def _why(self) -> str:
        return " ".join(self._state.get_error().replace("<non-verbose/>", "").split())
