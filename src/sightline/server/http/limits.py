"""Limits on requests, each checked before the next stage does any work.

    bytes (while they arrive) ─▶ nesting ─▶ types and ranges ─▶ cost ─▶ work

Does not know routes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from sightline.server.http.errors import ApiError, invalid
from sightline.server.http.room import Room

MAX_DEPTH = 64
LOGPROB_COST = 4
"""The cost of one log probability, in tokens: it is computed, encoded and sent in addition to its token."""
COST_IN_CONTEXTS = 128
"""The default limit on a request's cost, in contexts of the model."""
MAX_CONTAINERS = 1 << 15
"""The most objects and arrays in one body."""
MAX_ADJUSTMENTS = 1 << 20
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
    """Bytes of the bodies of all open requests."""
    max_answer_bytes: int = 64 << 20
    """Bytes that desks and the engine process have sent for all requests that are not answered."""
    small_bytes: int = 4 << 10
    """What each request may hold beyond either limit, so that small requests go on while large ones take all room."""
    max_stored_responses: int = 4096
    """Responses that are kept for later requests; 0: none."""
    max_stored_bytes: int = 64 << 20
    """Memory of all of them."""
    body_seconds: float = 30.0
    """The most time for a whole body to arrive."""

    @property
    def max_kept_bytes(self) -> int:
        """Most bytes that are kept of one response: as much as can be sent again."""
        return min(self.max_body_bytes, self.max_stored_bytes) if self.max_stored_responses else 0


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


class StrayField(NamedTuple):
    """A field of a body that the body's type does not have."""

    path: str
    value: object
    siblings: tuple[str, ...]
    """The fields that its object may have."""
    owner: Mapping[str, object]
    """The object that it is in."""


def parse(
    body: bytes, kind: type[_T], prepare: Callable[[object], object] = lambda raw: raw
) -> tuple[_T, Iterator[StrayField]]:
    """Decodes a body as `kind`. Returns it with the fields that `kind` does not have.

    `prepare` turns short forms that `kind` does not have into long ones.
    """
    check_nesting(body)
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"expected a JSON body, got invalid JSON: {error}", code="invalid_json") from error
    raw = prepare(raw)
    try:
        parsed = msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _misfit(raw, kind, str(error)) from error
    return parsed, stray_fields(raw, kind)


def stray_fields(raw: object, kind: Any) -> Iterator[StrayField]:
    """The fields that the type does not have, wherever they are. Raises `ApiError` for an object without its tag, which
    msgspec misses only in a union."""
    pending: list[tuple[object, msgspec.inspect.Type, str]] = [(raw, _shape(kind), "")]
    while pending:
        value, shape, where = pending.pop()
        match shape, value:
            case msgspec.inspect.Metadata(type=described), _:
                pending.append((value, described, where))
            case msgspec.inspect.UnionType(types=types), _:
                pending += [(value, each, where) for each in types if _fits(value, each)]
            case msgspec.inspect.StructType(fields=fields), dict():
                named = {each.encode_name: each for each in fields}
                if shape.tag_field is not None and shape.tag_field not in value:
                    raise invalid(
                        f"{where}.{shape.tag_field}: expected {shape.tag!r}, got none".removeprefix("."),
                        f"{where}.{shape.tag_field}".removeprefix("."),
                    )
                for name, each in value.items():
                    if name not in named and name != shape.tag_field:
                        yield StrayField(f"{where}.{name}".removeprefix("."), each, tuple(named), value)
                pending += [
                    (value[name], each.type, f"{where}.{name}") for name, each in named.items() if name in value
                ]
            case msgspec.inspect.ListType(item_type=item), list() if _holds_structs(item):
                pending += [(each, item, f"{where}[]") for each in value]
            case _:
                pass


def check_cost(*, prompts: int, n: int, tokens: int, logprobs: int, most: int) -> None:
    """Raises `ApiError` if a request costs more than `most`. `tokens` bounds one continuation with its prompt."""
    cost = prompts * n * tokens * (1 + LOGPROB_COST * logprobs)
    if cost > most:
        raise invalid(
            f"expected a request that costs at most {most:,}, got {cost:,}: {prompts} prompts × n {n} × {tokens:,}"
            f" tokens × (1 + {LOGPROB_COST} × {logprobs} log probabilities); lower max_tokens, n or logprobs",
            code="cost_exceeded",
        )


def check_adjustments(sequences: int, sizes: Mapping[str, int]) -> None:
    """Raises `ApiError` if the parameters that every sequence keeps a copy of are too large, given the size of each."""
    kept = sequences * sum(sizes.values())
    if kept > MAX_ADJUSTMENTS:
        listed = " + ".join(f"{size:,} in {name}" for name, size in sizes.items() if size)
        raise invalid(
            f"expected at most {MAX_ADJUSTMENTS:,} tokens and characters of such parameters in all sequences, got "
            f"{kept:,}: {sequences} sequences × ({listed}); send fewer",
            max(sizes, key=lambda name: sizes[name]),
            "cost_exceeded",
        )


class ByteBudget:
    """Bytes that all open requests may hold, shared among callers."""

    def __init__(self, most: int, *, shared: bool, always: int = 0) -> None:
        """`always` bytes of each account are beside that."""
        self._room = Room(most, shared=shared)
        self._always = always
        self._open: set[HeldBytes] = set()

    @property
    def num_held(self) -> int:
        return self._room.num_held + sum(min(each.count, self._always) for each in self._open)

    @property
    def most(self) -> int:
        """The most that one caller may ever hold."""
        return self._room.most

    @contextmanager
    def opened(self, caller: str) -> Iterator[HeldBytes]:
        """An account for one request. What it holds is released at the end."""
        held = HeldBytes(self._room, caller, self._always)
        self._open.add(held)
        try:
            yield held
        finally:
            held.give_back(held.count)
            self._open.discard(held)


class HeldBytes:
    """The bytes that one request holds."""

    def __init__(self, room: Room, caller: str, always: int = 0) -> None:
        self._room = room
        self._caller = caller
        self._always = always
        self.count = 0

    def take(self, count: int) -> bool:
        """Holds more bytes; returns False, and holds nothing more, if there is no room for them."""
        more = self._beyond(self.count + count) - self._beyond(self.count)
        if more > 0 and more > self._room.left_for(self._caller):
            return False
        self._room.take(self._caller, more)
        self.count += count
        return True

    def give_back(self, count: int) -> None:
        self._room.give_back(self._caller, self._beyond(self.count) - self._beyond(self.count - count))
        self.count -= count

    def _beyond(self, count: int) -> int:
        return max(0, count - self._always)


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
        case msgspec.inspect.StructType(tag_field=tag_field, tag=tag):
            return isinstance(value, dict) and (tag_field is None or value.get(tag_field, tag) == tag)
        case msgspec.inspect.ListType():
            return isinstance(value, list)
        case _:
            return False


def shown_fields(unused: Sequence[str]) -> str:
    """The paths of unused fields, as a line."""
    return ", ".join(unused[:16]) + (f" and {len(unused) - 16} more" if len(unused) > 16 else "")


def _misfit(raw: object, kind: Any, said: str) -> ApiError:
    """The error for a field of the wrong type or range: where it is, what was expected, and what came."""
    match = _PLACE.match(said)
    what, path = (match["what"], match["path"] or "") if match is not None else (said, "")
    if values := _values(_shape(kind), re.findall(r"\.(\w+)", path)):
        what = f"expected {' or '.join(msgspec.json.encode(value).decode() for value in values)}"
    param = path.removeprefix(".").removesuffix("[...]") or None
    where = "" if param is None else f"{param}: "
    got = "" if ", got " in what else _got(raw, path)
    return invalid(f"{where}{what[:1].lower()}{what[1:]}{got}", param)


def _values(shape: msgspec.inspect.Type, names: Sequence[str]) -> list[object]:
    """The values of the field at a path of names, if its type lists them: msgspec's errors do not."""
    match shape:
        case msgspec.inspect.LiteralType(values=values) if not names:
            return list(values)
        case msgspec.inspect.Metadata(type=inner) | msgspec.inspect.ListType(item_type=inner):
            return _values(inner, names)
        case msgspec.inspect.UnionType(types=types):
            return [value for each in types for value in _values(each, names)]
        case msgspec.inspect.StructType(tag_field=str(tag_field), tag=tag) if names == [tag_field]:
            return [tag]
        case msgspec.inspect.StructType(fields=fields) if names:
            return [value for each in fields if each.encode_name == names[0] for value in _values(each.type, names[1:])]
        case _:
            return []


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
