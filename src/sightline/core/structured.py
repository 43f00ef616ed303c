"""Structured outputs: what the text of an answer must be.

Owns the value, its bounds and the names of its kinds. Does not know grammars or tokens: `structured/` compiles them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from sightline.core.errors import RequestError
from sightline.core.words import answer_unknown

MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_HELD_CHARACTERS = 1 << 18
"""The most characters of all schemas that one answer is held to: its own, and those of its tools."""
MAX_SCHEMA_DEPTH = 64
"""The most objects and arrays of JSON within each other in a schema."""
MAX_REGEX_CHARACTERS = 1 << 12
MAX_GRAMMAR_CHARACTERS = 1 << 14
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1 << 14
"""The most characters of all choices together."""


class OutputKind(StrEnum):
    """The kinds of rules for an answer. The values are the names of the fields."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True)
class StructuredOutputs:
    """A rule that the text of an answer satisfies. Exactly one field is given."""

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, or its text. Kept as text without spaces."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: Sequence[str] | None = None
    """The texts of which the answer is one. Kept as a tuple."""
    grammar: str | None = None
    """A context-free grammar in the Lark syntax of llguidance."""

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            names = ", ".join(OutputKind)
            raise RequestError(
                f"expected exactly one of {names} in structured_outputs, got {', '.join(given) or 'none'}"
            )
        match given[0]:
            case OutputKind.JSON:
                object.__setattr__(self, "json", _schema_text(self.json))
            case OutputKind.JSON_OBJECT if self.json_object is not True:
                raise RequestError(f"expected structured_outputs json_object True or False, got {self.json_object!r}")
            case OutputKind.REGEX:
                _check_text("regex", self.regex, MAX_REGEX_CHARACTERS)
            case OutputKind.CHOICE:
                object.__setattr__(self, "choice", _checked_choice(self.choice))
            case OutputKind.GRAMMAR:
                _check_text("grammar", self.grammar, MAX_GRAMMAR_CHARACTERS)

    def _given(self) -> list[OutputKind]:
        """The fields that are given. The schema `false` is one."""
        values = {
            OutputKind.JSON: self.json,
            OutputKind.JSON_OBJECT: None if self.json_object is False else self.json_object,
            OutputKind.REGEX: self.regex,
            OutputKind.CHOICE: self.choice,
            OutputKind.GRAMMAR: self.grammar,
        }
        return [kind for kind, value in values.items() if value is not None]

    @property
    def kind(self) -> OutputKind:
        """The field that is given."""
        return self._given()[0]

    @property
    def source(self) -> str:
        """The text of the schema, the regular expression or the grammar; empty for the other kinds."""
        return {OutputKind.JSON: str(self.json), OutputKind.REGEX: self.regex, OutputKind.GRAMMAR: self.grammar}.get(
            self.kind
        ) or ""


def read_structured_outputs(value: object) -> StructuredOutputs | None:
    """The value, made from a mapping of its fields if it is one. Raises `RequestError`."""
    match value:
        case None | StructuredOutputs():
            return value
        case Mapping():
            known = [each.name for each in fields(StructuredOutputs)]
            for name in value:
                if name not in known:
                    raise RequestError(answer_unknown(str(name), known, "a field of structured_outputs", {}))
            return StructuredOutputs(**value)
        case _:
            raise RequestError(f"expected structured_outputs with one of {', '.join(OutputKind)}, got {value!r}")


def _schema_text(schema: object) -> str:
    """A schema's text, so that equal schemas are equal. The order of properties stays: answers follow it."""
    value, text = _nested_json(schema, "a JSON schema in structured_outputs json")
    if not isinstance(value, Mapping | bool):
        raise RequestError(f"expected a JSON schema in structured_outputs json, an object, got {text[:40]}")
    _check_length("json", len(text), MAX_SCHEMA_CHARACTERS)
    return text


def parameters_text(parameters: object, tool: str) -> str:
    """The schema of a tool's arguments as text. Raises `RequestError` for what is no JSON, or is nested too deep."""
    return _nested_json(parameters, f"parameters of the tool {tool[:40]!r} as a JSON schema")[1]


def _nested_json(given: object, what: str) -> tuple[object, str]:
    """A value and its JSON text, if it is nested within bounds."""
    try:
        value = json.loads(given, parse_constant=_no_number) if isinstance(given, str) else given
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError as error:
        raise _too_deep(what) from error
    except (ValueError, TypeError) as error:
        raise RequestError(f"expected {what}, got invalid JSON: {error}") from error
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        containers = [each for each in level if isinstance(each, Mapping | list | tuple)]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, Mapping) else each)]
        if not containers:
            return value, text
    raise _too_deep(what)


def _too_deep(what: str) -> RequestError:
    return RequestError(f"expected {what} nested at most {MAX_SCHEMA_DEPTH} deep, got more; use $defs and $ref")


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _check_text(name: str, text: object, most: int) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"expected structured_outputs {name} to be text of at least one character, got {text!r}")
    _check_length(name, len(text), most)
    _check_unicode(name, text)


def _check_length(name: str, length: int, most: int) -> None:
    if length > most:
        raise RequestError(
            f"expected structured_outputs {name} of at most {most:,} characters, got {length:,}; shorten it"
        )


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"expected valid Unicode in structured_outputs {name}, got a lone surrogate") from error


def _checked_choice(choice: object) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not all(isinstance(each, str) for each in choice):
        raise RequestError(f"expected structured_outputs choice to be a list of texts, got {choice!r}")
    if not choice or "" in choice:
        raise RequestError("expected structured_outputs choice with texts of at least one character, got an empty one")
    if len(choice) > MAX_CHOICES:
        raise RequestError(f"expected structured_outputs choice of at most {MAX_CHOICES} texts, got {len(choice)}")
    _check_length("choice", sum(map(len, choice)), MAX_CHOICE_CHARACTERS)
    for each in choice:
        _check_unicode("choice", each)
    return tuple(choice)
