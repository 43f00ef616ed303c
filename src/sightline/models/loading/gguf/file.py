"""Reading of GGUF containers: header, metadata, tensor directory and raw tensor bytes.

Every count, length, offset and dimension comes from a file that may be truncated or hostile, so each is checked against
the actual size of the file before anything is allocated. Owns the container format only: it does not know what the
metadata means, what tensors are called elsewhere, nor how a quantised block is decoded.

    | magic, version, counts | metadata | tensor directory | padding | tensor data ... |
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from sightline.core.errors import CheckpointError
from sightline.models.loading.gguf.types import STORAGE_BY_CODE, StorageType

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT = 8
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1 << 10
MAX_KEY_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 1 << 24
MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ARRAY_ELEMENTS = 1 << 23
"""The limit for all arrays of a file together. The largest vocabularies have about a million tokens and merges.

Parsed values take up to 60 bytes each, so this bounds memory to about half a gigabyte whatever the file claims.
"""

_MIN_METADATA_BYTES = 8 + 4 + 1
"""The size of an empty key, a type and the smallest value."""
_MIN_DIRECTORY_BYTES = 8 + 4 + 8 + 4 + 8
"""The size of an empty name, a dimension count, one dimension, a type and an offset."""


_BOOL, _STRING, _ARRAY = 7, 8, 9
_VALUE_FORMATS = ("B", "b", "H", "h", "I", "i", "f", "B", None, None, "Q", "q", "d")
"""The `struct` format of each type of metadata values, by its code. Strings and arrays have none."""


@dataclass(frozen=True)
class GgufTensor:
    """One line of the tensor directory, already checked against the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch counts; the file stores the innermost first."""
    storage: StorageType
    start: int
    """Offset of the first byte from the start of the file."""
    num_bytes: int


class GgufFile:
    """A GGUF file, memory-mapped; `metadata` and `tensors` are parsed and checked when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        self.metadata, self.tensors = _HeaderParser(path, self._bytes).parse()

    def raw(self, tensor: GgufTensor) -> memoryview:
        """The tensor's bytes, not copied. Writes go to this process's private copy of the page."""
        return memoryview(self._bytes)[tensor.start : tensor.start + tensor.num_bytes]

    def release(self, tensor: GgufTensor) -> None:
        """Gives back the memory of the pages that hold only this tensor; the next read takes them from the file."""
        first = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (tensor.start + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform == "linux" and last > first:
            self._bytes.madvise(mmap.MADV_DONTNEED, first, last - first)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # Copy on write: torch warns about buffers it cannot write to, and nothing here writes.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"expected a readable, non-empty GGUF file at {path}, got: {error}") from error


class _HeaderParser:
    """A cursor over the header that cannot leave the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0
        self._elements_left = MAX_ARRAY_ELEMENTS

    def parse(self) -> tuple[Mapping[str, object], Mapping[str, GgufTensor]]:
        self._check_magic()
        num_tensors = self._count("tensors", MAX_TENSORS, _MIN_DIRECTORY_BYTES)
        num_keys = self._count("metadata keys", MAX_METADATA_KEYS, _MIN_METADATA_BYTES)
        self._need(num_tensors * _MIN_DIRECTORY_BYTES + num_keys * _MIN_METADATA_BYTES, "the header")
        metadata = self._parse_metadata(num_keys)
        alignment = self._alignment(metadata)
        directory = self._parse_directory(num_tensors, alignment)
        return MappingProxyType(metadata), MappingProxyType(directory)

    def fault(self, message: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {message} (at byte {self._position}). The file is damaged or not a GGUF file: get it again."
        )

    def _check_magic(self) -> None:
        found = self._data[:4]
        if found != MAGIC:
            raise self.fault(f"expected a GGUF file that starts with {MAGIC!r}, got {found!r}")
        self._position = 4
        version = self._number("I", "the version")
        if version in SUPPORTED_VERSIONS:
            return
        if version & 0xFFFF == 0:
            raise self.fault("expected a little-endian GGUF file, got a big-endian one; convert it on this machine")
        raise self.fault(f"expected GGUF version 2 or 3, got {version}; convert the model with a current tool")

    def _need(self, num_bytes: int, what: str) -> None:
        left = self._size - self._position
        if num_bytes > left:
            raise self.fault(f"expected {num_bytes} bytes for {what}, got {left} until the end of the file")

    def _number(self, format_code: str, what: str) -> int:
        layout = struct.Struct("<" + format_code)
        self._need(layout.size, what)
        (value,) = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return int(value)

    def _count(self, what: str, cap: int, bytes_each: int) -> int:
        count = self._number("Q", f"the number of {what}")
        possible = (self._size - self._position) // bytes_each
        if count > min(cap, possible):
            raise self.fault(f"expected at most {min(cap, possible)} {what}, got {count}")
        return count

    def _string(self, what: str, cap: int) -> str:
        length = self._number("Q", f"the length of {what}")
        if length > cap:
            raise self.fault(f"expected {what} of at most {cap} bytes, got {length}")
        self._need(length, what)
        start = self._position
        self._position += length
        return self._decode(start, self._position, what)

    def _decode(self, start: int, stop: int, what: str) -> str:
        try:
            return self._data[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fault(f"expected UTF-8 in {what}, got invalid bytes ({error.reason})") from error

    def _parse_metadata(self, num_keys: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            if key in metadata:
                raise self.fault(f"expected each metadata key once, got {key!r} twice")
            value_type = self._value_type(key)
            metadata[key] = self._array(key) if value_type == _ARRAY else self._value(value_type, key)
        return metadata

    def _value_type(self, key: str) -> int:
        code = self._number("I", f"the type of {key!r}")
        if code >= len(_VALUE_FORMATS):
            raise self.fault(f"expected a value type from 0 to {len(_VALUE_FORMATS) - 1} for {key!r}, got {code}")
        return code

    def _value(self, value_type: int, key: str) -> object:
        if value_type == _STRING:
            return self._string(f"the value of {key!r}", MAX_STRING_BYTES)
        return self._numbers(value_type, 1, key)[0]

    def _array(self, key: str) -> list[object]:
        element_type = self._value_type(key)
        if element_type == _ARRAY:
            raise self.fault(f"expected an array of plain values under {key!r}, got an array of arrays")
        length = self._number("Q", f"the length of {key!r}")
        if length > self._elements_left:
            raise self.fault(f"expected at most {MAX_ARRAY_ELEMENTS} array elements in all, got more at {key!r}")
        self._elements_left -= length
        if element_type == _STRING:
            return self._strings(length, key)
        return self._numbers(element_type, length, key)

    def _numbers(self, value_type: int, length: int, key: str) -> list[object]:
        layout = struct.Struct(f"<{length}{_VALUE_FORMATS[value_type]}")
        self._need(layout.size, f"the value of {key!r}")
        values: list[object] = list(layout.unpack_from(self._data, self._position))
        if value_type == _BOOL:
            if not set(values) <= {0, 1}:
                raise self.fault(f"expected booleans stored as 0 or 1 under {key!r}")
            values = [value == 1 for value in values]
        self._position += layout.size
        return values

    def _strings(self, length: int, key: str) -> list[object]:
        self._need(8 * length, f"the strings of {key!r}")
        read_length = struct.Struct("<Q").unpack_from
        data, size, position = self._data, self._size, self._position
        values: list[object] = []
        # Vocabularies have hundreds of thousands of strings: this loop is most of the time to open a file.
        for _ in range(length):
            start = position + 8
            position = start + read_length(data, position)[0] if start <= size else size + 1
            if position > size or position - start > MAX_STRING_BYTES:
                self._position = min(start, size)
                raise self.fault(f"expected {length} strings under {key!r}, got one that leaves the file")
            try:
                values.append(data[start:position].decode())
            except UnicodeDecodeError as error:
                self._position = start
                raise self.fault(f"expected UTF-8 strings under {key!r}, got {error.reason}") from error
        self._position = position
        return values

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(alignment, int) and MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT and alignment.bit_count() == 1:
            return alignment
        raise self.fault(
            f"expected general.alignment as a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}, "
            f"got {str(alignment)[:40]}"
        )

    def _parse_directory(self, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
        entries = [self._directory_entry() for _ in range(num_tensors)]
        data_start = -(-self._position // alignment) * alignment
        directory: dict[str, GgufTensor] = {}
        for name, shape, storage, offset in entries:
            if name in directory:
                raise self.fault(f"expected each tensor once, got {name!r} twice")
            if offset % alignment:
                raise self.fault(f"expected {name!r} at a multiple of {alignment}, got offset {offset}")
            num_bytes = math.prod(shape) // storage.block_elements * storage.block_bytes
            if data_start + offset + num_bytes > self._size:
                raise self.fault(
                    f"expected the {num_bytes} bytes of {name!r} inside the file, got the range "
                    f"{data_start + offset} to {data_start + offset + num_bytes} of {self._size}"
                )
            directory[name] = GgufTensor(name, shape, storage, data_start + offset, num_bytes)
        self._refuse_overlap(directory)
        return directory

    def _directory_entry(self) -> tuple[str, tuple[int, ...], StorageType, int]:
        name = self._string("a tensor name", MAX_NAME_BYTES)
        num_dimensions = self._number("I", f"the dimension count of {name!r}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.fault(f"expected 1 to {MAX_DIMENSIONS} dimensions for {name!r}, got {num_dimensions}")
        dimensions = [self._number("Q", f"a dimension of {name!r}") for _ in range(num_dimensions)]
        if min(dimensions) < 1 or math.prod(dimensions) > 1 << 62:
            raise self.fault(f"expected positive dimensions within the file for {name!r}, got {dimensions}")
        code = self._number("I", f"the type of {name!r}")
        storage = STORAGE_BY_CODE.get(code)
        if storage is None:
            raise self.fault(f"expected a known tensor type for {name!r}, got code {code}")
        if dimensions[0] % storage.block_elements:
            raise self.fault(
                f"expected rows of a multiple of {storage.block_elements} elements for {name!r} "
                f"({storage.name}), got {dimensions[0]}"
            )
        offset = self._number("Q", f"the offset of {name!r}")
        return name, tuple(reversed(dimensions)), storage, offset

    def _refuse_overlap(self, directory: Mapping[str, GgufTensor]) -> None:
        ordered = sorted(directory.values(), key=lambda tensor: tensor.start)
        for before, after in pairwise(ordered):
            if before.start + before.num_bytes > after.start:
                raise self.fault(f"expected tensors side by side, got {before.name!r} overlapping {after.name!r}")
