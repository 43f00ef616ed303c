"""Grammars are compiled off the loop, within bounds, kept for a while, and refused with the reason."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from sightline.core.errors import GrammarError, RequestError
from sightline.core.structured import StructuredOutputs
from sightline.structured import compiler as compiler_module
from sightline.structured.compiler import CompileLimits, GrammarCompiler
from sightline.structured.matcher import GrammarMatcher
from sightline.structured.vocabulary import Vocabulary, read_vocabulary
from sightline.text.tokenizers.tokenizer import PromptTokens, Tokenizer
from support.structured import UNSUPPORTED
from support.tiny_tokenizers import train_byte_level, train_sentence_piece

LIMITS = CompileLimits()


def deep_patterns(depth: int) -> dict[str, object]:
    """A schema whose texts must match a pattern for each level."""
    found: dict[str, object] = {"type": "string"}
    for level in range(depth):
        found = {"pattern": f"a{{{level},}}", "anyOf": [found]}
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_byte_level(), PromptTokens(0, frozenset({1})), None)


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = compiler_of(tokenizer)
    yield made
    made.close()


def compiler_of(tokenizer: Tokenizer, limits: CompileLimits = LIMITS) -> GrammarCompiler:
    return GrammarCompiler(reader(tokenizer), limits)


def reader(tokenizer: Tokenizer) -> Callable[[], Vocabulary]:
    return partial(read_vocabulary, tokenizer, tokenizer.vocab_size + 7, frozenset({1}))


def accepts(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> bool:
    """True if a grammar admits a text and may end there."""
    tokens = [*tokenizer.encode_text(text), 1]
    return matcher.num_admitted(tokens) == len(tokens) or (
        matcher.num_admitted(tokens) == len(tokens) - 1 and ends_after(matcher, tokens[:-1])
    )


def ends_after(matcher: GrammarMatcher, tokens: list[int]) -> bool:
    matcher.consume(tokens)
    found = matcher.is_complete
    matcher.rollback(len(tokens))
    return found


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_a_schema_that_cannot_be_held_is_refused_by_its_keyword(compiler: GrammarCompiler, keyword: str) -> None:
    for schema in (UNSUPPORTED[keyword], {"type": "object", "properties": {"deep": UNSUPPORTED[keyword]}}):
        with pytest.raises(RequestError) as raised:
            compiler.prepare(StructuredOutputs(json=schema)).result()
        assert keyword.casefold() in str(raised.value).casefold(), raised.value


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"\bfoo"}, "lookarounds"),
        ({"grammar": 'start: "a'}, "lexer error"),
        ({"grammar": "start: b"}, "unknown name"),
        ({"grammar": 'start: %json {"type": "array", "uniqueItems": true}'}, "%json"),
        ({"grammar": "start: A\nA: " + " & ".join(f"/(?s:.*)a{{{each},}}/" for each in range(40))}, "& and ~"),
        ({"json": {"type": "string", "allOf": [{"pattern": f"a{{{each},}}"} for each in range(40)]}}, "at most 6"),
        ({"json": deep_patterns(40)}, "at most 6"),
        ({"json": {"items": {"allOf": [{"$ref": "#/$defs/a"}] * 7}, "$defs": {"a": {"pattern": "a"}}}}, "at most 6"),
        ({"json": False}, "the schema false"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "strnig"}}, "Invalid type"),
        ({"json": {"$ref": "http://127.0.0.1/x"}}, "not present in a registry"),
        ({"json": {"$ref": "#/nowhere"}}, "does not exist"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    compiler: GrammarCompiler, given: dict[str, object], reason: str
) -> None:
    with pytest.raises(RequestError) as raised:
        compiler.prepare(StructuredOutputs(**given)).result()  # type: ignore[arg-type]
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    "text", ["a", 'q"uote', "back\\slash", "line\nend", "ünïcode 😀", "{}", "/x/", "<|eos|>", "a|b"]
)
def test_a_choice_is_each_of_its_texts_and_nothing_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str
) -> None:
    grammar = compiler.prepare(StructuredOutputs(choice=[text, "other"])).result()
    if text != "<|eos|>":  # which the tokenizer reads as its special token
        assert accepts(grammar.matcher(), tokenizer, text)
    assert accepts(grammar.matcher(), tokenizer, "other")
    assert not accepts(grammar.matcher(), tokenizer, "othe")
    assert not accepts(grammar.matcher(), tokenizer, text + "x")
    assert grammar.matcher().num_admitted([1]) == 0


def test_spaces_between_tokens_of_json_are_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.prepare(StructuredOutputs(json_object=True)).result()
    assert accepts(grammar.matcher(), tokenizer, '{"a":' + " " * 64 + "1}")
    assert not accepts(grammar.matcher(), tokenizer, '{"a":' + " " * 65 + "1}")


def test_a_vocabulary_that_was_read_is_not_read_again(tokenizer: Tokenizer) -> None:
    read, calls = reader(tokenizer), list[int]()

    def counted() -> Vocabulary:
        calls.append(1)
        return read()

    compiler = GrammarCompiler(counted)
    assert compiler.warm_up() is None
    for text in "ab":
        compiler.prepare(StructuredOutputs(regex=text)).result()
    assert calls == [1]
    compiler.close()


def test_equal_constraints_are_compiled_once_and_failures_too(compiler: GrammarCompiler) -> None:
    first, second = (compiler.prepare(StructuredOutputs(regex="a+")) for _ in range(2))
    assert first.grammar is second.grammar
    assert first.result() is second.result()
    assert compiler.num_compiled == 1
    wrong = compiler.prepare(StructuredOutputs(regex="(a"))
    wrong.settle()
    assert compiler.prepare(StructuredOutputs(regex="(a")).grammar is wrong.grammar


def test_only_so_many_are_kept_and_those_that_are_held(tokenizer: Tokenizer) -> None:
    compiler = compiler_of(tokenizer, replace(LIMITS, num_kept=2))
    held = compiler.prepare(StructuredOutputs(regex="held"))
    for number in range(5):
        compiler.prepare(StructuredOutputs(regex=f"a{number}")).result()
    gc.collect()
    assert compiler.num_compiled == 6
    assert len(compiler._alive) == 3
    assert compiler.prepare(StructuredOutputs(regex="held")).grammar is held.grammar
    compiler.prepare(StructuredOutputs(regex="a0")).result()
    assert compiler.num_compiled == 7
    compiler.close()


def test_a_compilation_that_takes_too_long_is_refused_and_others_go_on(tokenizer: Tokenizer) -> None:
    release, read = threading.Event(), reader(tokenizer)

    def slow() -> Vocabulary:
        release.wait(20)
        return read()

    compiler = GrammarCompiler(slow, replace(LIMITS, seconds=0.05))
    pending = compiler.prepare(StructuredOutputs(regex="a"))
    before = pending.is_settled
    pending.settle()
    assert (before, pending.is_settled) == (False, True)
    with pytest.raises(RequestError, match="compiled in time"):
        pending.result()
    release.set()
    pending.grammar.result(20)
    assert pending.result().matcher().num_admitted(tokenizer.encode_text("a")) == 1
    compiler.close()


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("fault", [ValueError("planted"), Panic("planted")], ids=["error", "panic"])
def test_a_fault_of_the_library_refuses_one_constraint(
    compiler: GrammarCompiler, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(constraint: StructuredOutputs) -> str:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "grammar_source", broken)
        with pytest.raises(RequestError, match="got a fault: planted"):
            compiler.prepare(StructuredOutputs(regex="x")).result()
    assert compiler.prepare(StructuredOutputs(regex="y")).result().matcher().mask().any()


def test_a_schema_beyond_the_librarys_limits_is_refused(tokenizer: Tokenizer) -> None:
    compiler = compiler_of(tokenizer, replace(LIMITS, max_grammar_size=200))
    large = {"type": "object", "properties": {f"k{each}": {"type": "integer"} for each in range(500)}}
    with pytest.raises(RequestError, match="can be held"):
        compiler.prepare(StructuredOutputs(json=large)).result()
    compiler.close()


@pytest.mark.parametrize(
    "hostile",
    [
        {"regex": "(" * 400 + "a" + ")" * 400},
        {"regex": "((a{1,100}){1,100}){1,100}"},
        {"regex": "(a|b)*" * 500},
        {"json": {"type": "array", "items": {"type": "string"}, "minItems": 10**6, "maxItems": 10**6}},
        {"json": {"type": "string", "maxLength": 10**9}},
        {"json": {"allOf": [{"pattern": f"a{{{each},}}"} for each in range(6)], "type": "string"}},
        {"json": {"allOf": [{"pattern": f"{each}{{3,40}}.{each}"} for each in "abcdef"], "type": "string"}},
        {"json": {"type": "string", "pattern": "(a|b)*a(a|b){25}", "minLength": 60}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"choice": [f"{each}" * 5 for each in range(1000)]},
    ],
    ids=lambda each: str(each)[:40],
)
def test_hostile_sources_end_soon_one_way_or_another(compiler: GrammarCompiler, hostile: dict[str, object]) -> None:
    pending = compiler.prepare(StructuredOutputs(**hostile))  # type: ignore[arg-type]
    pending.settle()
    assert pending.grammar.done()
    with suppress(RequestError, GrammarError):
        assert pending.result().matcher().mask().any()


def test_a_model_without_an_end_token_cannot_be_held(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no token that ends an answer"):
        read_vocabulary(tokenizer, tokenizer.vocab_size, frozenset())


def test_a_tokenizer_whose_tokens_have_other_bytes_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "token_text", lambda self, token: "x")
    with pytest.raises(RequestError, match="as text and"):
        read_vocabulary(tokenizer, tokenizer.vocab_size, frozenset({1}))


def test_a_tokenizer_that_is_no_bytes_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(tokenizer.to_data(), vocabulary=json.dumps({"model": {"type": "Strange"}}))
    monkeypatch.setattr(Tokenizer, "to_data", lambda self: broken)
    compiler = GrammarCompiler(partial(read_vocabulary, tokenizer, tokenizer.vocab_size, frozenset({1})))
    assert "cannot be read as bytes" in (compiler.warm_up() or "")
    with pytest.raises(RequestError, match="cannot be read as bytes"):
        compiler.prepare(StructuredOutputs(regex="a")).result()
    compiler.close()


@pytest.mark.parametrize("prefix_space", [True, False])
def test_a_space_that_text_loses_at_its_beginning_is_not_admitted_there(prefix_space: bool) -> None:
    tokenizer = Tokenizer(train_sentence_piece(prefix_space=prefix_space), PromptTokens(1, frozenset({2})), None)
    vocabulary = read_vocabulary(tokenizer, tokenizer.vocab_size, frozenset({2}))
    assert (vocabulary.unheard is not None) == prefix_space
    compiler = GrammarCompiler(lambda: vocabulary)
    matcher = compiler.prepare(StructuredOutputs(regex=" ?a b")).result().matcher()
    first = [token for token in range(tokenizer.vocab_size) if matcher.mask()[token // 64] >> (token % 64) & 1]
    assert first
    starts = {vocabulary.tokens.decode_bytes([token])[:1] for token in first}
    assert starts == ({b"a"} if prefix_space else {b"a", b" "})
    matcher.consume([next(each for each in first if vocabulary.tokens.decode_bytes([each]) == b"a")])
    later = [token for token in range(tokenizer.vocab_size) if matcher.mask()[token // 64] >> (token % 64) & 1]
    assert {vocabulary.tokens.decode_bytes([token])[:1] for token in later} == {b" "}
    compiler.close()
