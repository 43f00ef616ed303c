"""Limits on requests, each checked before the next stage does any work.

    bytes (while they arrive) ─▶ nesting ─▶ types and ranges ─▶ cost ─▶ work

Does not know routes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import msgspec

from sightline.server.http.errors import ApiError, invalid, unavailable
from sightline.server.http.room import Room

MAX_DEPTH = 64
LOGPROB_COST = 4
"""The cost of one log probability, in tokens: it is computed, encoded and sent in addition to its token."""
COST_IN_CONTEXTS = 128
"""The default limit on a request's cost, in contexts of the model."""
MAX_CONTAINERS = 1 << 15
"""The most objects and arrays in one body."""
MAX_ADJUSTMENTS = 1 << 20
MAX_NAMED_FIELDS = 64
MAX_SHOWN_BYTES = 40
"""The longest wrong value that an error message repeats."""
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""An unterminated string matches up to the end of the body: restarting at each quote would take quadratic time."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Limits:
    """Limits on one request, and on all requests together."""

    max_body_bytes: int = 4 << 20
    max_cost: int | None = None
    """Limit on prompts × n × tokens × (1 + 4 × log probabilities) of one request; None: 128 contexts."""
    max_held_bytes: int = 64 << 20
    """Bytes of the bodies of all open requests; a parsed body can take eight times its bytes."""
    body_seconds: float = 30.0
    """The most time for a whole body to arrive."""


def check_nesting(body: bytes) -> None:
    """Raises `ApiError` for JSON that is nested too deep or has too many containers. Takes linear time."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise invalid(f"expected at most {MAX_CONTAINERS} objects and arrays in a body, got more")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise invalid(f"expected JSON nested at most {MAX_DEPTH} deep, got more; send a flatter body")


def parse(body: bytes, kind: type[_T]) -> tuple[_T, list[str]]:
    """Decodes a body as `kind`. Returns it with the names of fields that `kind` does not have."""
    check_nesting(body)
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"expected a JSON body, got invalid JSON: {error}", code="invalid_json") from error
    try:
        parsed = msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _misfit(raw, str(error)) from error
    return parsed, sorted(unused_fields(raw, kind))


def unused_fields(raw: object, kind: Any) -> set[str]:
    """Paths of fields that the type does not have; if there are many, only some of them."""
    found: set[str] = set()
    pending: list[tuple[object, msgspec.inspect.Type, str]] = [(raw, _shape(kind), "")]
    while pending and len(found) < MAX_NAMED_FIELDS:
        value, shape, where = pending.pop()
        match shape, value:
            case msgspec.inspect.Metadata(type=described), _:
                pending.append((value, described, where))
            case msgspec.inspect.UnionType(types=types), _:
                pending += [(value, each, where) for each in types if _fits(value, each)]
            case msgspec.inspect.StructType(fields=fields), dict():
                named = {each.encode_name: each for each in fields}
                unknown = (name for name in value if name not in named)
                found |= {_shown_name(f"{where}.{name}") for name in islice(unknown, MAX_NAMED_FIELDS)}
                pending += [
                    (value[name], each.type, f"{where}.{name}") for name, each in named.items() if name in value
                ]
            case msgspec.inspect.ListType(item_type=item), list() if _holds_structs(item):
                pending += [(each, item, f"{where}[]") for each in value]
            case _:
                pass
    return found


def check_cost(*, prompts: int, n: int, tokens: int, logprobs: int, most: int) -> None:
    """Raises `ApiError` if a request costs more than `most`. `tokens` bounds one continuation with its prompt."""
    cost = prompts * n * tokens * (1 + LOGPROB_COST * logprobs)
    if cost > most:
        raise invalid(
            f"expected a request that costs at most {most:,}, got {cost:,}: {prompts} prompts × n {n} × {tokens:,}"
            f" tokens × (1 + {LOGPROB_COST} × {logprobs} log probabilities); lower max_tokens, n or logprobs",
            code="cost_exceeded",
        )


def check_adjustments(*, sequences: int, biases: int, stop_characters: int) -> None:
    """Raises `ApiError` if the parameters that every sequence keeps a copy of are too large in total."""
    kept = sequences * (biases + stop_characters)
    if kept > MAX_ADJUSTMENTS:
        raise invalid(
            f"expected at most {MAX_ADJUSTMENTS:,} logit biases and stop characters in all sequences, got {kept:,}: "
            f"{sequences} sequences × ({biases} biases + {stop_characters} characters of stop strings); send fewer",
            "logit_bias" if biases > stop_characters else "stop",
            "cost_exceeded",
        )


class BodyBudget:
    """Counts the bytes of the bodies of all open requests."""

    def __init__(self, most: int, *, shared: bool) -> None:
        self._room = Room(most, shared=shared)

    @contextmanager
    def held(self, caller: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that reserves a number of bytes, or raises `ApiError`. All are released at the end."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if count > self._room.left_for(caller):
                raise unavailable("too many bodies are being read; try again", 1)
            self._room.take(caller, count)
            taken += count

        try:
            yield take
        finally:
            self._room.give_back(caller, taken)


def _holds_structs(shape: msgspec.inspect.Type) -> bool:
    match shape:
        case msgspec.inspect.StructType():
            return True
        case msgspec.inspect.Metadata(type=described):
            return _holds_structs(described)
        case msgspec.inspect.UnionType(types=types):
            return any(_holds_structs(each) for each in types)
        case _:
            return False


@cache
def _shape(kind: Any) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(kind)


def _fits(value: object, shape: msgspec.inspect.Type) -> bool:
    match shape:
        case msgspec.inspect.Metadata(type=described):
            return _fits(value, described)
        case msgspec.inspect.StructType():
            return isinstance(value, dict)
        case msgspec.inspect.ListType():
            return isinstance(value, list)
        case _:
            return False


def _shown_name(path: str) -> str:
    """A field's path, restricted to characters that are safe in a header."""
    return re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", path.removeprefix("."))[:64]


def _misfit(raw: object, said: str) -> ApiError:
    """The error for a field of the wrong type or range: where it is, what was expected, and what came."""
    match = _PLACE.match(said)
    what, path = (match["what"], match["path"] or "") if match is not None else (said, "")
    param = path.removeprefix(".").removesuffix("[...]") or None
    where = "" if param is None else f"{param}: "
    got = "" if ", got " in what else _got(raw, path)
    return invalid(f"{where}{what[:1].lower()}{what[1:]}{got}", param)


def _got(raw: object, path: str) -> str:
    """The words ", got VALUE" for the value at a path; empty if there is none or it is long."""
    value = raw
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        match value:
            case dict() if name in value:
                value = value[name]
            case list() if index and int(index) < len(value):
                value = value[int(index)]
            case _:
                return ""
    shown = b"" if isinstance(value, dict | list) else msgspec.json.encode(value)
    return f", got {shown.decode()}" if 0 < len(shown) <= MAX_SHOWN_BYTES and "[...]" not in path else ""
