"""Reads texts to embed from files, and writes their vectors to files.

Input is plain lines or JSONL; output is JSONL, NumPy or safetensors. A source can be read several times, in parts, so
that bad lines are found before any work and memory use stays constant. A file is written whole or not at all. Does not
know models or the command line.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, TypeAlias

import msgspec
import numpy as np

from sightline.core.embedding import EmbeddingRequestOutput
from sightline.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT_FIELD = "text"
TokenIds: TypeAlias = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class InputFormat(Enum):
    """Format of an input line."""

    TEXT = "text"
    """Plain text."""
    JSONL = "jsonl"
    """A JSON object with the text in a field, a JSON string, or a list of token ids."""


class OutputFormat(Enum):
    """Format of the output file."""

    JSONL = "jsonl"
    """One object per text: the other fields of its input object, and `OUTPUT_FIELDS`."""
    NPY = "npy"
    """float32 [num_texts, dimension]."""
    SAFETENSORS = "safetensors"
    """`embeddings`, float32 [num_texts, dimension], and `num_tokens`, int64 [num_texts]."""


OUTPUT_FIELDS = ("embedding", "num_tokens", "num_truncated_tokens")
JSONL_SUFFIXES = (".jsonl", ".ndjson")


def input_format_of(name: str) -> InputFormat:
    """The input format for a file's suffix."""
    suffix = Path(name).suffix.lower()
    if suffix == ".json":
        raise RequestError(
            f"expected plain text or .jsonl, got {name}: a .json file may be either; say which with --input-format"
        )
    return InputFormat.JSONL if suffix in JSONL_SUFFIXES else InputFormat.TEXT


def output_format_of(path: Path) -> OutputFormat:
    """The output format for a file's suffix."""
    suffix = path.suffix.lower()
    if suffix in JSONL_SUFFIXES:
        return OutputFormat.JSONL
    for each in OutputFormat:
        if suffix == f".{each.value}":
            return each
    known = ", ".join(f".{each.value}" for each in OutputFormat)
    raise RequestError(f"expected an output file that ends in {known}, got {path.name}; say which format with --format")


@dataclass(frozen=True)
class TextItem:
    """One text to embed."""

    number: int
    """Position in its source, from 1."""
    text: str | list[int]
    """The text, or its token ids."""
    carried: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    """The other fields of its object, as written there."""

    @property
    def size(self) -> int:
        """Number of characters or token ids."""
        return len(self.text)


class TextSource(ABC):
    """An ordered source of texts that can be read several times."""

    @abstractmethod
    def __iter__(self) -> Iterator[TextItem]:
        """Iterates from the first text. Raises `RequestError` with the place of anything that is not a text."""

    @abstractmethod
    def place(self, number: int) -> str:
        """The place of a text, for messages; 0 is the source itself."""

    def count(self) -> int:
        """Reads and counts all texts. Raises `RequestError` if there are none, or if one is not a text."""
        found = sum(1 for _ in self)
        if not found:
            raise RequestError(f"expected at least one text, got none: {self.place(0)} is empty")
        return found

    def slices(self, max_texts: int, max_size: int) -> Iterator[list[TextItem]]:
        """Yields texts in order, in lists of at most `max_texts` that end when `max_size` is reached."""
        taken: list[TextItem] = []
        size = 0
        for item in self:
            taken.append(item)
            size += item.size
            if len(taken) == max_texts or size >= max_size:
                yield taken
                taken, size = [], 0
        if taken:
            yield taken


class GivenTexts(TextSource):
    """Texts of the command line."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __iter__(self) -> Iterator[TextItem]:
        return (TextItem(number, text) for number, text in enumerate(self._texts, 1))

    def place(self, number: int) -> str:
        return f"TEXT {number}" if number else "the command line"


LineReader: TypeAlias = Callable[[str], tuple[str | list[int], Mapping[str, msgspec.Raw]]]
"""Returns a line's text or token ids, and its other fields. Raises `RequestError` if it is neither."""


class TextLines(TextSource):
    """The lines of a seekable stream, which the caller closes."""

    def __init__(self, stream: BinaryIO, name: str, read: LineReader) -> None:
        self._stream = stream
        self._start = stream.tell()
        self._name = name
        self._read = read

    def __iter__(self) -> Iterator[TextItem]:
        self._stream.seek(self._start)
        for number, line in enumerate(self._stream, 1):
            try:
                text, carried = self._read(_decoded(line, is_first=number == 1))
            except RequestError as error:
                raise RequestError(f"{self.place(number)}: {error}") from error
            yield TextItem(number, text, carried)

    def place(self, number: int) -> str:
        return f"{self._name}, line {number}" if number else self._name


@contextmanager
def rereadable(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Yields the stream itself if it is seekable, otherwise (for a pipe) a temporary copy."""
    if stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as kept:
        shutil.copyfileobj(stream, kept)
        kept.seek(0)
        yield kept


def _decoded(line: bytes, *, is_first: bool) -> str:
    """Decodes a line without its line end, and without a byte order mark in the first line."""
    content = line.removesuffix(b"\n").removesuffix(b"\r")
    if is_first:
        content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"expected UTF-8 text, got {error.reason} at byte {error.start + 1}") from error


def read_plain(line: str) -> tuple[str, Mapping[str, msgspec.Raw]]:
    """Returns the line. Refuses an empty one, because it could mean an empty text or no text."""
    if not line.strip():
        raise RequestError('expected a text, got an empty line; remove it, or use JSONL, where "" is a text')
    return line, {}


class JsonReader:
    """Reads lines of JSONL."""

    def __init__(self, named_field: str | None, reserved: Collection[str]) -> None:
        """With `named_field`, lines must be objects with the text in that field. With None they may also be strings or
        lists of token ids, and the field is "text". Other fields must not have a `reserved` name."""
        self._field = DEFAULT_FIELD if named_field is None else named_field
        self._reserved = reserved
        alone = "" if named_field is not None else ", a JSON string or a list of token ids"
        self._expected = f"expected a JSON object with the text, or token ids, under {self._field!r}{alone}"
        self._takes_bare = named_field is None
        self._line = msgspec.json.Decoder(dict[str, msgspec.Raw] | str | TokenIds)
        self._value = msgspec.json.Decoder(str | TokenIds)

    def __call__(self, line: str) -> tuple[str | list[int], Mapping[str, msgspec.Raw]]:
        if not line.strip():
            raise RequestError(f"{self._expected}, got an empty line; remove it")
        try:
            value = self._line.decode(line)
            if isinstance(value, dict):
                return self._text_of(value, line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RequestError(f"{self._expected}, got {_shown(line)}: {error}") from error
        if not self._takes_bare:
            raise RequestError(f"{self._expected}, got {_shown(line)}; leave out --field, or make it an object")
        return value, {}

    def _text_of(self, fields: dict[str, msgspec.Raw], line: str) -> tuple[str | list[int], Mapping[str, msgspec.Raw]]:
        pairs = json.loads(line, object_pairs_hook=list, parse_int=str, parse_float=str)
        if len(pairs) != len(fields):
            raise RequestError(f"expected every field of an object once, got one twice in {_shown(line)}")
        if self._field not in fields:
            raise RequestError(f"{self._expected}, got an object with {', '.join(map(repr, fields)) or 'no fields'}")
        text = self._value.decode(fields.pop(self._field))
        taken = [name for name in fields if name in self._reserved]
        if taken:
            raise RequestError(
                f"expected no field {taken[0]!r} beside the text, got one: the output uses that name; rename it"
            )
        return text, fields


def _shown(line: str) -> str:
    return repr(line if len(line) <= 60 else line[:60] + "…")


Result: TypeAlias = tuple[TextItem, EmbeddingRequestOutput]
"""A text and its output."""


class VectorWriter(ABC):
    """Writes results in parts."""

    def __init__(self, file: BinaryIO, num_texts: int, dimension: int) -> None:
        self.file = file
        self.num_texts = num_texts
        self.dimension = dimension

    def start(self) -> None:
        """Writes what comes before the first result."""
        return

    @abstractmethod
    def write(self, results: Sequence[Result]) -> None:
        """Writes the next results, in order."""

    def finish(self) -> None:
        """Writes what is known only after the last result."""
        return


class JsonlWriter(VectorWriter):
    """One JSON object per line."""

    def write(self, results: Sequence[Result]) -> None:
        for item, output in results:
            values = (output.outputs.embedding, len(output.prompt_token_ids), output.num_truncated_tokens)
            line = {**item.carried, **dict(zip(OUTPUT_FIELDS, values, strict=True))}
            self.file.write(msgspec.json.encode(line) + b"\n")
        self.file.flush()


class NpyWriter(VectorWriter):
    """A NumPy matrix. The number of texts is known in advance, so that the header can be written first."""

    def start(self) -> None:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self.num_texts, self.dimension)}
        np.lib.format.write_array_header_1_0(self.file, shape)

    def write(self, results: Sequence[Result]) -> None:
        self.file.write(_rows(results))


class SafetensorsWriter(VectorWriter):
    """Two tensors. The counts come first, to be aligned, and are written at the end."""

    def start(self) -> None:
        count_bytes, row_bytes = 8 * self.num_texts, 4 * self.num_texts * self.dimension
        tensors = {
            "num_tokens": {"dtype": "I64", "shape": [self.num_texts], "data_offsets": [0, count_bytes]},
            "embeddings": {
                "dtype": "F32",
                "shape": [self.num_texts, self.dimension],
                "data_offsets": [count_bytes, count_bytes + row_bytes],
            },
        }
        header = msgspec.json.encode(tensors)
        header += b" " * (-len(header) % 8)
        self.file.write(len(header).to_bytes(8, "little") + header)
        self._counts_at = self.file.tell()
        self._counts = array("q")
        self.file.seek(self._counts_at + count_bytes)

    def write(self, results: Sequence[Result]) -> None:
        self.file.write(_rows(results))
        self._counts.extend(len(output.prompt_token_ids) for _, output in results)

    def finish(self) -> None:
        self.file.seek(self._counts_at)
        self.file.write(np.asarray(self._counts, dtype="<i8").tobytes())


WRITERS: Mapping[OutputFormat, type[VectorWriter]] = {
    OutputFormat.JSONL: JsonlWriter,
    OutputFormat.NPY: NpyWriter,
    OutputFormat.SAFETENSORS: SafetensorsWriter,
}


def _rows(results: Sequence[Result]) -> bytes:
    return np.asarray([output.outputs.embedding for _, output in results], dtype="<f4").tobytes()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a temporary file that replaces `path` atomically at the end; after an error `path` is unchanged.

    Keeps the permissions of a replaced file. Raises `ConfigError` if the file cannot be written.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise ConfigError(f"expected a regular file to write, got {path}, which is something else")
    part = target.with_name(f".sightline-{secrets.token_hex(6)}.part")
    try:
        with _writing(path):
            raw = _Part(part, "xb")
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            with _writing(path):
                os.fsync(raw.fileno())
        with _writing(path):
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)


class _Part(io.FileIO):
    """A file whose write errors become `ConfigError`, unlike other errors of the code that writes to it."""

    def write(self, content: Buffer, /) -> int:
        with _writing(Path(str(self.name))):
            return super().write(content)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"expected to write {path}, got: {error.strerror or error}; no file was left") from error
