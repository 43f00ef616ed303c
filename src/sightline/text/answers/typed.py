"""Arguments that models write as bare text, as JSON: the tool's schema says of which type each is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Values as Python writes them, which some models do."""
MAX_BRANCHES = 32
MAX_DEPTH = 32


class BrokenValueError(ValueError):
    """A value that is not written as its format says."""


def properties_of(schema: str) -> Mapping[str, object]:
    """The schemas of a tool's arguments, by name."""
    match json.loads(schema):
        case {"properties": dict(properties)}:
            return properties
        case _:
            return {}


def typed_json(text: str, schema: object) -> str:
    """The JSON text of a bare value. What is none of the types that the schema allows becomes a string."""
    types = _types(schema)
    if types == {"string"}:
        return _string(text)
    stripped = _WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(stripped, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _string(text)
    return stripped if not types or _type_of(value) & types else _string(text)


def _types(schema: object, depth: int = 0) -> set[str]:
    """The types that a schema names; empty: any."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    match schema.get("type"):
        case str(name):
            return {name}
        case list(names):
            return {str(name) for name in names}
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return set().union(*(_type_of(value) for value in values))
    found: set[str] = set()
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        for branch in branches[:MAX_BRANCHES] if isinstance(branches, list) else ():
            found |= _types(branch, depth + 1)
    return found


def _type_of(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case Mapping():
            return {"object"}
        case _:
            return {"array"}


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def braced_json(text: str, quote: str, schema: object = None) -> str:
    """The JSON text of a value with bare keys and quotation marks of its own. Raises `BrokenValueError`."""
    reader = _Braced(text, quote)
    found = reader.value(schema, 0)
    if reader.rest.strip():
        raise BrokenValueError(f"expected the end of a value, got {reader.rest[:40]!r}")
    return found


class _Braced:
    """Reads one value from the front of a text."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._place = 0

    @property
    def rest(self) -> str:
        return self._text[self._place :]

    def value(self, schema: object, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise BrokenValueError(f"expected a value nested at most {MAX_DEPTH} deep, got more")
        self._skip_space()
        if self._takes(self._quote):
            return _string(self._until_quote())
        if self._takes("{"):
            return "{" + ",".join(self._items("}", lambda: self._pair(schema, depth))) + "}"
        if self._takes("["):
            return "[" + ",".join(self._items("]", lambda: self.value(None, depth + 1))) + "]"
        return typed_json(self._bare(",]}").strip(), schema)

    def _pair(self, schema: object, depth: int) -> str:
        self._skip_space()
        key = self._until_quote() if self._takes(self._quote) else self._bare(":,]}").strip()
        self._skip_space()
        if not key or not self._takes(":"):
            raise BrokenValueError(f"expected a key and a colon, got {self.rest[:40]!r}")
        within = schema.get("properties") if isinstance(schema, Mapping) else None
        inner = within.get(key) if isinstance(within, Mapping) else None
        return f"{_string(key)}:{self.value(inner, depth + 1)}"

    def _items(self, close: str, read: Callable[[], str]) -> list[str]:
        found: list[str] = []
        self._skip_space()
        while not self._takes(close):
            if found and not self._takes(","):
                raise BrokenValueError(f"expected a comma or {close}, got {self.rest[:40]!r}")
            found.append(read())
            self._skip_space()
        return found

    def _until_quote(self) -> str:
        end = self._text.find(self._quote, self._place)
        if end < 0:
            raise BrokenValueError("expected a closing quotation mark, got the end")
        found, self._place = self._text[self._place : end], end + len(self._quote)
        return found

    def _bare(self, ends: str) -> str:
        start = self._place
        while self._place < len(self._text) and self._text[self._place] not in ends:
            self._place += 1
        return self._text[start : self._place]

    def _takes(self, what: str) -> bool:
        if not self._text.startswith(what, self._place):
            return False
        self._place += len(what)
        return True

    def _skip_space(self) -> None:
        while self._place < len(self._text) and self._text[self._place].isspace():
            self._place += 1
