"""A matcher's masks are what the grammar admits, taken back exactly, and its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from random import Random

import pytest

from sightline.core.errors import GrammarError
from sightline.core.structured import StructuredOutputs
from sightline.structured.compiler import GrammarCompiler
from sightline.structured.matcher import GrammarMatcher
from sightline.structured.vocabulary import read_vocabulary
from sightline.text.tokenizers.tokenizer import PromptTokens, Tokenizer
from support.structured import PERSON, whole_schema
from support.tiny_tokenizers import train_byte_level

PADDING = 70
"""Rows of the model's vocabulary beyond the tokenizer's."""
ANSWER = '{"name": "Ada", "age": 36, "tags": ["a", "c"]}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_byte_level(), PromptTokens(0, frozenset({1})), None)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(partial(read_vocabulary, tokenizer, tokenizer.vocab_size + PADDING, frozenset({1})))
    yield made
    made.close()


def person(compiler: GrammarCompiler) -> GrammarMatcher:
    return compiler.prepare(StructuredOutputs(json=PERSON)).result().matcher()


def admitted(matcher: GrammarMatcher) -> list[int]:
    """The tokens of its mask."""
    words = matcher.mask().tolist()
    return [64 * index + bit for index, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def test_a_mask_has_the_tokens_that_may_come(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher, tokens = person(compiler), tokenizer.encode_text(ANSWER)
    size = tokenizer.vocab_size + PADDING
    for token in tokens:
        tried = [each for each in range(size) if matcher.num_admitted([each])]
        # Where the text is forced, only the tokenizer's own way to write it is left.
        assert admitted(matcher) == tried or (len(admitted(matcher)) == 1 and set(admitted(matcher)) < set(tried))
        assert max(tried) < tokenizer.vocab_size
        matcher.consume([token])
    assert matcher.is_complete
    assert admitted(matcher) == [1]


def test_what_is_taken_back_was_never_there(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    draw, tokens = Random(3), tokenizer.encode_text(ANSWER)
    expected, fresh = [], person(compiler)
    for token in tokens:
        expected.append(admitted(fresh))
        fresh.consume([token])
    matcher = person(compiler)
    for _ in range(60):
        place = matcher.num_consumed
        assert place == len(tokens) or admitted(matcher) == expected[place]
        if place and draw.random() < 0.5:
            matcher.rollback(draw.randint(1, place))
        else:
            matcher.consume(tokens[place : place + draw.randint(1, 9)])


def test_matchers_of_one_grammar_share_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first, second = person(compiler), person(compiler)
    before = admitted(second)
    first.consume(tokenizer.encode_text(ANSWER))
    assert first.is_complete
    assert not second.is_complete
    assert admitted(second) == before
    assert second.num_consumed == 0


def test_a_token_that_is_refused_is_an_error_and_stays_one(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = person(compiler)
    with pytest.raises(GrammarError, match="expected a token that the grammar admits"):
        matcher.consume(tokenizer.encode_text("x"))
    for call in (matcher.mask, lambda: matcher.is_complete, lambda: matcher.consume([1])):
        with pytest.raises(GrammarError):
            call()
    assert matcher.num_admitted(tokenizer.encode_text("{")) == 0


def test_a_grammar_that_grows_beyond_its_limits_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.prepare(StructuredOutputs(regex="((a{1,100}){1,100}){1,100}")).result().matcher()
    with pytest.raises(GrammarError, match="too many expressions"):
        matcher.mask()


@pytest.mark.parametrize("seed", range(20))
def test_random_walks_end_in_texts_that_the_schema_allows(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    draw, schema = Random(seed), whole_schema(seed)
    matcher = compiler.prepare(StructuredOutputs(json=schema)).result().matcher()
    tokens: list[int] = []
    while not matcher.is_complete and len(tokens) < 400:
        found = draw.choice(admitted(matcher))
        if found == 1:
            break
        tokens.append(found)
        matcher.consume([found])
    if len(tokens) < 400:
        json.loads(tokenizer.decode(tokens))
