"""How a continuation is held to its grammar: masks for its next tokens, and for those behind guesses.

    generated tokens ─ follow ─▶ state ─┬─▶ mask of the next token
                                        └─ guess, guess ─▶ a mask behind each ─ rolled back

Knows a grammar's matcher and the tokens that parameters leave. Does not know rows or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy
from numpy.typing import NDArray

from sightline.core.errors import GrammarError
from sightline.runner.sampling.adjust import TokenAdjustment
from sightline.scheduler.trees import ROOT
from sightline.structured.matcher import CompiledGrammar, GrammarMatcher
from sightline.structured.vocabulary import WORD_BITS

TokenMask: TypeAlias = NDArray[numpy.int64]
"""[num_words]: bit i of word w is token 64 w + i."""


class SequenceConstraint:
    """One continuation's place in its grammar."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher: GrammarMatcher = grammar.matcher()
        self._is_whole = True
        """False if an interruption left the matcher half way: `follow` makes a new one."""
        self._allowed: TokenMask | None = None

    def follow(self, generated: Callable[[int], Sequence[int]], end: int) -> None:
        """Takes the first `end` generated tokens, as far as they were not taken. `generated` returns those from a place
        on. Raises `GrammarError` at one that the grammar refuses."""
        if not self._is_whole:
            self._matcher = self._grammar.matcher()
        self._is_whole = False
        start = self._matcher.num_consumed
        if start < end:
            self._matcher.consume(generated(start)[: end - start])
        self._is_whole = True

    @property
    def is_complete(self) -> bool:
        """True if only the end may follow."""
        return self._matcher.is_complete

    def num_admitted(self, guesses: Sequence[int]) -> int:
        """How many of some guesses, from the first on, the grammar admits."""
        return self._matcher.num_admitted(guesses)

    def mask(self, adjustment: TokenAdjustment | None) -> TokenMask:
        """The tokens that may come next. Raises `GrammarError` if the parameters leave none of them."""
        mask = self._matcher.mask()
        if adjustment is None:
            return mask
        if adjustment.allowed is not None:
            if self._allowed is None:
                self._allowed = _packed(adjustment.allowed, len(mask))
            mask = mask & self._allowed
        forbidden = adjustment.forbidden(0)
        if len(forbidden):
            mask = mask & ~_packed(forbidden, len(mask))
        if not mask.any():
            raise GrammarError(
                "expected a token that structured_outputs and the other parameters leave, got none; allow more by "
                "allowed_token_ids and bad_words, or lower min_tokens"
            )
        return mask

    def behind(
        self, guesses: Sequence[int], parents: Sequence[int], adjustments: Sequence[TokenAdjustment | None]
    ) -> list[TokenMask | None]:
        """The mask of the token behind each guess; None behind one that is refused, where no choice is kept."""
        masks: list[TokenMask | None] = []
        ways: dict[int, list[int]] = {ROOT: []}
        """The guesses on the way to each that is admitted, itself included."""
        path: list[int] = []
        self._is_whole = False
        for guess, (parent, adjustment) in enumerate(zip(parents, adjustments, strict=True)):
            way, token = ways.get(parent), guesses[guess]
            if way is None:
                masks.append(None)
                continue
            path = self._moved(path, way, guesses)
            if not self._matcher.num_admitted([token]):
                masks.append(None)
                continue
            path = ways[guess] = [*way, guess]
            self._matcher.consume([token])
            masks.append(self._mask_if_any(adjustment))
        self._matcher.rollback(len(path))
        self._is_whole = True
        return masks

    def _moved(self, path: list[int], way: list[int], guesses: Sequence[int]) -> list[int]:
        """Takes guesses back and others in, so that those on the way are taken; returns them."""
        common = 0
        while common < min(len(path), len(way)) and path[common] == way[common]:
            common += 1
        self._matcher.rollback(len(path) - common)
        self._matcher.consume([guesses[each] for each in way[common:]])
        return way

    def _mask_if_any(self, adjustment: TokenAdjustment | None) -> TokenMask | None:
        """None if no token is left behind a guess: if it is kept, the choice behind it fails in `follow`."""
        try:
            return self.mask(adjustment)
        except GrammarError:
            return None


def _packed(tokens: NDArray[numpy.int64], num_words: int) -> TokenMask:
    bits = numpy.zeros(num_words * WORD_BITS, dtype=numpy.uint8)
    bits[tokens] = 1
    return numpy.packbits(bits, bitorder="little").view(numpy.int64)
