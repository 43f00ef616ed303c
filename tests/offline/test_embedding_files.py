"""Texts out of files and vectors into files, without a model."""

from __future__ import annotations

import io
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from sightline.core.embedding import EmbeddingOutput, EmbeddingRequestOutput
from sightline.core.errors import ConfigError, RequestError
from sightline.offline.embedding_files import (
    OUTPUT_FIELDS,
    WRITERS,
    GivenTexts,
    InputFormat,
    JsonReader,
    LineReader,
    OutputFormat,
    Result,
    TextItem,
    TextLines,
    input_format_of,
    output_format_of,
    read_plain,
    rereadable,
    whole_file,
)


def lines(content: bytes, read: LineReader = read_plain) -> TextLines:
    return TextLines(io.BytesIO(content), "some.txt", read)


def json_lines(content: str, named_field: str | None = None) -> TextLines:
    return lines(content.encode(), JsonReader(named_field, OUTPUT_FIELDS))


def texts(source: TextLines) -> list[str | list[int]]:
    return [item.text for item in source]


def test_plain_lines_are_texts_as_they_stand_whatever_ends_them() -> None:
    source = lines("\ufeffone\r\n two \nthr\u2028ee".encode())
    assert texts(source) == ["one", " two ", "thr\u2028ee"]
    assert source.count() == 3


def test_a_source_can_be_read_again_from_where_it_began() -> None:
    stream = io.BytesIO(b"read before\na\nb\n")
    stream.readline()
    source = TextLines(stream, "some.txt", read_plain)
    assert texts(source) == texts(source) == ["a", "b"]


def test_a_pipe_is_kept_so_that_it_can_be_read_again() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a\nb\n")
    os.close(writing)
    with open(reading, "rb") as pipe, rereadable(pipe) as stream:
        source = TextLines(stream, "standard input", read_plain)
        assert texts(source) == texts(source) == ["a", "b"]


def test_a_line_of_json_is_a_string_a_list_of_ids_or_an_object() -> None:
    source = json_lines('"a \\u00e9\\n"\n[1, 2]\n{"id": 7, "text": "b"}\n{"text": [3], "z": [1.10, 1e999, null]}\n""\n')
    assert texts(source) == ["a é\n", [1, 2], "b", [3], ""]
    carried = [{name: bytes(raw) for name, raw in item.carried.items()} for item in source]
    assert carried[2:4] == [{"id": b"7"}, {"z": b"[1.10, 1e999, null]"}]


def test_a_named_field_asks_for_objects_that_have_it() -> None:
    [item] = json_lines('{"text": 1, "body": "b"}', "body")
    assert (item.text, dict(item.carried)) == ("b", {"text": msgspec.Raw(b"1")})
    with pytest.raises(RequestError, match=r"line 1: expected a JSON object .* under 'body', got '\"b\"'"):
        json_lines('"b"', "body").count()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "got an empty line"),
        ("  ", "got an empty line"),
        ("{", "Input data was truncated"),
        ("plain words", "got 'plain words': JSON is malformed"),
        ('{"id": 1}', "under 'text', a JSON string or a list of token ids, got an object with 'id'"),
        ("{}", "got an object with no fields"),
        ('{"text": 5}', "Expected `str | array`, got `int`"),
        ('{"text": null}', "Expected `str | array`, got `null`"),
        ('{"text": ["a"]}', "Expected `int`, got `str`"),
        ("[1, -2]", "Expected `int` >= 0"),
        ("[1, true]", "Expected `int`, got `bool`"),
        ("[1, 2.5]", "Expected `int`, got `float`"),
        ("[]", "Expected `array` of length >= 1"),
        ("5", "got '5'"),
        ('{"text": "a", "x": NaN}', "malformed"),
        ('{"text": "a", "text": "b"}', "every field of an object once, got one twice"),
        ('{"text": "a", "embedding": []}', "no field 'embedding' beside the text, got one"),
        ('"\\ud800"', "got '\"\\\\\\\\ud800\"'"),
        ("[" * 100_000, "got '\\["),
        ('"a" "b"', "trailing characters"),
    ],
)
def test_a_bad_line_of_json_is_named_with_what_was_expected(line: str, message: str) -> None:
    with pytest.raises(RequestError, match=r"some.txt, line 2: expected .*" + message.replace("|", r"\|")):
        json_lines(f'"good"\n{line}\n"good"\n').count()


def test_a_bad_plain_line_is_named() -> None:
    with pytest.raises(RequestError, match="line 3: expected a text, got an empty line"):
        lines(b"a\nb\n\nc\n").count()
    with pytest.raises(RequestError, match="line 2: expected UTF-8 text, got invalid start byte at byte 2"):
        lines(b"a\nb\xff\n").count()


def test_nothing_to_read_is_an_error() -> None:
    with pytest.raises(RequestError, match=r"expected at least one text, got none: some\.txt is empty"):
        lines(b"").count()


def test_slices_keep_the_order_and_end_at_either_bound() -> None:
    source = GivenTexts(["a", "b", "cccccc", "d", "e", "f", "g"])
    sliced = [[item.text for item in part] for part in source.slices(3, 6)]
    assert sliced == [["a", "b", "cccccc"], ["d", "e", "f"], ["g"]]
    assert [len(part) for part in source.slices(3, 1)] == [1] * 7
    assert [item.number for part in source.slices(2, 100) for item in part] == [1, 2, 3, 4, 5, 6, 7]


def test_suffixes_say_what_files_are() -> None:
    kinds = [input_format_of(name) for name in ("a.jsonl", "a.NDJSON", "a.txt", "a")]
    assert kinds == [InputFormat.JSONL, InputFormat.JSONL, InputFormat.TEXT, InputFormat.TEXT]
    forms = [output_format_of(Path(name)) for name in ("a.jsonl", "a.npy", "a.SAFETENSORS")]
    assert forms == [OutputFormat.JSONL, OutputFormat.NPY, OutputFormat.SAFETENSORS]
    with pytest.raises(RequestError, match=r"expected plain text or \.jsonl, got a\.json"):
        input_format_of("a.json")
    with pytest.raises(RequestError, match=r"ends in \.jsonl, \.npy, \.safetensors, got a\.csv"):
        output_format_of(Path("a.csv"))


def results(count: int, dimension: int) -> list[Result]:
    vectors = np.random.default_rng(0).standard_normal((count, dimension)).astype(np.float32)
    return [
        (
            TextItem(index + 1, "x", {"id": msgspec.Raw(str(index).encode())}),
            EmbeddingRequestOutput("r", "x", tuple(range(index + 2)), EmbeddingOutput(vector.tolist()), 0, index),
        )
        for index, vector in enumerate(vectors)
    ]


def written(form: OutputFormat, given: list[Result], dimension: int, path: Path) -> Path:
    with whole_file(path) as file:
        writer = WRITERS[form](file, len(given), dimension)
        writer.start()
        for start in range(0, len(given), 2):
            writer.write(given[start : start + 2])
        writer.finish()
    return path


def test_every_form_reads_back_as_what_was_written(tmp_path: Path) -> None:
    given = results(5, 3)
    expected = np.array([output.outputs.embedding for _, output in given], dtype=np.float32)
    matrix = np.load(written(OutputFormat.NPY, given, 3, tmp_path / "v.npy"))
    assert matrix.dtype == np.float32
    np.testing.assert_array_equal(matrix, expected)
    tensors = load_file(written(OutputFormat.SAFETENSORS, given, 3, tmp_path / "v.safetensors"))
    np.testing.assert_array_equal(tensors["embeddings"], expected)
    assert tensors["num_tokens"].tolist() == [2, 3, 4, 5, 6]
    with safe_open(tmp_path / "v.safetensors", "numpy") as file:
        assert (sorted(file.keys()), file.metadata()) == (["embeddings", "num_tokens"], None)
    objects = [
        json.loads(line) for line in written(OutputFormat.JSONL, given, 3, tmp_path / "v").read_text().splitlines()
    ]
    np.testing.assert_array_equal([each["embedding"] for each in objects], expected)
    assert [(each["id"], each["num_tokens"], each["num_truncated_tokens"]) for each in objects] == [
        (index, index + 2, index) for index in range(5)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v", "v.npy", "v.safetensors"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RequestError])
def test_a_file_is_whole_or_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "v.npy"

    def interrupted() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            file.flush()
            assert len(list(tmp_path.glob(".sightline-*.part"))) == 1
            raise error

    with pytest.raises(error):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"before")
    with pytest.raises(error):
        interrupted()
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("v.npy", b"before")]


def test_a_file_that_is_replaced_keeps_its_permissions_and_its_links(tmp_path: Path) -> None:
    path, link = tmp_path / "v.npy", tmp_path / "link"
    path.write_bytes(b"before")
    path.chmod(0o640)
    link.symlink_to(path)
    with whole_file(link) as file:
        file.write(b"after")
        assert path.read_bytes() == b"before"
    assert (path.read_bytes(), path.stat().st_mode & 0o777, link.is_symlink()) == (b"after", 0o640, True)


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_room_is_a_clear_error_that_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with no_file_above(1000), whole_file(tmp_path / "v.npy") as file:
            file.write(bytes(4000))

    with pytest.raises(ConfigError, match=r"expected to write .*, got: File too large; no file was left"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="expected a regular file to write"), whole_file(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo()
