"""Cases of the JSON-Schema-Test-Suite: a schema is refused by its keyword, or admits no instance that it forbids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sightline.core.errors import RequestError
from sightline.core.structured import StructuredOutputs
from sightline.structured import schemas as schemas_module
from sightline.structured.compiler import GrammarCompiler
from sightline.structured.keywords import HELD, UNHELD
from sightline.structured.matcher import CompiledGrammar
from support.answer_checks import byte_tokenizer, byte_vocabulary

SUITE: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "json_schema_test_suite/draft2020-12.json").read_text()
)
_POINT, _LEAP = "whole numbers are written without a point", "leap seconds are left out"
_ORDER, _FORM = "properties come in the order of the schema", "rare forms of addresses are left out"
NOT_ADMITTED = {
    "allOf: allOf": _ORDER,
    "allOf: valid": _ORDER,
    "const: same object with different property order is valid": _ORDER,
    "const: float zero is valid": _POINT,
    "const: float one is valid": _POINT,
    "const: float -2.0 is valid": _POINT,
    "const: float is valid": _POINT,
    "enum: float zero is valid": _POINT,
    "enum: [0.0] is valid": _POINT,
    "enum: float one is valid": _POINT,
    "enum: [1.0] is valid": _POINT,
    "type: a float with zero fractional part is an integer": _POINT,
    "optional/format/date-time: a valid date-time with a leap second, UTC": _LEAP,
    "optional/format/date-time: a valid date-time with a leap second, with minus offset": _LEAP,
    "optional/format/time: a valid time string with leap second, Zulu": _LEAP,
    "optional/format/time: valid leap second, zero time-offset": _LEAP,
    "optional/format/time: valid leap second, positive time-offset": _LEAP,
    "optional/format/time: valid leap second, large positive time-offset": _LEAP,
    "optional/format/time: valid leap second, negative time-offset": _LEAP,
    "optional/format/time: valid leap second, large negative time-offset": _LEAP,
    "optional/format/email: a quoted string with a space in the local part is valid": _FORM,
    "optional/format/email: a quoted string with a double dot in the local part is valid": _FORM,
    "optional/format/email: a quoted string with a @ in the local part is valid": _FORM,
    "optional/format/email: an IPv6-address-literal after the @ is valid": _FORM,
    "optional/format/ipv6: mixed format with the ipv4 section as decimal octets": _FORM,
    "optional/format/ipv6: mixed format with double colons between the sections": _FORM,
    "optional/format/ipv6: mixed format with leading double colons (ipv4-mapped ipv6 address)": _FORM,
    "optional/format/ipv6: a long valid ipv6": _FORM,
}
"""Instances that a schema allows and that are not admitted, with the reason."""


class Case(NamedTuple):
    """A schema, and its instances: (description, data, whether it allows it)."""

    file: str
    name: str
    schema: Any
    tests: list[tuple[str, Any, bool]]


def cases() -> Iterator[Case]:
    for file, groups in SUITE.items():
        for group in groups:
            yield Case(file, f"{file}: {group['description']}", group["schema"], group["tests"])


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_vocabulary)
    yield made
    made.close()


def admits(grammar: CompiledGrammar, text: str) -> bool:
    """True if an answer may be a text."""
    matcher, tokens = grammar.matcher(), byte_tokenizer().encode_text(text)
    if matcher.num_admitted(tokens) < len(tokens):
        return False
    matcher.consume(tokens)
    return matcher.is_complete or matcher.num_admitted(sorted(byte_tokenizer().eos_ids)) == 1


def written(value: object) -> list[str]:
    """An instance as models write it."""
    return [
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False, indent=1),
    ]


def escaped(value: object) -> str:
    """An instance with every character of its texts as an escape."""
    match value:
        case str():
            units = value.encode("utf-16-be", "surrogatepass").hex()
            return '"' + re.sub("(.{4})", r"\\u\1", units) + '"'
        case list():
            return "[" + ",".join(map(escaped, value)) + "]"
        case dict():
            return "{" + ",".join(f"{escaped(name)}:{escaped(each)}" for name, each in value.items()) + "}"
        case _:
            return json.dumps(value)


def names_a_keyword(told: str, schema: object) -> bool:
    """True if a refusal names a keyword of a schema, or says that it or a part of it is `false`."""
    text = json.dumps(schema)
    found = set(re.findall(r'"([$\w-]+)":', text)) & (HELD | UNHELD | {"unknown-keyword"})
    # The schema of schemas, which some refer to, has it.
    found |= {"$dynamicAnchor"} if "json-schema.org" in text else set()
    found |= {"schema false", "schema is false"} if "false" in text else set()
    return any(re.search(rf"(?<!\w){re.escape(each)}(?!\w)", told) for each in found)


def grammars(compiler: GrammarCompiler) -> Iterator[tuple[Case, CompiledGrammar | RequestError]]:
    for case in cases():
        try:
            yield case, compiler.prepare(StructuredOutputs(json=case.schema)).result()
        except RequestError as error:
            yield case, error


def wrongly_admitted(compiler: GrammarCompiler) -> list[str]:
    """Texts that a grammar admits and its schema forbids. Raises nothing for schemas that are refused."""
    return [
        f"{case.name}: {text}"
        for case, grammar in grammars(compiler)
        if isinstance(grammar, CompiledGrammar)
        for _, data, valid in case.tests
        for text in [*written(data), json.dumps(data), escaped(data)]
        if not valid and admits(grammar, text)
    ]


def test_no_instance_that_a_schema_forbids_is_admitted(compiler: GrammarCompiler) -> None:
    assert wrongly_admitted(compiler) == []


def test_instances_that_a_schema_allows_are_admitted_but_for_named_ones(compiler: GrammarCompiler) -> None:
    admitted = {True: set[str](), False: set[str]()}
    for case, grammar in grammars(compiler):
        if isinstance(grammar, CompiledGrammar):
            for description, data, valid in case.tests:
                for text in written(data) if valid else ():
                    admitted[admits(grammar, text)].add(f"{case.file}: {description}")
    assert admitted[False] == set(NOT_ADMITTED)
    assert len(admitted[True]) > 350


@pytest.mark.parametrize("mutant", ["_hold_formats", "_has_free_names"])
def test_a_schema_that_is_given_as_it_is_would_be_seen(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    monkeypatch.setattr(schemas_module, mutant, lambda schema: False)
    assert wrongly_admitted(compiler)


def test_what_is_refused_names_a_keyword_of_the_schema(compiler: GrammarCompiler) -> None:
    refused = [(case, str(found)) for case, found in grammars(compiler) if isinstance(found, RequestError)]
    assert [(case.name, told) for case, told in refused if not names_a_keyword(told, case.schema)] == []
    assert 80 < len(refused) < 100
