"""Reads the JSON files that describe a model.

Limits their size, refuses what parsers read differently (a key with two values, NaN), and raises `CheckpointError` for
every fault. Does not know what the files mean.
"""

from __future__ import annotations

import json
from pathlib import Path

from sightline.core.errors import CheckpointError

MAX_JSON_BYTES = 1 << 26
"""A limit that is larger than any index or tokenizer config. Vocabularies are read by the `tokenizers` library."""


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """The UTF-8 text of a file of at most `max_bytes`."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"expected a readable file at {path}, got: {error.strerror}.") from error
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
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"expected valid JSON in {path}, got: {error}. Get the file again.") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object from its pairs. Raises `ValueError` for a key with two values: Python's parser would drop the first."""
    found = dict(pairs)
    for key, value in pairs if len(found) < len(pairs) else ():
        if found[key] != value:
            raise ValueError(f"the key {key!r} with two values, {str(value)[:40]} and {str(found[key])[:40]}")
    return found


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant}, which JSON does not have")


def read_json_object(path: Path) -> dict[str, object]:
    """The object at the top of a JSON file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"expected a JSON object in {path}, got {type(value).__name__}. Get the file again.")
    return value
