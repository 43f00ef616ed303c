"""Incremental detokenization: the text of a running sequence, piece by piece.

All pieces together are exactly what `Tokenizer.decode` returns for all ids together, at a cost that is linear in the
number of tokens. Runs the steps of the tokenizer's decoder as a stream; each step holds back only what later tokens can
still change. Does not decode windows of tokens repeatedly to compare them.

    ids -> spellings, special tokens left out -> step -> step -> ... -> text
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from sightline.core.errors import UnsupportedModelError
from sightline.text.tokenizers.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Converts the ids of one sequence to text as they arrive. A call that raises has no effect."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> None:
        """`kept` are special tokens that have text even if the others have none."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - kept if skip_special_tokens else frozenset()
        self._steps = _build_steps(json.loads(tokenizer.decoder_state))

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became certain with these ids.

        Holds back an incomplete character at the end. With a byte-fallback vocabulary, holds back the whole run of byte
        tokens at the end, because one invalid byte turns every byte of its run into a replacement character.
        """
        spellings = (self._tokenizer.token(token_id) for token_id in token_ids if token_id not in self._skipped)
        pieces: list[str] = [spelling for spelling in spellings if spelling is not None]
        steps = [step.copied() for step in self._steps]
        for step in steps:
            pieces = list(step.feed(pieces))
        text = "".join(pieces)
        self._steps = steps
        return text

    def flush(self) -> str:
        """Returns the text that was held back, decoded as it stands. The sequence ends here."""
        pieces: list[str] = []
        steps = [step.copied() for step in self._steps]
        for step in steps:
            pieces = [*step.feed(pieces), *step.finish()]
        text = "".join(pieces)
        self._steps = steps
        return text


def check_streamable(tokenizer: Tokenizer) -> None:
    """Raises `UnsupportedModelError` if no `IncrementalDetokenizer` can be made for this tokenizer.

    Called at start-up, so that such a model fails before its first request.
    """
    _build_steps(json.loads(tokenizer.decoder_state))


class _Step(ABC):
    """One step of a decoder, over a stream of pieces."""

    @abstractmethod
    def feed(self, pieces: Iterable[str]) -> Iterable[str]:
        """Returns the text that is certain after these pieces."""

    def finish(self) -> Iterable[str]:
        """Returns the text that was held back."""
        return ()

    def copied(self) -> Self:
        """An independent copy. Subclasses whose state is changed in place must copy that too."""
        return copy.copy(self)


class _Replace(_Step):
    """Replaces a string within each piece."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new

    def feed(self, pieces: Iterable[str]) -> Iterable[str]:
        return [piece.replace(self._old, self._new) for piece in pieces]


class _ByteLevel(_Step):
    """Decodes spellings in the 256-letter byte alphabet. Invalid UTF-8 becomes replacement characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, pieces: Iterable[str]) -> Iterable[str]:
        return [self._decoder.decode(_spelled_bytes(piece)) for piece in pieces]

    def finish(self) -> Iterable[str]:
        return [self._decoder.decode(b"", final=True)]

    def copied(self) -> Self:
        other = super().copied()
        other._decoder = _same_decoder(self._decoder)
        return other


class _ByteFallback(_Step):
    """Decodes tokens such as `<0x0A>`, which stand for bytes. A run of them is text if all of it is valid UTF-8."""

    _SPELLING = re.compile(r"<0x([0-9A-Fa-f]{2})>")

    def __init__(self) -> None:
        self._run = bytearray()
        """Shared by copies, so that copying is cheap: bytes beyond `_run_length` belong to another copy."""
        self._run_length = 0
        self._run_is_broken = False
        self._check = codecs.getincrementaldecoder("utf-8")(errors="strict")

    def feed(self, pieces: Iterable[str]) -> Iterable[str]:
        out: list[str] = []
        for piece in pieces:
            match = self._SPELLING.fullmatch(piece)
            if match is None:
                out += [*self.finish(), piece]
            else:
                out.append(self._extend_run(int(match[1], 16)))
        return out

    def finish(self) -> Iterable[str]:
        held = bytes(self._run[: self._run_length])
        self._start_run()
        self._run_is_broken = False
        self._check.reset()
        try:
            return [held.decode("utf-8")]
        except UnicodeDecodeError:
            return [REPLACEMENT * len(held)]

    def copied(self) -> Self:
        other = super().copied()
        other._check = _same_decoder(self._check)
        return other

    def _extend_run(self, byte: int) -> str:
        """Adds a byte. Once a run is invalid, each of its bytes is returned as a replacement character."""
        self._run[self._run_length :] = (byte,)
        self._run_length += 1
        if not self._run_is_broken:
            try:
                self._check.decode(bytes([byte]))
                return ""
            except UnicodeDecodeError:
                self._run_is_broken = True
        certain = REPLACEMENT * self._run_length
        self._start_run()
        return certain

    def _start_run(self) -> None:
        """Starts a run in new memory: a copy may still hold the bytes of the previous run."""
        self._run, self._run_length = bytearray(), 0


class _Metaspace(_Step):
    """Replaces a mark by a space, or by nothing in the first piece if a space was prepended there."""

    def __init__(self, mark: str, prepended: bool) -> None:
        self._mark = mark
        self._at_start = prepended

    def feed(self, pieces: Iterable[str]) -> Iterable[str]:
        for piece in pieces:
            yield piece.replace(self._mark, "" if self._at_start else " ")
            self._at_start = False


class _StripLeft(_Step):
    """Removes up to `count` characters from the start of the whole text."""

    def __init__(self, character: str, count: int) -> None:
        self._character = character
        self._left = count

    def feed(self, pieces: Iterable[str]) -> Iterable[str]:
        for piece in pieces:
            kept = piece
            while self._left and kept.startswith(self._character):
                kept = kept[1:]
                self._left -= 1
            if kept:
                self._left = 0
            yield kept


def _same_decoder(decoder: codecs.BufferedIncrementalDecoder) -> codecs.BufferedIncrementalDecoder:
    other = codecs.getincrementaldecoder("utf-8")(errors=decoder.errors)
    other.setstate(decoder.getstate())
    return other


def _build_steps(decoder: Any) -> list[_Step]:
    """The steps of a decoder from its settings, which are JSON of the `tokenizers` library."""
    entries: list[Any] = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    steps: list[_Step] = []
    fused = False
    for entry in entries:
        match entry:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteLevel"}:
                steps.append(_ByteLevel())
                fused = True
            case {"type": "ByteFallback"} if not fused:
                steps.append(_ByteFallback())
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                steps.append(_Replace(old, new))
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme} if not fused:
                steps.append(_Metaspace(mark, prepended=scheme != "never"))
            case {"type": "Strip", "content": str(character), "start": int(count), "stop": 0} if fused:
                steps.append(_StripLeft(character, count))
            case _:
                raise UnsupportedModelError(
                    "expected a tokenizer whose decoder is made of ByteLevel, Replace, ByteFallback, Fuse, "
                    f"Strip or Metaspace, got {json.dumps(entry)[:120]}: its text cannot be streamed without "
                    "changing it."
                )
    return steps


def _byte_alphabet() -> Mapping[str, int]:
    """Maps letters to bytes. Printable bytes of Latin-1 are their own letters; the others start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return MappingProxyType(letters)


_BYTE_BY_LETTER = _byte_alphabet()


def _spelled_bytes(spelling: str) -> bytes:
    """The bytes of a spelling. One with a letter outside the alphabet is an added token and stands for itself."""
    try:
        return bytes([_BYTE_BY_LETTER[letter] for letter in spelling])
    except KeyError:
        return spelling.encode("utf-8")
