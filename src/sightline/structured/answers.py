"""Grammars of whole answers: reasoning, then text or calls of which the arguments satisfy their schemas.

    reasoning?  ( rule of the text | text  call  call ... )

Written in llguidance's Lark, with a grammar of its own for each schema. A marker that is a special token is that token;
free text never spells out a marker, so that a reader of the text sees no call which the grammar does not. Does not know
how grammars are compiled or followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat

from sightline.core.answer_format import AnswerReading, CallFormat, CallSyntax, ChannelFormat, HeldAnswer
from sightline.core.conversation import Tool, ToolMode
from sightline.core.errors import RequestError
from sightline.core.structured import MAX_HELD_CHARACTERS, StructuredOutputs
from sightline.structured.vocabulary import Vocabulary

Source = Callable[[StructuredOutputs], str]
"""A rule as llguidance reads it. Raises `RequestError` for what would be passed over."""
_ANY_OBJECT = StructuredOutputs(json_object=True)
_SPACE = "SPACE"
_UNHELD_SYNTAX = (CallSyntax.TAGGED, CallSyntax.BRACED)


def answer_source(held: HeldAnswer, vocabulary: Vocabulary, source: Source) -> str:
    """The grammar of an answer, as llguidance reads it. Raises `RequestError` if its format cannot be held, or if its
    schemas are too long together."""
    writer = _Writer(held, vocabulary, source)
    channels = held.reading.format.channels
    writer.rules["start"] = writer.marked() if channels is None else writer.channelled(channels)
    return writer.whole()


class _Writer:
    """Writes the grammar of one answer."""

    def __init__(self, held: HeldAnswer, vocabulary: Vocabulary, source: Source) -> None:
        self._held = held
        self._reading: AnswerReading = held.reading
        self._vocabulary = vocabulary
        self._source = source
        self._grammars: list[Mapping[str, object]] = []
        self._num_left = MAX_HELD_CHARACTERS - _num_strict(held)
        """How many characters the schemas of tools that are not strict may have."""
        self.rules: dict[str, str] = {"start": "", _SPACE: r"/[ \n]{1,4}/"}
        special = sorted(vocabulary.special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else None

    def whole(self) -> str:
        lark = "\n".join(f"{name}: {rule}" for name, rule in self.rules.items())
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]})

    def marked(self) -> str:
        """An answer whose parts are between markers."""
        reading, parts = self._reading, list[str]()
        if (reasoning := reading.format.reasoning) is not None:
            closed = f"{self._until('thought', reasoning.close, reading.reasoning_budget)} {_SPACE}?"
            opened = f"{_SPACE}? {self._literal(reasoning.open.strip())} {closed}"
            parts.append(closed if reading.in_reasoning else f"({opened})?")
        return " ".join([*parts, f"({self._body()})"])

    def _body(self) -> str:
        reading, structured = self._reading, self._held.structured
        if reading.mode is ToolMode.NONE or not reading.tools:
            return self._anything() if structured is None else self._rule(structured)
        if not self._held.holds_calls:
            return self._anything()
        form = _held_format(reading)
        if reading.mode is ToolMode.REQUIRED:
            return self._calls(form)
        if structured is not None:
            return f"{self._rule(structured)} | {self._calls(form)}"
        return self._text_then(form)

    def _text_then(self, form: CallFormat) -> str:
        opens = next((each for each in (form.section_open, form.open) if each), None)
        if opens is None:
            # Calls without a marker stand alone: other text must not begin as they do.
            self.rules["PLAIN"] = r"/\s*[^{\s](?s:.*)/"
            return f"PLAIN? | {self._calls(form)}"
        markers = tuple(each.split()[0] for each in (form.section_open, form.open) if each)
        text = self._free("text", markers)
        if self._is_special(markers[0]):
            return f"{text} ({self._calls(form)})?"
        # Made of ordinary tokens: the text before it ends where it is whole.
        _, marker, rest = opens.partition(markers[0])
        self.rules[f"before_call[suffix={json.dumps(marker)}]"] = "/(?s:.*)/"
        return f"{text} (before_call {self._calls(form, rest)})?"

    def _calls(self, form: CallFormat, rest: str | None = None) -> str:
        """The calls of an answer. `rest`: what is left of their opening, if its beginning was read."""
        if form.syntax in _UNHELD_SYNTAX:
            raise _unheld(form, "its arguments are not written as JSON")
        arguments = [self._arguments(number, tool) for number, tool in enumerate(self._reading.tools)]
        first = self._a_call("a_call", form, arguments)
        between = self._literal(form.separator) if form.separator.strip() else f"{_SPACE}?"
        more = f" ({between} a_call)*" if self._reading.parallel_calls else ""
        if form.section_open:
            opened = self._literal(form.section_open if rest is None else rest)
            return f"{opened} {first}{more} {self._literal(form.section_close)}"
        if rest is not None:
            first = self._a_call("first_call", replace(form, open=rest), arguments)
        return f"{first}{more}"

    def _a_call(self, name: str, form: CallFormat, arguments: Sequence[str]) -> str:
        """A rule for a call of any tool; returns its name."""
        calls = map(self._call, repeat(form), self._reading.tools, arguments)
        self.rules[name] = " | ".join(f"({call})" for call in calls)
        return name

    def _call(self, form: CallFormat, tool: Tool, arguments: str) -> str:
        if form.syntax is CallSyntax.OBJECT:
            head = f"{{{json.dumps(form.name_key)}: {json.dumps(tool.name)}, {json.dumps(form.arguments_key)}: "
            return f"{self._literal(form.open + head)} {arguments} {self._literal('}' + form.close)}"
        head = self._literal(form.open + form.before_name + tool.name + (":" if form.is_id else ""))
        number = " /0|[1-9][0-9]{0,2}/" if form.is_id else ""
        end = f" {self._literal(form.close)}" if form.close else ""
        return f"{head}{number} {self._literal(form.after_name)} {arguments}{end}"

    def _arguments(self, number: int, tool: Tool) -> str:
        """The arguments of a tool. Those of a strict one satisfy its schema, or it is refused; those of another one do
        where an answer must call it and its schema can be held."""
        is_held = tool.strict or (self._reading.mode is ToolMode.REQUIRED and len(tool.schema) <= self._num_left)
        self._num_left -= len(tool.schema) if is_held and not tool.strict else 0
        rule = StructuredOutputs(json=tool.schema) if is_held else _ANY_OBJECT
        try:
            return self._rule(rule, f"arguments_{number}", must_be_object=is_held)
        except RequestError as error:
            if tool.strict:
                told = str(error).replace(" in structured_outputs", "")
                raise RequestError(f"tools: {tool.name!r} with strict true cannot be held: {told}") from error
            return self._rule(_ANY_OBJECT, f"arguments_{number}")

    def _rule(self, rule: StructuredOutputs, name: str = "answer", *, must_be_object: bool = False) -> str:
        """A grammar of its own for a rule; returns the reference to it."""
        source = self._source(rule)
        if must_be_object:
            source = self._checked_object(rule, source)
        grammar = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
        self._grammars.append({key: value for key, value in grammar.items() if value is not None} | {"name": name})
        return f"@{name}"

    def _checked_object(self, rule: StructuredOutputs, source: str) -> str:
        schema = json.loads(rule.source)
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            raise RequestError('expected a schema of arguments with "type": "object", got another')
        if (fault := self._vocabulary.fault(source)) is not None:
            raise RequestError(fault)
        return source

    def channelled(self, form: ChannelFormat) -> str:
        """An answer made of messages with headers."""
        reading, structured = self._reading, self._held.structured
        # A header within free text would begin another message, and with it a call that no schema holds.
        markers = (form.start, form.channel, form.message, *form.ends)
        thought = self._until("thought", form.ends[0], reading.reasoning_budget, markers)
        thought = f"{thought} {self._literal(form.start + form.role)}"
        self.rules["reasoning"] = f"({self._literal(form.channel + form.reasoning + form.message)} {thought})"
        before = "reasoning?" if reading.reasoning_budget is not None else "reasoning*"
        if reading.in_reasoning:
            before = thought if reading.reasoning_budget is not None else f"{thought} {before}"
        final = self._literal(f"{form.channel}final{form.message}")
        said = self._rule(structured) if structured is not None else self._free("text", markers)
        ways = [] if reading.mode is ToolMode.REQUIRED else [f"{final} {said}"]
        for number, tool in enumerate(reading.tools if self._held.calls_tools else ()):
            recipient = f"{form.channel}commentary {form.recipient}{form.namespace}{tool.name}"
            head = f"{recipient} {form.content_type}json{form.message}"
            ways.append(f"{self._literal(head)} {self._arguments(number, tool)}")
        return f"{before} ({' | '.join(ways)})"

    def _until(self, name: str, marker: str, most: int | None, without: Sequence[str] = ()) -> str:
        """Free text and the marker that ends it. The text does not spell out other markers either."""
        stripped = marker.strip()
        if self._is_special(stripped):
            kept_out = without or (stripped,)
            free = self._free(name, kept_out) if most is None else self._few_tokens(kept_out, most)
            return f"{free} {self._literal(stripped)}".strip()
        if most is not None:
            raise RequestError(
                f"thinking_token_budget is not supported for this model: {stripped!r} is no token of its vocabulary"
            )
        others = [each for each in without if each != marker]
        self.rules[f"{name}[suffix={json.dumps(stripped)}]"] = " & ".join(["/(?s:.*)/", *_without(others)])
        return name

    def _few_tokens(self, markers: Sequence[str], most: int) -> str:
        """At most some tokens that neither begin a marker nor end the answer."""
        begun = {self._vocabulary.special[self._pieces(each)[0]] for each in markers if self._is_special(each)}
        kept_out = begun | self._vocabulary.ends
        return f"<[^{','.join(map(str, sorted(kept_out)))}]>{{0,{most}}}" if most else ""

    def _free(self, name: str, without: Sequence[str]) -> str:
        """Free text that does not spell out some markers."""
        terminal = name.upper()
        self.rules[terminal] = " & ".join(["/(?s:.+)/", *_without(without)])
        special = {self._vocabulary.special[self._pieces(marker)[0]] for marker in without if self._is_special(marker)}
        others = set(self._vocabulary.special.values()) - self._vocabulary.ends - special
        self.rules[name] = f"{terminal}? ({_tokens(others)} {terminal}?)*" if others else f"{terminal}?"
        return name

    def _anything(self) -> str:
        ends = sorted(self._vocabulary.ends)
        return f"<[^{','.join(map(str, ends))}]>*"

    def _literal(self, text: str) -> str:
        """A text as Lark has it: special tokens by number, the rest in quotation marks."""
        special = self._vocabulary.special
        return " ".join(f"<[{special[each]}]>" if each in special else json.dumps(each) for each in self._pieces(text))

    def _pieces(self, text: str) -> list[str]:
        return [text] if self._split is None else [each for each in self._split.split(text) if each]

    def _is_special(self, marker: str) -> bool:
        return self._pieces(marker)[0] in self._vocabulary.special


def _num_strict(held: HeldAnswer) -> int:
    """The characters of the schemas that an answer must satisfy. Raises `RequestError` for too many."""
    count = sum(len(tool.schema) for tool in held.reading.tools if tool.strict)
    if held.structured is not None:
        count += len(held.structured.source)
    if count > MAX_HELD_CHARACTERS:
        raise RequestError(
            f"expected tools with strict true and a response format of at most {MAX_HELD_CHARACTERS:,} characters "
            f"together, got {count:,}; send fewer tools, or shorten their schemas"
        )
    return count


def _held_format(reading: AnswerReading) -> CallFormat:
    if reading.format.calls is None:
        raise RequestError("expected a model that calls tools, got one without a format of calls")
    return reading.format.calls


def _unheld(form: CallFormat, why: str) -> RequestError:
    return RequestError(
        f"tool_choice required or named, strict tools and response_format with tools are not supported with the format "
        f"{form.name}: {why}; send tool_choice auto and tools that are not strict"
    )


def _tokens(ids: set[int]) -> str:
    """A set of tokens as Lark has it, with neighbours as ranges."""
    ranges: list[list[int]] = []
    for token in sorted(ids):
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return "<[" + ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges) + "]>"


def _without(markers: Sequence[str]) -> list[str]:
    """Text without markers, as a part of an intersection in Lark; empty if there are none."""
    return [f"~/(?s:.*(?:{'|'.join(map(_escaped, markers))}).*)/"] if markers else []


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
