"""Reads the `response_template` of a checkpoint, in which transformers declares how a model's answers are parsed.

Knows regions with literal delimiters, and calls that are JSON objects in such regions, or have their name in the
delimiter that opens them. A template with other regions for calls or reasoning is refused with the reason, so that
nothing is read differently from what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sightline.core.answer_format import AnswerFormat, CallFormat, CallSyntax, ReasoningFormat
from sightline.core.errors import CheckpointError
from sightline.text.answers.formats import CALL_FORMATS
from sightline.text.answers.markers import match_marker

NAME = "response_template"
_VERSION = 1
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_CALL_FIELDS = ("tool_calls",)
_SYNTAXES: Mapping[str, tuple[CallSyntax, ...]] = MappingProxyType(
    {
        "json": (CallSyntax.OBJECT, CallSyntax.NAMED, CallSyntax.BRACED),
        "xml-inline": (CallSyntax.TAGGED,),
        "kv-lines": (CallSyntax.TAGGED,),
    }
)
"""Syntaxes of calls whose content transformers parses so."""


def read_response_template(declared: Mapping[str, object]) -> AnswerFormat:
    """The format that a template declares. Raises `CheckpointError` for one that is not understood."""
    fields = declared.get("fields")
    if declared.get("version", _VERSION) != _VERSION or not isinstance(fields, Mapping):
        raise CheckpointError(f"{NAME}: expected version {_VERSION} with fields, got another")
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    calls = next((fields[name] for name in _CALL_FIELDS if name in fields), None)
    return AnswerFormat(
        None if reasoning is None else ReasoningFormat(NAME, *_delimiters(reasoning)),
        None if calls is None else _calls(calls),
    )


def _calls(field: object) -> CallFormat:
    """The row of the table that has the declared delimiters."""
    opens, closes = _delimiters(field)
    content = field.get("content", "text") if isinstance(field, Mapping) else "text"
    found = [
        row
        for row in CALL_FORMATS.values()
        if row.syntax in _SYNTAXES.get(str(content), ()) and _has_delimiters(row, opens, closes)
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"{NAME}: expected one known format of calls with {content!r} between {opens!r} and {closes!r}, got "
            f"{len(found)}"
        )
    return found[0]


def _has_delimiters(row: CallFormat, opens: str, closes: str) -> bool:
    pairs = (row.section_open, row.section_close), (row.open, row.close)
    return any(first and last and _same(opens, first) and _same(closes, last) for first, last in pairs)


def _delimiters(field: object) -> tuple[str, str]:
    match field:
        case {"open": str(opens) | [str(opens)], "close": str(closes) | [str(closes)]}:
            return opens, closes
    raise CheckpointError(f"{NAME}: expected one literal delimiter at each end of calls and reasoning, got others")


def _same(declared: str, marker: str) -> bool:
    """True if two delimiters differ at most in white space."""
    return match_marker(declared.strip(), 0, marker) == len(declared.strip())
