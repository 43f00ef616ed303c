"""A model's vocabulary as llguidance has it: the bytes of each token, and the tokens that end an answer.

Owns the agreement of those bytes with the text that an answer gets. Does not know grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from sightline.core.errors import RequestError
from sightline.text.tokenizers.tokenizer import Tokenizer

WORD_BITS = 64
_NUM_COMPARED = 512
"""Tokens whose bytes are compared with their text."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that grammars are compiled for."""

    tokens: LLTokenizer
    num_words: int
    """Words of a mask over the model's tokens."""
    unheard: NDArray[numpy.int64] | None
    """A mask without the tokens that begin with a space, if text loses a space at its beginning; otherwise None."""
    special: Mapping[str, int]
    """Tokens that grammars name by number, by their spelling."""
    ends: frozenset[int]
    """Tokens that end an answer."""

    def fault(self, source: str) -> str | None:
        """Why a grammar cannot be held; None if it can be."""
        state = LLMatcher(self.tokens, source, log_level=0)
        faults = [state.get_error()] if state.is_error() else state.get_grammar_warnings()
        return " ".join("; ".join(faults).split())[:400] or None


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> Vocabulary:
    """The vocabulary of a model with `vocab_size` tokens. Raises `RequestError` if grammars cannot be held over it.

    Takes about a second for 100,000 tokens, in which no other thread of Python runs.
    """
    if not end_tokens:
        raise RequestError("structured_outputs is not supported for this model: it names no token that ends an answer")
    size = max(vocab_size, tokenizer.vocab_size)
    try:
        tokens = LLTokenizer(tokenizer.to_data().vocabulary, n_vocab=size, eos_token=sorted(end_tokens))
    except ValueError as error:
        raise RequestError(
            f"structured_outputs is not supported for this model: its tokenizer cannot be read as bytes: {error}"
        ) from error
    loses_space = _check_texts(tokenizer, tokens)
    num_words = -(-vocab_size // WORD_BITS)
    unheard = _without_spaces(tokens, size, num_words) if loses_space else None
    special = {
        spelling.decode(errors="replace"): token
        for token in range(tokenizer.vocab_size)
        # llguidance also takes the token of the byte 0xFF, which is in no text, for a special one without a spelling.
        if tokens.is_special_token(token) and (spelling := tokens.decode_bytes([token]))
    }
    return Vocabulary(tokens, num_words, unheard, special, end_tokens)


def _check_texts(tokenizer: Tokenizer, tokens: LLTokenizer) -> bool:
    """True if text loses a space at its beginning. Raises `RequestError` if tokens have other bytes than their text."""
    loses_space = False
    for token in range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // _NUM_COMPARED)):
        text, content = tokenizer.token_text(token), tokens.decode_bytes([token])
        if tokens.is_special_token(token) or tokenizer.token(token) is None or "\N{REPLACEMENT CHARACTER}" in text:
            continue
        if content == b" " + text.encode():
            loses_space = True
        elif content != text.encode():
            raise RequestError(
                f"structured_outputs is not supported for this model: token {token} is {text!r} as text and "
                f"{content!r} to a grammar"
            )
    return loses_space


def _without_spaces(tokens: LLTokenizer, size: int, num_words: int) -> NDArray[numpy.int64]:
    heard = [not tokens.decode_bytes([token]).startswith(b" ") for token in range(size)]
    bits = numpy.zeros(max(size, num_words * WORD_BITS) + WORD_BITS, dtype=numpy.uint8)
    bits[:size] = heard
    return numpy.packbits(bits[: num_words * WORD_BITS], bitorder="little").view(numpy.int64)
