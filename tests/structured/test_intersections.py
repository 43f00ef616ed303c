"""What applies to one value at once is bounded, wherever a schema says it, and so is how far references lead."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from sightline.core.errors import RequestError
from sightline.core.structured import MAX_SCHEMA_DEPTH, StructuredOutputs
from sightline.structured.intersections import MAX_CHAIN, MAX_INTERSECTED, check_intersections
from support.answer_checks import byte_vocabulary

MANY = MAX_INTERSECTED + 1


def _pattern(number: int) -> dict[str, object]:
    return {"type": "string", "pattern": f"a{{{number},}}"}


def _all(name: str, number: int, inner: object) -> dict[str, object]:
    """Schemas of which each says something about the same value within, together."""
    return {"allOf": [{name: inner(each)} for each in range(number)]}  # type: ignore[operator]


WITHIN: dict[str, Callable[[int], dict[str, object]]] = {
    "itself": lambda count: {"allOf": [_pattern(each) for each in range(count)]},
    "properties": lambda count: _all("properties", count, lambda each: {"k": _pattern(each)}),
    "items": lambda count: _all("items", count, _pattern),
    "prefixItems": lambda count: _all("prefixItems", count, lambda each: [_pattern(each)]),
    "additionalProperties": lambda count: _all("additionalProperties", count, _pattern),
    "patternProperties": lambda count: _all("patternProperties", count, lambda each: {"^k$": _pattern(each)}),
    "two levels": lambda count: _all("items", count, lambda each: {"properties": {"k": _pattern(each)}}),
    "references": lambda count: {
        "$defs": {f"d{each}": {"properties": {"k": _pattern(each)}} for each in range(count)},
        "allOf": [{"$ref": f"#/$defs/d{each}"} for each in range(count)],
    },
    "siblings of references": lambda count: {
        "$defs": {
            "d0": {"properties": {"k": _pattern(0)}},
            **{
                f"d{each}": {"$ref": f"#/$defs/d{each - 1}", "properties": {"k": _pattern(each)}}
                for each in range(1, count)
            },
        },
        "$ref": f"#/$defs/d{count - 1}",
    },
    "alternatives": lambda count: {
        "allOf": [{"anyOf": [{"properties": {"k": _pattern(each)}}, {"type": "object"}]} for each in range(count)]
    },
    "named and patterned": lambda count: {
        "allOf": [
            *({"properties": {"k": _pattern(each)}} for each in range(count - 1)),
            {"patternProperties": {"^k$": _pattern(99)}},
        ]
    },
    "named and others": lambda count: {
        "allOf": [
            *({"properties": {"k": _pattern(each)}} for each in range(count - 1)),
            {"additionalProperties": _pattern(99)},
        ]
    },
}


@pytest.mark.parametrize("place", WITHIN)
def test_patterns_of_one_value_are_counted_wherever_they_come_from(place: str) -> None:
    check_intersections(WITHIN[place](MAX_INTERSECTED))
    with pytest.raises(RequestError, match=f"at most {MAX_INTERSECTED} of the keywords pattern"):
        check_intersections(WITHIN[place](MANY))


def test_patterns_that_grow_with_each_round_of_a_reference_are_refused() -> None:
    defs = {
        f"d{each}": {
            "properties": {
                "v": _pattern(each),
                "n": {"allOf": [{"$ref": f"#/$defs/d{each}"}, {"$ref": f"#/$defs/d{(each + 1) % 40}"}]},
            }
        }
        for each in range(40)
    }
    with pytest.raises(RequestError, match="apply to one value"):
        check_intersections({"$ref": "#/$defs/d0", "$defs": defs})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"k{each}": _pattern(each) for each in range(40)}},
        {"allOf": [{"properties": {f"k{each}": _pattern(each)}} for each in range(40)]},
        {"anyOf": [{"properties": {"k": _pattern(each)}} for each in range(40)]},
        {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "k": _pattern(1)}, "minLength": 1},
        {
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"children": {"items": {"$ref": "#"}}}}],
            "$defs": {"base": {"properties": {"id": {"format": "uuid"}}}},
        },
        {"type": "integer", "multipleOf": 86400, "allOf": [{"multipleOf": 700}]},
        {"type": "number", "multipleOf": 0.01},
    ],
    ids=str,
)
def test_what_does_not_apply_to_one_value_is_not_counted(schema: dict[str, object]) -> None:
    check_intersections(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999983},
        {"type": "number", "multipleOf": 999983.1},
        {"type": "integer", "multipleOf": 997, "allOf": [{"multipleOf": 991}]},
        {"allOf": [{"properties": {"k": {"type": "integer", "multipleOf": each}}} for each in (9973, 9967)]},
    ],
    ids=str,
)
def test_products_of_multiple_of_are_bounded(schema: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="'multipleOf'"):
        check_intersections(schema)


def test_chains_of_references_are_bounded() -> None:
    """The library follows them by recursion: a longer one would end the process."""

    def chain(length: int) -> dict[str, object]:
        links = {f"d{each}": {"properties": {"a": {"$ref": f"#/$defs/d{each + 1}"}}} for each in range(length)}
        return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "integer"}}}

    check_intersections(chain(MAX_CHAIN // 2 - 2))
    for length in (MAX_CHAIN // 2, 1000):
        with pytest.raises(RequestError, match=f"nested at most {MAX_CHAIN} deep"):
            check_intersections(chain(length))
    assert byte_vocabulary().fault("start: /a/") is None


def _wide(count: int) -> dict[str, object]:
    return {"properties": {f"k{each}": {"minLength": 1} for each in range(count)}}


def _also(number: int) -> dict[str, object]:
    return {"properties": {f"x{number}": {"minLength": 1}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": _wide(2000)}, "allOf": [{"$ref": "#/$defs/a"}] * 800},
        {"$defs": {"a": _wide(1500)}, "anyOf": [{"$ref": "#/$defs/a"}] * 800},
        {"$defs": {"a": _wide(1500)}, "anyOf": [{"$ref": "#/$defs/a", **_also(each)} for each in range(300)]},
        {"anyOf": [{"additionalProperties": {"minLength": 1}, **_also(each)} for each in range(900)]},
    ],
    ids=["all", "any", "any with more", "others"],
)
def test_counting_takes_little_time_and_memory(schema: dict[str, object]) -> None:
    started = time.process_time()
    try:
        check_intersections(schema)
    except RequestError as error:
        assert "apply to one value" in str(error) or "joins at most" in str(error)  # noqa: PT017
    assert time.process_time() - started < 2


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(("opens", "closes"), [('{"items":', "}"), ('{"anyOf":[', "]}"), ('{"properties":{"a":', "}}")])
def test_schemas_that_are_nested_too_deep_are_refused_with_the_limit(opens: str, closes: str, as_text: bool) -> None:
    most = MAX_SCHEMA_DEPTH // len(closes)

    def nested(levels: int) -> str:
        return opens * levels + "{}" + closes * levels

    for levels in (most, 200, 400, 5000):
        text = nested(levels)
        given = text if as_text or levels == 5000 else json.loads(text)
        with pytest.raises(RequestError, match=f"nested at most {MAX_SCHEMA_DEPTH} deep"):
            StructuredOutputs(json=given)
    text = nested(most - 1)
    assert StructuredOutputs(json=text if as_text else json.loads(text)).source == text
    for keyword in ("const", "examples"):
        with pytest.raises(RequestError, match=f"nested at most {MAX_SCHEMA_DEPTH} deep"):
            StructuredOutputs(json=f'{{"{keyword}":{"[" * 100}{"]" * 100}}}')
