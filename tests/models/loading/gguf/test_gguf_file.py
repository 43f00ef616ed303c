"""The GGUF container: what is written is read, and nothing that a file claims is believed unchecked."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from gguf import GGUFReader, GGUFWriter

from sightline.core.errors import CheckpointError, SightlineError
from sightline.core.ledger import Ledger
from sightline.models.loading.gguf.file import GgufFile
from sightline.models.loading.opening import open_checkpoint
from support.gguf_files import close, tiny_llama, write_llama

MEMORY_BOUND = 4 << 20


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def header(*, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def key_value(key: str, code: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", code) + value


def tensor(name: str, dimensions: list[int], code: int = 0, offset: int = 0) -> bytes:
    count = len(dimensions)
    return text(name) + struct.pack(f"<I{count}QIQ", count, *dimensions, code, offset)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A valid file with every kind of metadata value and two tensors."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"number.{kind}", 7)
    writer.add_float32("number.float32", 0.5)
    writer.add_float64("number.float64", 0.25)
    writer.add_bool("flag", True)
    writer.add_string("greeting", "héllo")
    writer.add_array("strings", ["a", "", "日本"])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    writer.add_tensor("first", numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
    writer.add_tensor("second", numpy.arange(4, dtype=numpy.float16))
    close(writer)
    return path


def test_metadata_and_tensors_equal_the_gguf_package(small: Path) -> None:
    reader = GGUFReader(small)
    ours = GgufFile(small)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == expected
    assert ours.metadata["flag"] is True
    for theirs in reader.tensors:
        mine = ours.tensors[theirs.name]
        assert mine.shape == tuple(reversed(theirs.shape.tolist()))
        assert bytes(ours.raw(mine)) == theirs.data.tobytes()


def test_version_two_is_read(small: Path) -> None:
    content = bytearray(small.read_bytes())
    content[4] = 2
    small.write_bytes(content)
    assert GgufFile(small).metadata["greeting"] == "héllo"


def test_a_file_cut_anywhere_in_its_header_is_a_checkpoint_error(small: Path) -> None:
    content = small.read_bytes()
    cut = small.with_name("cut.gguf")
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        if length < len(content) - 32:  # the writer pads the last tensor
            with pytest.raises(CheckpointError):
                GgufFile(cut)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_give_a_checkpoint_error_or_a_readable_file_in_little_memory(small: Path, seed: int) -> None:
    content = small.read_bytes()
    changed = small.with_name("changed.gguf")
    random_numbers = random.Random(seed)
    tracemalloc.start()
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(random_numbers.choice((1, 1, 2, 8))):
            damaged[random_numbers.randrange(len(damaged))] = random_numbers.choice((0, 1, 0x7F, 0x80, 0xFF))
        changed.write_bytes(damaged)
        try:
            file = GgufFile(changed)
        except CheckpointError:
            continue
        assert all(len(file.raw(tensor)) == tensor.num_bytes for tensor in file.tensors.values())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEMORY_BOUND


def test_a_damaged_model_gives_only_errors_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, tiny_llama(num_hidden_layers=1))
    content = path.read_bytes()
    header_size = GgufFile(path).tensors["token_embd.weight"].start
    random_numbers = random.Random(0)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(random_numbers.choice((1, 2, 4))):
            damaged[random_numbers.randrange(header_size)] = random_numbers.randrange(256)
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path, Ledger())
            checkpoint.load_tokenizer()
            for name in checkpoint.tensors:
                checkpoint.load(name)
        except SightlineError:
            continue


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "non-empty"),
        (b"GGML", "starts with b'GGUF'"),
        (b"GG", "starts with b'GGUF'"),
        (header(version=1), "version 2 or 3, got 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=1 << 60), "tensors"),
        (header(keys=1 << 60), "metadata keys"),
        (header(tensors=(1 << 17) + 1) + bytes(1 << 23), "at most 131072 tensors"),
        (header(keys=1) + struct.pack("<Q", 1 << 62) + bytes(64), "metadata key of at most"),
        (header(keys=1) + key_value("a", 99, bytes(8)), "value type from 0 to 12 for 'a', got 99"),
        (header(keys=1) + key_value("a", 8, struct.pack("<Q", 1 << 40)), "at most"),
        (header(keys=1) + key_value("a", 8, text(b"\xff\xfe")), "UTF-8"),
        (header(keys=1) + key_value("a", 7, b"\x02"), "booleans"),
        (header(keys=2) + 2 * key_value("a", 0, b"\x01"), "'a' twice"),
        (header(keys=1) + key_value("a", 9, struct.pack("<IQ", 0, 1 << 62)), "array elements"),
        (header(keys=1) + key_value("a", 9, struct.pack("<IQ", 5, 1 << 20)), "bytes for the value of 'a'"),
        (header(keys=1) + key_value("a", 9, struct.pack("<IQ", 8, 1 << 20)), "bytes for the strings of 'a'"),
        (header(keys=1) + key_value("a", 9, struct.pack("<IQQ", 8, 1, 1 << 62)), "leaves the file"),
        (header(keys=1) + key_value("a", 9, struct.pack("<IQ", 8, 1) + text(b"\xff")), "UTF-8 strings under 'a'"),
        (header(keys=1) + key_value("a", 9, struct.pack("<IQ", 9, 1) + bytes(64)), "array of arrays"),
        (header(keys=1) + key_value("general.alignment", 4, struct.pack("<I", 0)), "power of two"),
        (header(keys=1) + key_value("general.alignment", 4, struct.pack("<I", 24)), "power of two"),
        (header(keys=1) + key_value("general.alignment", 4, struct.pack("<I", 4)), "power of two"),
        (header(keys=1) + key_value("general.alignment", 4, struct.pack("<I", 1 << 31)), "power of two"),
        (header(keys=1) + key_value("general.alignment", 8, text("32")), "power of two"),
        (header(tensors=1) + tensor("t", []) + bytes(64), "1 to 4 dimensions for 't', got 0"),
        (header(tensors=1) + tensor("t", [1] * 5) + bytes(64), "1 to 4 dimensions for 't', got 5"),
        (header(tensors=1) + tensor("t", [4, 0]) + bytes(64), "positive dimensions"),
        (header(tensors=1) + tensor("t", [1 << 32, 1 << 32, 1 << 32]) + bytes(64), "dimensions"),
        (header(tensors=1) + tensor("t", [1 << 40]) + bytes(64), "inside the file"),
        (header(tensors=1) + tensor("t", [4], offset=1 << 60) + bytes(64), "inside the file"),
        (header(tensors=1) + tensor("t", [4], offset=4) + bytes(64), "multiple of 32"),
        (header(tensors=1) + tensor("t", [4], code=77) + bytes(64), "code 77"),
        (header(tensors=1) + tensor("t", [33], code=2) + bytes(64), "multiple of 32 elements"),
        (header(tensors=1) + tensor("n" * 2000, [4]) + bytes(64), "tensor name of at most"),
        (header(tensors=2) + 2 * tensor("t", [4]) + bytes(64), "'t' twice"),
        (header(tensors=2) + tensor("a", [16]) + tensor("b", [4], offset=32) + bytes(128), "overlapping"),
    ],
)
def test_lying_headers_are_refused_before_anything_is_allocated(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEMORY_BOUND


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_what_cannot_be_opened_is_a_checkpoint_error(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "nothing.gguf")
    with pytest.raises(CheckpointError, match="readable"):
        GgufFile(tmp_path / "nothing.gguf")
