"""Tools that a program offers are checked where they come in."""

from __future__ import annotations

import json

import pytest

from sightline.core.errors import RequestError
from sightline.core.structured import MAX_SCHEMA_DEPTH
from sightline.text.answers.opening import offered_tools


def _offered(parameters: object) -> object:
    [tool] = offered_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    return tool.parameters


@pytest.mark.parametrize("levels", [MAX_SCHEMA_DEPTH, 400, 5000])
def test_schemas_that_are_nested_too_deep_are_refused_with_the_limit(levels: int) -> None:
    deep: object = {}
    for _ in range(levels):
        deep = {"items": deep}
    with pytest.raises(RequestError, match=f"parameters of the tool 'f' .*at most {MAX_SCHEMA_DEPTH} deep"):
        _offered(deep)


@pytest.mark.parametrize("parameters", [{"x": {1, 2}}, {"x": float("nan")}, {"x": "\ud800"}])
def test_what_is_no_json_is_refused(parameters: object) -> None:
    with pytest.raises(RequestError, match=r"parameters of the tool .f..*invalid JSON"):
        _offered(parameters)


def test_a_schema_is_kept_as_it_is() -> None:
    schema = {"type": "object", "properties": {"z": {"const": "ü"}, "a": {}}}
    assert json.loads(str(_offered(schema))) == schema
    assert _offered(None) is None
