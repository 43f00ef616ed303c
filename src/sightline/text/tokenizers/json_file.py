"""Reads the JSON files that describe a model.

Limits their size and nesting, refuses what parsers read differently (a key with two values, NaN) and what Python can
hold but nothing else can (numbers beyond any float, lone surrogates), and raises `CheckpointError` for every fault.
Does not know what the files mean.
"""

from __future__ import annotations

import json
from pathlib import Path

from sightline.core.errors import CheckpointError

MAX_JSON_BYTES = 1 << 26
"""A limit that is larger than any index or tokenizer config. Vocabularies are read by the `tokenizers` library."""
MAX_DEPTH = 32
"""The most objects and lists around a value. Configs have a few; deeper ones would exhaust Python's stack later."""
MAX_NUMBER = 1e300
"""Far above any number of a config: tokenizers state 1e30 for "no limit". Larger integers do not fit a float."""


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """The UTF-8 text of a file of at most `max_bytes`."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # a ValueError for a name that no file can have
        raise CheckpointError(f"expected a readable file at {str(path)[:200]!r}, got: {str(error)[:200]}.") from error
    if len(content) > max_bytes:
        raise CheckpointError(f"expected {path} to have at most {max_bytes} bytes, got more. Get the file again.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"expected UTF-8 text in {path}, got {error}. Get the file again.") from error


def read_json(path: Path) -> object:
    """The value at the top of a JSON file."""
    text = read_text(path)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        _check(value, MAX_DEPTH)
        return value
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"expected valid JSON in {path}, got: {error}. Get the file again.") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object from its pairs. Raises `ValueError` for a key with two values: Python's parser would drop the first."""
    found = dict(pairs)
    for key, value in pairs if len(found) < len(pairs) else ():
        if found[key] != value:
            raise ValueError(f"the key {key!r} with two values, {str(value)[:40]} and {str(found[key])[:40]}")
    return found


def _check(value: object, depth: int) -> None:
    """Raises `ValueError` for a value that other code could not handle, at any depth."""
    match value:
        case str():
            value.encode()
        case int() | float():
            if not -MAX_NUMBER < value < MAX_NUMBER:
                raise ValueError(f"a number beyond {MAX_NUMBER:g}")
        case dict() | list():
            if depth == 0:
                raise ValueError(f"more than {MAX_DEPTH} objects and lists inside each other")
            for each in value:
                _check(each, depth - 1)
            for each in value.values() if isinstance(value, dict) else ():
                _check(each, depth - 1)


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant}, which JSON does not have")


def read_json_object(path: Path) -> dict[str, object]:
    """The object at the top of a JSON file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"expected a JSON object in {path}, got {type(value).__name__}. Get the file again.")
    return value
