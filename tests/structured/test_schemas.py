"""Schemas that llguidance would hold loosely are written in other words, or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sightline.core.errors import RequestError
from sightline.core.structured import StructuredOutputs
from sightline.structured.compiler import GrammarCompiler
from sightline.structured.schemas import schema_source
from support.answer_checks import byte_tokenizer, byte_vocabulary
from support.structured import Schema, holds

OPEN: Schema = {"type": "object", "properties": {"bar": {"type": "integer"}}}
DAY: Schema = {"type": "string", "format": "date", "pattern": "^2", "allOf": [{"pattern": "9$"}]}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_vocabulary)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("schema", "text", "is_held"),
    [
        (OPEN, '{"bar":1,"baz":"x"}', True),
        (OPEN, r'{"\u0062ar":"x"}', False),
        ({"required": ["bar"], "patternProperties": {"^é": {"type": "null"}}}, r'{"bar":1,"\u00e9":2}', False),
        ({"properties": {"a\x7f": {"type": "null"}}}, r'{"a\u007f":1}', False),
        ({**OPEN, "additionalProperties": False}, '{"bar":1}', True),
        (DAY, '"2020-02-29"', True),
        (DAY, '"2021-02-29"', False),
        (DAY, '"2021-02-28"', False),
        ({"format": "date-time"}, '"2000-02-29t23:59:59.5z"', True),
        ({"format": "date-time"}, '"1900-02-29T00:00:00Z"', False),
        ({"properties": {"format": {"const": "date"}}}, '{"format":"date"}', True),
    ],
)
def test_a_text_is_admitted_if_its_schema_allows_it(
    compiler: GrammarCompiler, schema: Schema, text: str, is_held: bool
) -> None:
    assert holds(text, schema) is is_held
    tokens = byte_tokenizer().encode_text(text)
    matcher = compiler.prepare(StructuredOutputs(json=schema)).result().matcher()
    assert (matcher.num_admitted(tokens) == len(tokens)) is is_held


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("minProperties", '{"minProperties": 3, "required": ["a"]}'),
        ("const", r'{"properties": {"a": {"const": ["\\\u0001"]}}}'),
        ("pattern", r'{"required": ["a"], "items": {"pattern": "a\\x01"}}'),
        ("pattern", r'{"required": ["a"], "items": {"pattern": "\u007f"}}'),
        ("patternProperties", r'{"patternProperties": {"\\u{1f}": {}}}'),
        ("$ref", '{"items": {"$ref": "#/examples/0"}, "examples": [{"nullable": true}]}'),
    ],
)
def test_what_would_be_loosened_is_refused_by_its_keyword(keyword: str, schema: str) -> None:
    with pytest.raises(RequestError, match=rf"got the keyword '{keyword.replace('$', '[$]')}'"):
        schema_source(schema)


@pytest.mark.parametrize(
    "schema",
    [
        '{"minProperties": 2, "required": ["a"]}',
        '{"minProperties": 2, "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": false}',
        r'{"properties": {"a": {"const": "\\u0001"}, "b": {"pattern": "\\\\x{e9}\n"}}}',
        r'{"properties": {"a": {"const": "\u0001"}}, "additionalProperties": false}',
        '{"items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {"items": {"$ref": "#"}}}}',
    ],
)
def test_what_can_be_held_is_not_refused(schema: str) -> None:
    assert schema_source(schema)
