"""Typed access to the key-value metadata of a GGUF file.

Checks that a value has the type that its reader needs. Does not know how the file is parsed, nor what the keys mean.
It is in this package because `text` is the lowest one that reads metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sightline.core.errors import CheckpointError


class GgufMetadata:
    """Metadata values by key. Raises `CheckpointError`, with the key, for a value of the wrong type."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys_under(self, prefix: str) -> list[str]:
        """Every key that starts with `prefix`, in file order."""
        return [key for key in self._values if key.startswith(prefix)]

    def raw(self, key: str) -> object:
        """The value as it was parsed, or None if the key is absent."""
        return self._values.get(key)

    def replaced(self, values: Mapping[str, object]) -> GgufMetadata:
        """A copy with other values for some keys."""
        return GgufMetadata({**self._values, **values})

    def integer(self, key: str) -> int | None:
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong_type(key, "an integer", value)
        return value

    def required_integer(self, key: str) -> int:
        value = self.integer(key)
        if value is None:
            raise _missing(key, "an integer")
        return value

    def number(self, key: str) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _wrong_type(key, "a finite number", value)
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self._values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise _wrong_type(key, "a boolean", value)

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise _wrong_type(key, "a string", value)

    def required_text(self, key: str) -> str:
        value = self.text(key)
        if value is None:
            raise _missing(key, "a string")
        return value

    def text_array(self, key: str) -> list[str] | None:
        return self._array(key, "an array of strings", str)

    def required_text_array(self, key: str) -> list[str]:
        value = self.text_array(key)
        if value is None:
            raise _missing(key, "an array of strings")
        return value

    def integer_array(self, key: str) -> list[int] | None:
        return self._array(key, "an array of integers", int)

    def number_array(self, key: str) -> list[float] | None:
        return self._array(key, "an array of numbers", int, float)

    def _array(self, key: str, expected: str, *kinds: type) -> list[Any] | None:
        value = self._values.get(key)
        if value is None or (isinstance(value, list) and set(map(type, value)) <= {*kinds}):
            return value
        raise _wrong_type(key, expected, value)


def _missing(key: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"GGUF metadata: expected {expected} under {key!r}, got no such key. Convert the model again."
    )


def _wrong_type(key: str, expected: str, value: object) -> CheckpointError:
    shown = f"an array of {len(value)}" if isinstance(value, Sequence) and not isinstance(value, str) else repr(value)
    return CheckpointError(
        f"GGUF metadata: expected {expected} under {key!r}, got {shown[:80]}. Convert the model again."
    )
