"""The value that says what an answer must be: exactly one way, within bounds, the same however it was written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sightline import BeamSearchParams, SamplingParams
from sightline.core.errors import RequestError
from sightline.core.structured import StructuredOutputs, read_structured_outputs

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "exactly one of json, json_object, regex, choice, grammar"),
    "two": ({"json": {}, "regex": "a"}, "exactly one"),
    "no_object": ({"json_object": False}, "exactly one"),
    "a number for a switch": ({"json_object": 2}, "json_object True or False"),
    "no schema": ({"json": "[1]"}, "an object"),
    "invalid JSON": ({"json": "{"}, "invalid JSON"),
    "NaN": ({"json": '{"minimum": NaN}'}, "not JSON"),
    "NaN in Python": ({"json": {"minimum": float("nan")}}, "invalid JSON"),
    "no JSON value": ({"json": {"enum": [object()]}}, "invalid JSON"),
    "a surrogate": ({"json": {"const": "\ud800"}}, "invalid JSON"),
    "a large schema": ({"json": {"enum": ["x" * 70_000]}}, "at most 65,536 characters"),
    "an empty regex": ({"regex": ""}, "at least one character"),
    "no text": ({"regex": 5}, "to be text"),
    "a long regex": ({"regex": "a" * 5000}, "at most 4,096 characters"),
    "a surrogate in a regex": ({"regex": "\ud800"}, "lone surrogate"),
    "a long grammar": ({"grammar": "a" * 20_000}, "at most 16,384 characters"),
    "no choices": ({"choice": []}, "choice"),
    "a text for choices": ({"choice": "yes"}, "list of texts"),
    "an empty choice": ({"choice": ["a", ""]}, "at least one character"),
    "numbers": ({"choice": [1]}, "list of texts"),
    "many choices": ({"choice": [str(each) for each in range(1025)]}, "at most 1024"),
    "long choices": ({"choice": ["x" * 20_000]}, "at most 16,384 characters"),
    "an unknown field": ({"jsno": {}}, "jsno is not a field of structured_outputs; expected json, "),
    "whitespace": ({"json": {}, "disable_any_whitespace": True}, "disable_any_whitespace is not a field"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_refused_with_the_reason(name: str) -> None:
    fields, reason = WRONG[name]
    with pytest.raises(RequestError) as raised:
        SamplingParams(structured_outputs=fields)  # type: ignore[arg-type]
    assert reason in str(raised.value)
    assert "structured_outputs" in str(raised.value)


def test_a_deep_schema_is_refused_and_not_a_crash() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested at most 64 deep"):
        StructuredOutputs(json=deep)


@pytest.mark.parametrize("value", [5, "json", [1]])
def test_anything_but_a_mapping_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match="structured_outputs with one of"):
        read_structured_outputs(value)


def test_equal_constraints_are_equal_however_they_are_written() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    text = '{"type": "object",\n "properties": {"b": {}, "a": {}}}'
    assert StructuredOutputs(json=schema) == StructuredOutputs(json=text)
    assert hash(StructuredOutputs(json=schema)) == hash(StructuredOutputs(json=text))
    other = {"type": "object", "properties": {"a": {}, "b": {}}}
    assert StructuredOutputs(json=schema) != StructuredOutputs(json=other), "answers follow the order of properties"
    assert StructuredOutputs(choice=["a"]) == StructuredOutputs(choice=("a",))


@pytest.mark.parametrize(
    "given",
    [{"json": {"type": "string"}}, {"json": False}, {"json_object": True}, {"regex": "a"}, {"choice": ["a", "b"]}],
    ids=str,
)
def test_parameters_survive_the_way_to_the_engine_process(given: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**given))
    packed = msgspec.msgpack.encode(params)
    found = msgspec.msgpack.decode(packed, type=SamplingParams)
    assert found == params
    assert found.structured_outputs is not None
    assert [found.structured_outputs.kind] == list(given)


def test_an_end_that_is_ignored_contradicts_a_grammar() -> None:
    with pytest.raises(RequestError, match="ignore_eos False with structured_outputs"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputs(regex="a"))


def test_beam_search_refuses_structured_outputs_by_name() -> None:
    with pytest.raises(RequestError, match="structured_outputs is a sampling parameter, not a parameter of beam"):
        BeamSearchParams(structured_outputs={"regex": "a"})  # type: ignore[call-arg]
