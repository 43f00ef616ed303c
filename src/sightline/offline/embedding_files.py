"""Texts to embed, out of files, and their vectors, into files.

Owns the forms of both: plain lines and JSONL in; JSONL, NumPy and safetensors out. A source can be read as often as is
needed, a part at a time, so that bad lines are found before any work and memory stays flat. A file is written whole or
not at all. Does not know models, nor the command line.
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

from sightline.core.errors import ConfigError, RequestError
from sightline.core.request import EmbeddingRequestOutput

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT_FIELD = "text"
TokenIds: TypeAlias = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class InputFormat(Enum):
    """What a line is."""

    TEXT = "text"
    """A text as it stands."""
    JSONL = "jsonl"
    """A JSON object with the text in a field, a JSON string, or a list of token ids."""


class OutputFormat(Enum):
    """What vectors are written as."""

    JSONL = "jsonl"
    """An object a text: what its own object had beside the text, and what `OUTPUT_FIELDS` names."""
    NPY = "npy"
    """float32 [num_texts, dimension]."""
    SAFETENSORS = "safetensors"
    """`embeddings`, float32 [num_texts, dimension], and `num_tokens`, int64 [num_texts]."""


OUTPUT_FIELDS = ("embedding", "num_tokens", "num_truncated_tokens")
JSONL_SUFFIXES = (".jsonl", ".ndjson")


def input_format_of(name: str) -> InputFormat:
    """What a file's suffix says of its lines."""
    suffix = Path(name).suffix.lower()
    if suffix == ".json":
        raise RequestError(
            f"expected plain text or .jsonl, got {name}: a .json file may be either; say which with --input-format"
        )
    return InputFormat.JSONL if suffix in JSONL_SUFFIXES else InputFormat.TEXT


def output_format_of(path: Path) -> OutputFormat:
    """What a file's suffix asks for."""
    suffix = path.suffix.lower()
    if suffix in JSONL_SUFFIXES:
        return OutputFormat.JSONL
    for each in OutputFormat:
        if suffix == f".{each.value}":
            return each
    known = ", ".join(f".{each.value}" for each in OutputFormat)
    raise RequestError(f"expected an output file that ends in {known}, got {path.name}; say what it is with --format")


@dataclass(frozen=True)
class TextItem:
    """One text to embed."""

    number: int
    """From 1, in its source."""
    text: str | list[int]
    """Or its token ids."""
    carried: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    """What stood beside it, as it was written there."""

    @property
    def size(self) -> int:
        """Characters, or tokens."""
        return len(self.text)


class TextSource(ABC):
    """Texts in order, as often as they are asked for."""

    @abstractmethod
    def __iter__(self) -> Iterator[TextItem]:
        """From the first on. Raises `RequestError` for what is no text, and says where."""

    @abstractmethod
    def place(self, number: int) -> str:
        """Where a text stands, for a person."""

    def count(self) -> int:
        """Reads everything once: raises `RequestError` for the first that is no text, or where there is none."""
        found = sum(1 for _ in self)
        if not found:
            raise RequestError(f"expected at least one text, got none: {self.place(0)} is empty")
        return found

    def slices(self, max_texts: int, max_size: int) -> Iterator[list[TextItem]]:
        """In order, so many at a time: at most `max_texts`, and no further one once `max_size` is reached."""
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
    """Texts that are there already."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __iter__(self) -> Iterator[TextItem]:
        return (TextItem(number, text) for number, text in enumerate(self._texts, 1))

    def place(self, number: int) -> str:
        return f"TEXT {number}" if number else "the command line"


LineReader: TypeAlias = Callable[[str], tuple[str | list[int], Mapping[str, msgspec.Raw]]]
"""A line's text or token ids, and what stood beside it. Raises `RequestError` for what is neither."""


class TextLines(TextSource):
    """The lines of a stream that can be read again. Its owner closes it."""

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
    """The stream itself where it can be read again, as a file can; else, as of a pipe, a copy on disk."""
    if stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as kept:
        shutil.copyfileobj(stream, kept)
        kept.seek(0)
        yield kept


def _decoded(line: bytes, *, is_first: bool) -> str:
    """Without the line's end, and without the mark that some editors put before the first."""
    content = line.removesuffix(b"\n").removesuffix(b"\r")
    if is_first:
        content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"expected UTF-8 text, got {error.reason} at byte {error.start + 1}") from error


def read_plain(line: str) -> tuple[str, Mapping[str, msgspec.Raw]]:
    """A line as it stands. An empty one is refused: it would be embedded, or missing in the results."""
    if not line.strip():
        raise RequestError('expected a text, got an empty line; remove it, or use JSONL, where "" is a text')
    return line, {}


class JsonReader:
    """Reads lines of JSONL."""

    def __init__(self, named_field: str | None, reserved: Collection[str]) -> None:
        """`named_field` asks for objects with the text there; None takes strings, lists of token ids, and objects with
        the text under "text". Fields beside it must not have the `reserved` names."""
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
                f"expected no field {taken[0]!r} beside the text, got one: the result has its own; rename it"
            )
        return text, fields


def _shown(line: str) -> str:
    return repr(line if len(line) <= 60 else line[:60] + "…")


Result: TypeAlias = tuple[TextItem, EmbeddingRequestOutput]
"""A text, and what became of it."""


class VectorWriter(ABC):
    """Writes the results of texts, a part at a time."""

    def __init__(self, file: BinaryIO, num_texts: int, dimension: int) -> None:
        self.file = file
        self.num_texts = num_texts
        self.dimension = dimension

    def start(self) -> None:
        """What comes before the first result."""
        return

    @abstractmethod
    def write(self, results: Sequence[Result]) -> None:
        """The next results, in order."""

    def finish(self) -> None:
        """What is known after the last result only."""
        return


class JsonlWriter(VectorWriter):
    """An object a line."""

    def write(self, results: Sequence[Result]) -> None:
        for item, output in results:
            values = (output.outputs.embedding, len(output.prompt_token_ids), output.num_truncated_tokens)
            line = {**item.carried, **dict(zip(OUTPUT_FIELDS, values, strict=True))}
            self.file.write(msgspec.json.encode(line) + b"\n")
        self.file.flush()


class NpyWriter(VectorWriter):
    """A matrix: the number of texts is known before the first vector, so that rows follow the header as they come."""

    def start(self) -> None:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self.num_texts, self.dimension)}
        np.lib.format.write_array_header_1_0(self.file, shape)

    def write(self, results: Sequence[Result]) -> None:
        self.file.write(_rows(results))


class SafetensorsWriter(VectorWriter):
    """Two tensors. The counts lie first, where they are aligned, and are filled in at the end."""

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
    """A file that takes the place of `path` when all of it is written; until then, and after any error, nothing does.

    It keeps the permissions of the file that it replaces. Raises `ConfigError` where it cannot be written.
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
    """A file whose faults are told apart from those of whoever writes."""

    def write(self, content: Buffer, /) -> int:
        with _writing(Path(str(self.name))):
            return super().write(content)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"expected to write {path}, got: {error.strerror or error}; no file was left") from error
