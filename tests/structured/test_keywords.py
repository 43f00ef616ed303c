"""A schema that cannot be held is refused with the keyword's name, wherever it is; names of properties are free."""

from __future__ import annotations

import pytest

from sightline.core.errors import RequestError
from sightline.structured.keywords import ANNOTATIONS, HELD, UNHELD, check_keywords
from support.structured import UNSUPPORTED


@pytest.mark.parametrize("keyword", sorted(UNHELD))
def test_a_keyword_that_is_not_held_is_refused_by_name_and_place(keyword: str) -> None:
    nested = {"properties": {"a": {"items": [{"anyOf": [{"$ref": "#"}, {keyword: 1}]}]}}}
    with pytest.raises(RequestError, match="which is not supported") as raised:
        check_keywords(nested)
    assert repr(keyword) in str(raised.value)
    assert "/properties/a/items/0/anyOf/1" in str(raised.value)


def test_a_typing_error_is_no_annotation() -> None:
    with pytest.raises(RequestError, match="'maxLenght', which is none; nearest: maxLength"):
        check_keywords({"type": "string", "maxLenght": 3})


def test_properties_and_values_may_have_the_names_of_keywords() -> None:
    names = {name: {"type": "string"} for name in UNSUPPORTED}
    check_keywords({"properties": names, "$defs": names, "definitions": names, "required": list(names)})
    check_keywords({"const": {"not": 1}, "enum": [{"uniqueItems": 1}], "default": {"if": 1}, "examples": [{"not": 2}]})


def test_extensions_and_notes_are_no_constraints() -> None:
    check_keywords({"title": "x", "x-order": 1, "$comment": "y", "items": {"deprecated": True, "description": "z"}})
    check_keywords(True)


def test_each_keyword_is_in_one_table() -> None:
    assert len(HELD | UNHELD | ANNOTATIONS) == len(HELD) + len(UNHELD) + len(ANNOTATIONS)
