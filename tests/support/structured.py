"""Schemas drawn at random, whose answers are short, and what an answer under one must be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import jsonschema_rs

from sightline import CompletionOutput, SamplingParams

Schema = dict[str, Any]
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
UNSUPPORTED: Mapping[str, Schema] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "minContains": {"type": "array", "minContains": 1},
    "maxContains": {"type": "array", "maxContains": 1},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "then": {"then": {"minLength": 1}},
    "else": {"else": {"minLength": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "contentEncoding": {"type": "string", "contentEncoding": "base64"},
    "contentMediaType": {"type": "string", "contentMediaType": "application/json"},
    "contentSchema": {"type": "string", "contentSchema": {"type": "object"}},
    "divisibleBy": {"type": "integer", "divisibleBy": 3},
    "extends": {"extends": {"type": "object"}},
    "disallow": {"disallow": "string"},
    "nullable": {"type": "string", "nullable": True},
    "x-guidance": {"x-guidance": {"lenient": True}, "type": "array"},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]},
    "format": {"type": "string", "format": "frobnicated"},
    "multipleOf": {"type": "number", "multipleOf": 0.000123},
    "maxProperties": {"type": "object", "maxProperties": 2, "properties": {"a": {}, "b": {}, "c": {}}},
    "pattern": {"type": "string", "pattern": "(?=a)"},
    "patternProperties": {"type": "object", "patternProperties": {"a": {}, "b": {"type": "string"}}},
    "minimum": {"type": "number", "minimum": 1e300},
    "$ref": {"$ref": "https://example.com/other.json"},
    "minProperties": {"type": "object", "minProperties": 2},
    "enum": {"properties": {"a": {"enum": ["\x01"]}}},
    "maxLenght": {"type": "string", "maxLenght": 3},
}
"""A schema for each keyword that is refused, by the name that the refusal has."""


def random_schema(draw: Random, depth: int = 2) -> Schema:
    """A schema that llguidance holds, with answers of a few dozen characters."""
    leaves: Sequence[Callable[[Random], Schema]] = (_text, _number, _choice, _constant)
    if depth == 0 or draw.random() < 0.35:
        return draw.choice(leaves)(draw)
    match draw.choice(["object", "object", "array", "tuple", "any", "reference", "several"]):
        case "object":
            return _object(draw, depth)
        case "array":
            low = draw.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(draw, depth - 1),
                "minItems": low,
                "maxItems": low + draw.randint(0, 2),
            }
        case "tuple":
            items = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "any":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
        case "reference":
            return {"$ref": "#/$defs/leaf"}
        case _:
            return {"type": ["string", "null", "boolean"], "maxLength": draw.randint(0, 4)}


def whole_schema(seed: int) -> Schema:
    """A random schema with what it refers to."""
    draw = Random(seed)
    schema = random_schema(draw)
    return {**schema, "$defs": {"leaf": random_schema(draw, 0)}}


def _object(draw: Random, depth: int) -> Schema:
    names = draw.sample(["a", "name", "näme", "x y", 'q"', "id"], draw.randint(0, 3))
    found: Schema = {
        "type": "object",
        "properties": {name: random_schema(draw, depth - 1) for name in names},
        "additionalProperties": False,
        "required": [name for name in names if draw.random() < 0.7],
    }
    if draw.random() < 0.2:
        return {
            **found,
            "additionalProperties": {"type": "boolean"},
            "required": names,
            "maxProperties": len(names) + 1,
        }
    return found


def _text(draw: Random) -> Schema:
    low = draw.randint(0, 3)
    return draw.choice(
        [
            {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 5)},
            {"type": "string", "pattern": draw.choice(["^[a-c]{2,4}$", "^(yes|no)!?$", "^\\d{3}-\\d{2}$"])},
            {"type": "string", "format": draw.choice(["date", "uuid", "ipv4", "time"])},
        ]
    )


def _number(draw: Random) -> Schema:
    low = draw.randint(-50, 50)
    return draw.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 200)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 10},
            {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": draw.choice([2, 5, 7])},
            {"type": "number", "minimum": low, "maximum": low + 1},
        ]
    )


def _choice(draw: Random) -> Schema:
    return {"enum": draw.sample(["red", "grün", 1, 2.5, None, True, [1, "a"], {"k": 0}], draw.randint(1, 4))}


def _constant(draw: Random) -> Schema:
    return {"const": draw.choice(["x", 7, False, None, [], {"a": [1]}])}


def holds(text: str, schema: Schema) -> bool:
    """True if a text is JSON that a schema allows."""
    return bool(jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(json.loads(text)))


def checked(output: CompletionOutput, schema: Schema, max_tokens: int) -> bool:
    """True if an answer is complete. Fails if that does not satisfy the schema, or if it ends for another reason."""
    if output.finish_reason == "length":
        assert len(output.token_ids) == max_tokens
        return False
    assert output.finish_reason == "stop", output
    assert holds(output.text, schema), (schema, output.text)
    return True


def held_to(seed: int, **changes: Any) -> SamplingParams:
    """Parameters at temperature 1 for the random schema of a seed."""
    settings = {"temperature": 1.0, "max_tokens": 200, "seed": seed, **changes}
    return SamplingParams(**settings, structured_outputs={"json": whole_schema(seed)})  # type: ignore[arg-type]
