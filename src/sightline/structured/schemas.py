"""JSON schemas as llguidance gets them, so that no text that it admits breaks them.

llguidance holds some schemas loosely: it admits a name of a property with escapes that spell another one, days and
seconds that do not exist, and one name that counts twice. Here such a schema is written in other words, or refused.
Does not know tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from llguidance import LLMatcher

from sightline.core.errors import RequestError
from sightline.structured.intersections import check_intersections
from sightline.structured.keywords import check_keywords, listed, schemas_in, target_of

MAX_WHITESPACE = 64
"""The most spaces and line ends in a row between two tokens of JSON: without a limit a model may write nothing else."""
_WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
_ESCAPES = 'nrbtf\\"'
"""Escapes in strings; `u` is the other one that llguidance knows."""
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"(?:[0-9]{{4}}-(?:{_DAY})|{_LEAP_YEAR}-02-29)"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERNS: Mapping[str, str] = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""Formats of which llguidance admits days and leap seconds that do not exist. Leap seconds are left out."""
_CONTROL_IN_TEXT = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01][0-9a-f]|7f)")
_CONTROL_IN_PATTERN = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
    r"|\\(?:[av]|(?:x|u00|U0{6})(?:[01]|7[fF])|[xuU]\{0*(?:[01]?[\da-fA-F]|7[fF])\})"
)
_FAULTS: Mapping[str, str] = {
    "patternProperty": "patternProperties",
    "regex parse error": "pattern",
    "float range": "minimum or maximum",
    "Resource '": "$ref",
}
"""Keywords that llguidance's messages mean and do not name, by a part of the message."""


def schema_source(text: str) -> str:
    """A schema as llguidance reads it. Raises `RequestError` for what would be passed over or loosened."""
    schema = json.loads(text)
    check_keywords(schema)
    check_intersections(schema)
    if schema is False:
        raise RequestError("expected structured_outputs json that admits something, got the schema false")
    if schema is True:
        return any_source("{}")
    _check_references(schema)
    _check_counts(schema)
    # Without it, "\u0061" would be a free name beside the property "a".
    escapes = _ESCAPES if any(_has_free_names(each) for each, _ in schemas_in(schema)) else f"{_ESCAPES}u"
    if escapes == _ESCAPES:
        _check_control_characters(schema)
    return any_source(json.dumps(schema) if _hold_formats(schema) else text, escapes)


def any_source(schema: str, escapes: str = f"{_ESCAPES}u") -> str:
    """A schema as llguidance reads it, unchecked."""
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": escapes}
    )


def named_fault(told: str) -> str:
    """A message of llguidance with the keyword that it means."""
    return next((f"{keyword}: {told}" for part, keyword in _FAULTS.items() if part in told), told)


def _check_references(schema: object) -> None:
    """Refuses references to places where no keyword was checked, such as examples."""
    found = list(schemas_in(schema))
    checked = {id(each) for each, _ in found}
    for each, path in found:
        reference = each.get("$ref")
        if type(reference) is not str or not reference.startswith("#/"):
            continue
        match target_of(schema, reference):
            case Mapping() as target if id(target) not in checked:
                raise RequestError(
                    "expected references to schemas in structured_outputs, got the keyword '$ref'"
                    f"{f' at {path}' if path else ''} with {reference[:80]!r}, which is none; put it into $defs"
                )


def _check_counts(schema: object) -> None:
    """Refuses counts of properties that a name which is there twice would satisfy."""
    for each, path in schemas_in(schema):
        least, required = each.get("minProperties"), each.get("required")
        if type(least) is not int or not _has_open_names(each):
            continue
        if least > (len(required) if type(required) is list else 0) + 1:
            raise RequestError(
                "expected a schema in structured_outputs that can be held, got the keyword 'minProperties'"
                f"{f' at {path}' if path else ''} with names that are free and may come twice; name them in required"
            )


def _has_open_names(schema: Mapping[str, object]) -> bool:
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def _has_free_names(schema: Mapping[str, object]) -> bool:
    """True if properties with a schema of their own stand beside others."""
    named = any(schema.get(each) for each in ("properties", "patternProperties", "required"))
    return named and schema.get("additionalProperties") is not False


def _check_control_characters(schema: object) -> None:
    """Refuses what can be written with the escape `u` only, which llguidance would leave out of the text."""
    for each, path in schemas_in(schema):
        for keyword in _with_control_characters(each):
            raise RequestError(
                f"expected a schema in structured_outputs that can be held, got the keyword {keyword!r}"
                f"{f' at {path}' if path else ''} with a control character, beside an object whose properties are not "
                'all named; leave it out, or say "additionalProperties": false'
            )


def _with_control_characters(schema: Mapping[str, object]) -> Iterator[str]:
    """Keywords of a schema that name a character which JSON writes with the escape `u`."""
    yield from (name for name in ("const", "enum") if _CONTROL_IN_TEXT.search(json.dumps(schema.get(name))))
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if type(pattern) is str and _CONTROL_IN_PATTERN.search(pattern):
        yield "pattern"
    if type(named) is dict and any(_CONTROL_IN_PATTERN.search(each) for each in named):
        yield "patternProperties"


def _hold_formats(schema: object) -> bool:
    """Puts patterns in the place of formats that would be loosened. Returns true if there are any."""
    found = [each for each, _ in schemas_in(schema) if each.get("format") in _PATTERNS]
    for each in found:
        pattern = {"pattern": _PATTERNS[str(each.pop("format"))]}
        if "pattern" in each:
            each["allOf"] = [*listed(each.get("allOf")), pattern]
        else:
            each.update(pattern)
    return bool(found)
