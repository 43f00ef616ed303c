"""Incremental detokenization: the pieces are the whole, nothing is cut, and the cost is linear."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from sightline.core.errors import UnsupportedModelError
from sightline.text.detokenizer import IncrementalDetokenizer, _Step, check_streamable
from sightline.text.tokenizers.tokenizer import PromptTokens, Tokenizer
from support.tiny_tokenizers import SPACE, TEXTS, train_byte_level, train_sentence_piece

KINDS = ("byte-level", "sentence-piece", "sentence-piece without prefix", "metaspace")
REPLACEMENT = "\ufffd"


def wrapped(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, PromptTokens(None, frozenset()), None)


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "byte-level":
        return wrapped(train_byte_level())
    backend = train_sentence_piece(prefix_space=kind == "sentence-piece")
    if kind == "metaspace":
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return wrapped(backend)


def streamed(kind: str, ids: list[int], *, at_once: int = 1, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer(kind), skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.push(ids[start : start + at_once]) for start in range(0, len(ids), at_once)]
    return [*pieces, detokenizer.flush()]


def any_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids, some beyond the vocabulary, and long runs of the ones that stand for single bytes."""
    size = tokenizer(kind).vocab_size
    byte_ids = st.integers(4, 259)
    return st.lists(st.one_of(byte_ids, byte_ids, st.integers(0, size + 3)), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_together_are_the_decoded_whole(kind: str, data: st.DataObject) -> None:
    ids = data.draw(any_ids(kind))
    at_once = data.draw(st.integers(1, 4))
    skip = data.draw(st.booleans())
    expected = tokenizer(kind).decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(kind, ids, at_once=at_once, skip_special_tokens=skip)) == expected


@pytest.mark.parametrize("kind", KINDS[:3])
# SentencePiece spells a space with this mark, so a mark in the text comes back as a space.
@given(text=st.text(st.characters(codec="utf-8", exclude_characters=SPACE), max_size=60))
@settings(max_examples=80, deadline=None)
def test_text_survives_and_no_character_is_split(kind: str, text: str) -> None:
    ids = tokenizer(kind).encode_prompt(text)
    pieces = streamed(kind, ids, skip_special_tokens=False)
    assert "".join(pieces) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_only_an_incomplete_character_is_held_back_by_a_byte_level_vocabulary(text: str) -> None:
    kind = "byte-level"
    ids = tokenizer(kind).encode_prompt(text)
    detokenizer = IncrementalDetokenizer(tokenizer(kind), skip_special_tokens=False)
    seen = ""
    for count, token_id in enumerate(ids, start=1):
        seen += detokenizer.push([token_id])
        whole = tokenizer(kind).decode(ids[:count], skip_special_tokens=False)
        assert whole.startswith(seen)
        assert set(whole[len(seen) :]) <= {REPLACEMENT}


def test_byte_run_is_held_until_it_ends_because_one_bad_byte_spoils_it() -> None:
    kind = "sentence-piece without prefix"
    accented = [4 + byte for byte in "é".encode()]
    assert streamed(kind, [*accented, 4 + 0x41])[:3] == ["", "", ""]
    assert "".join(streamed(kind, [*accented, 4 + 0xFF])) == REPLACEMENT * 3
    assert tokenizer(kind).decode([*accented, 4 + 0xFF]) == REPLACEMENT * 3


def test_broken_byte_run_is_streamed_at_once() -> None:
    detokenizer = IncrementalDetokenizer(tokenizer("sentence-piece"))
    assert [detokenizer.push([4 + 0xFF]) for _ in range(3)] == [REPLACEMENT] * 3


def test_leading_space_is_dropped_once_and_inner_ones_are_kept() -> None:
    ours = tokenizer("sentence-piece")
    ids = ours.encode_prompt("a b")
    assert "".join(streamed("sentence-piece", ids)) == "a b"
    assert "".join(streamed("sentence-piece", ids + ids)) == ours.decode(ids + ids) == "a b a b"


@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece"])
@pytest.mark.parametrize("byte", [0x41, 0x80, 0xE2, 0xFF])
def test_cost_is_linear_also_for_endless_invalid_bytes(kind: str, byte: int) -> None:
    token_id = next(i for i in range(4, 260) if stands_for(kind, i, byte))

    def seconds(count: int) -> float:
        start = time.process_time()
        streamed(kind, [token_id] * count)
        return time.process_time() - start

    seconds(100)
    short = min(seconds(1_000) for _ in range(3))
    long = seconds(10_000)
    assert long < 40 * short  # 10 if linear, 100 if quadratic


def stands_for(kind: str, token_id: int, byte: int) -> bool:
    if kind != "byte-level":
        return token_id == 4 + byte
    first = tokenizer(kind).token(token_id)
    mapped = {0x41: "A", 0x80: "Ģ", 0xE2: "â", 0xFF: "ÿ"}
    return first == mapped[byte]


def test_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        IncrementalDetokenizer(wrapped(backend))
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        check_streamable(wrapped(backend))
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(UnsupportedModelError, match="null"):
        IncrementalDetokenizer(wrapped(backend))
    with pytest.raises(UnsupportedModelError, match="null"):
        check_streamable(wrapped(backend))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_start_up_check_passes_can_be_streamed(kind: str) -> None:
    check_streamable(tokenizer(kind))
    assert IncrementalDetokenizer(tokenizer(kind)).flush() == ""


def interrupting(method: Callable[..., Iterable[str]], chance: random.Random) -> Callable[..., Iterable[str]]:
    """Interrupted now and then when it has changed all that it changes."""

    def called(*arguments: object) -> Iterable[str]:
        pieces = list(method(*arguments))
        if chance.random() < 0.2:
            raise KeyboardInterrupt
        return pieces

    return called


def repeated(call: Callable[[], str]) -> tuple[str, int]:
    """The text, and how many interruptions there were before it came."""
    for interruptions in range(1000):
        try:
            return call(), interruptions
        except KeyboardInterrupt:
            pass
    raise AssertionError("it never came through")


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_call_has_done_nothing_and_can_be_made_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    bytes_and_words = [4 + byte for byte in "é€A".encode()] + [4 + 0xFF, 4 + 0xE2]
    ids = [*tokenizer(kind).encode_prompt(" ".join(TEXTS)), *bytes_and_words] * 2
    for step in _Step.__subclasses__():
        for name in ("feed", "finish"):
            monkeypatch.setattr(step, name, interrupting(getattr(step, name), chance))
    detokenizer = IncrementalDetokenizer(tokenizer(kind))
    calls = [lambda token_id=token_id: detokenizer.push([token_id]) for token_id in ids]
    told = [repeated(call) for call in [*calls, detokenizer.flush]]
    assert "".join(text for text, _ in told) == tokenizer(kind).decode(ids)
    assert sum(interruptions for _, interruptions in told) > 10
