"""One call in text that arrives in pieces: its name, then its arguments as JSON text.

    text ─▶ CallReader ─┬─ begin: name and id, once both are known
                        ├─ say: a piece of the arguments' JSON text
                        └─ state: OPEN, WHOLE, or BROKEN at a character that the syntax does not allow

Each syntax has a reader. Arguments that are JSON go on as they are; others are written as JSON, value by value. Does
not know what stands around calls.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType

from sightline.core.answer_format import CallFormat, CallSyntax
from sightline.core.conversation import Tool
from sightline.text.answers.json_text import WHITE_SPACE, JsonScanner
from sightline.text.answers.markers import MAX_SPACE, find_marker
from sightline.text.answers.typed import BrokenValueError, braced_json, properties_of, typed_json

MAX_NAME = 320
"""The most characters of a name and what stands around it."""


class CallState(Enum):
    """How far a call has come."""

    OPEN = auto()
    WHOLE = auto()
    BROKEN = auto()


class CallReader(ABC):
    """Reads one call."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Tool]) -> None:
        self._form = form
        self._tools = tools
        self._said: list[str] = []
        self.name: str | None = None
        """None until it is known."""
        self.call_id = ""
        """The id that the model wrote, if it wrote one."""
        self.state = CallState.OPEN

    @abstractmethod
    def feed(self, text: str) -> int:
        """Takes text. Returns how many characters were taken; the others are needed again with more text, or belong to
        what follows the call."""

    @property
    def untold(self) -> str:
        """What was taken of an argument that is not whole, and so is not told, once the name is known."""
        return ""

    def take_said(self) -> str:
        """The arguments' text since the last call. Only once the name is known."""
        said, self._said = "".join(self._said), []
        return said

    def _name(self, header: str) -> None:
        """Takes the name, with what stands beside it. The call is broken if no tool has it."""
        name, _, call_id = header.strip().partition(self._form.id_mark) if self._form.id_mark else (header, "", "")
        name, call_id = name.strip(), call_id.strip()
        if self._form.is_id:
            name, call_id = name.rpartition(":")[0], name
        before = "".join(self._form.before_name.split())
        name = name.removeprefix(before)
        if name in self._tools:
            self.name, self.call_id = name, call_id
        else:
            self.state = CallState.BROKEN

    def _header(self, text: str, ends: tuple[str, ...]) -> int | None:
        """Looks for what ends the name. Returns the place behind it, or None if more is needed."""
        found = find_marker(text, ends)
        if found.start > MAX_NAME:
            self.state = CallState.BROKEN
        if found.marker is None or self.state is CallState.BROKEN:
            return None
        self._name(text[: found.start])
        return found.end if self.state is CallState.OPEN else None


class _Named(CallReader):
    """The name, a marker, and a JSON object."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Tool]) -> None:
        super().__init__(form, tools)
        self._arguments = JsonScanner(first="{")
        self._has_begun = False

    def feed(self, text: str) -> int:
        start = 0
        if self.name is None:
            end = self._header(text, (self._form.after_name,))
            if end is None:
                return 0
            start = end
        return self._object(text, start)

    def _object(self, text: str, start: int) -> int:
        place = self._arguments.feed(text, start)
        piece = text[start:place] if self._has_begun else text[start:place].lstrip()
        self._has_begun = self._has_begun or bool(piece)
        self._said.append(piece)
        if self._arguments.is_done:
            self.state = CallState.WHOLE
        elif self._arguments.is_broken:
            self.state = CallState.BROKEN
        return place


class _Object(CallReader):
    """A JSON object with the name and the arguments."""

    _KEYS_BOUND = 64

    def __init__(self, form: CallFormat, tools: Mapping[str, Tool]) -> None:
        super().__init__(form, tools)
        self._expects = "{"
        self._key = ""
        self._part: list[str] = []
        self._part_length = 0
        self._value = JsonScanner()
        self._seen: set[str] = set()

    def feed(self, text: str) -> int:
        place = 0
        while place < len(text) and self.state is CallState.OPEN:
            if self._expects in ("key", "value"):
                place = self._in_value(text, place)
            elif text[place] in WHITE_SPACE:
                place += 1
            elif self._moves(text[place]):
                # A key's quotation mark is taken with the key.
                place += text[place] != '"'
            else:
                self.state = CallState.BROKEN
        return place

    def _moves(self, letter: str) -> bool:
        """Takes a character between keys and values. Returns False if it is wrong there."""
        match self._expects, letter:
            case "{", "{":
                self._expects = "first key"
            case (("first key" | "next key"), '"'):
                self._begin("key", '"')
            case ("first key", "}") | (",", "}"):
                self._end()
            case ",", ",":
                self._expects = "next key"
            case ":", ":":
                self._begin("value", self._firsts())
            case _:
                return False
        return True

    def _firsts(self) -> str:
        """With what the value of the key may begin."""
        return {self._form.name_key: '"', self._form.arguments_key: "{"}.get(self._key, "")

    def _begin(self, what: str, first: str) -> None:
        self._expects, self._part, self._part_length = what, [], 0
        self._value = JsonScanner(first=first)

    def _in_value(self, text: str, start: int) -> int:
        place = self._value.feed(text, start)
        piece = text[start:place]
        is_arguments = self._expects == "value" and self._key == self._form.arguments_key
        if is_arguments:
            self._said.append(piece if self._part_length else piece.lstrip())
            self._part_length += len(self._said[-1])
        else:
            self._part.append(piece)
            self._part_length += len(piece)
        is_short = self._expects == "key" or self._key == self._form.name_key
        if self._value.is_broken or (is_short and self._part_length > MAX_NAME):
            self.state = CallState.BROKEN
        elif self._value.is_done:
            self._take_part()
        return place

    def _take_part(self) -> None:
        """Takes a whole key or value."""
        if self._expects == "value":
            if self._key == self._form.name_key:
                self._name(json.loads("".join(self._part)))
            self._expects = ","
            return
        self._key = json.loads("".join(self._part))
        # A key that comes twice says two things.
        if self._key in self._seen or len(self._seen) > self._KEYS_BOUND:
            self.state = CallState.BROKEN
        self._seen.add(self._key)
        self._expects = ":"

    def _end(self) -> None:
        if self.name is None:
            self.state = CallState.BROKEN
            return
        if self._form.arguments_key not in self._seen:
            self._said.append("{}")
        self.state = CallState.WHOLE


class _Tagged(CallReader):
    """The name, and each argument's key and value between tags."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Tool]) -> None:
        super().__init__(form, tools)
        self._properties: Mapping[str, object] = {}
        self._expects = "name"
        self._key = ""
        self._value: list[str] = []
        self._seen: set[str] = set()
        self._untold: list[str] = []

    @property
    def untold(self) -> str:
        return "".join(self._untold)

    def feed(self, text: str) -> int:
        place = 0
        while self.state is CallState.OPEN:
            is_name, num_said = self._expects == "name", len(self._said)
            taken = self._step(text[place:])
            if taken is None:
                break
            if is_name or len(self._said) > num_said:
                self._untold = []
            else:
                self._untold.append(text[place : place + taken])
            place += taken
        return place

    def _step(self, text: str) -> int | None:
        """Takes one tag. Returns the number of characters that were taken; None if more text is needed."""
        form = self._form
        match self._expects:
            case "name":
                return self._take_name(text)
            case "argument":
                return self._take_tag(text)
            case "key":
                found = find_marker(text, (form.key_close,))
                self._break_if(found.start > MAX_NAME)
                if found.marker is None or self.state is CallState.BROKEN:
                    return None
                self._key = text[: found.start].strip()
                self._break_if(not self._key or self._key in self._seen)
                self._seen.add(self._key)
                self._expects = "value tag" if form.value_open else "value"
                return found.end
            case "value tag":
                return self._take_only(text, form.value_open, "value")
            case _:
                return self._take_value(text)

    def _take_name(self, text: str) -> int | None:
        form = self._form
        if form.after_name:
            end = self._header(text, (form.after_name,))
            taken = end
        else:
            # The name ends where its first argument, or the end of the call, begins.
            found = find_marker(text, (form.key_open, form.close))
            end = self._header(text, (form.key_open, form.close))
            taken = None if end is None else found.start
        if taken is not None and self.name is not None:
            self._properties = properties_of(self._tools[self.name].schema)
            self._expects = "argument"
        return taken

    def _take_tag(self, text: str) -> int | None:
        """Takes what begins an argument, or sees what ends the call, which is left."""
        stripped = text.lstrip()
        found = find_marker(stripped, (self._form.key_open, self._form.close))
        self._break_if(found.start > 0 or len(text) - len(stripped) > MAX_SPACE)
        if found.marker is None or self.state is CallState.BROKEN:
            return None
        if found.marker == self._form.close:
            self._said.append("}" if self._seen else "{}")
            self.state = CallState.WHOLE
            return None
        self._expects = "key"
        return len(text) - len(stripped) + found.end

    def _take_only(self, text: str, marker: str, then: str) -> int | None:
        stripped = text.lstrip()
        found = find_marker(stripped, (marker,))
        self._break_if(found.start > 0 or len(text) - len(stripped) > MAX_SPACE)
        if found.marker is None or self.state is CallState.BROKEN:
            return None
        self._expects, self._value = then, []
        return len(text) - len(stripped) + found.end

    def _take_value(self, text: str) -> int | None:
        found = find_marker(text, (self._form.value_close,))
        self._value.append(text[: found.start])
        if found.marker is None:
            # The beginning of a marker, if there is one, is needed again.
            return found.start or None
        whole, self._value = "".join(self._value), []
        if not self._form.value_open:
            whole = whole.removeprefix("\n").removesuffix("\n")
        value = typed_json(whole, self._properties.get(self._key))
        self._said.append(
            f"{'{' if len(self._seen) == 1 else ', '}{json.dumps(self._key, ensure_ascii=False)}: {value}"
        )
        self._expects = "argument"
        return found.end

    def _break_if(self, is_broken: bool) -> None:
        if is_broken:
            self.state = CallState.BROKEN


class _Braced(CallReader):
    """The name, and arguments in braces with quotation marks of their own."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Tool]) -> None:
        super().__init__(form, tools)
        self._properties: Mapping[str, object] = {}
        self._has_header = False
        self._item: list[str] = []
        self._depth = 0
        self._is_quoted = False
        self._seen: set[str] = set()

    @property
    def untold(self) -> str:
        return "" if self.name is None else "".join(self._item)

    def feed(self, text: str) -> int:
        place = 0
        if not self._has_header:
            end = self._header(text, (self._form.after_name,))
            if end is None:
                return 0
            place, self._has_header = end, True
            self._properties = properties_of(self._tools[self.name or ""].schema)
        while self.state is CallState.OPEN:
            found = find_marker(text[place:], self._stops())
            self._item.append(text[place : place + found.start])
            if found.marker is None:
                return place + found.start
            place += found.end
            self._take(found.marker)
        return place

    def _stops(self) -> tuple[str, ...]:
        return (self._form.quote,) if self._is_quoted else (self._form.quote, "{", "}", "[", "]", ",")

    def _take(self, mark: str) -> None:
        if mark == self._form.quote:
            self._is_quoted = not self._is_quoted
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]" and self._depth:
            self._depth -= 1
        elif not self._depth:
            if mark == "]" or not self._says_item(is_last=mark == "}"):
                self._item.append(mark)
                self.state = CallState.BROKEN
            return
        self._item.append(mark)

    def _says_item(self, *, is_last: bool) -> bool:
        """Tells a whole argument. Returns False if it is none."""
        whole = "".join(self._item)
        if not whole.strip() and is_last and not self._seen:
            self._said.append("{}")
            self.state = CallState.WHOLE
            return True
        key, colon, value = whole.partition(":")
        key = key.strip().removeprefix(self._form.quote).removesuffix(self._form.quote)
        try:
            written = braced_json(value, self._form.quote, self._properties.get(key))
        except BrokenValueError:
            return False
        if not key or not colon or key in self._seen:
            return False
        self._item = []
        self._said.append(f"{', ' if self._seen else '{'}{json.dumps(key, ensure_ascii=False)}: {written}")
        self._seen.add(key)
        if is_last:
            self._said.append("}")
            self.state = CallState.WHOLE
        return True


READERS: Mapping[CallSyntax, Callable[[CallFormat, Mapping[str, Tool]], CallReader]] = MappingProxyType(
    {
        CallSyntax.OBJECT: _Object,
        CallSyntax.NAMED: _Named,
        CallSyntax.TAGGED: _Tagged,
        CallSyntax.BRACED: _Braced,
    }
)
"""The reader of each syntax."""
