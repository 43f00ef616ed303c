"""Which keywords of JSON Schema are held, and which are refused by name. Does not know tokens.

llguidance refuses most of what it cannot hold, and passes over words that it does not know. A word that is passed over
could be a typing error, or a keyword of another draft that says something: it is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from sightline.core.errors import RequestError
from sightline.core.words import nearest

_HELD_WORDS = """
    type const enum anyOf oneOf allOf $ref properties patternProperties additionalProperties required minProperties
    maxProperties items prefixItems additionalItems minItems maxItems minLength maxLength pattern format minimum
    maximum exclusiveMinimum exclusiveMaximum multipleOf
"""
HELD = frozenset(_HELD_WORDS.split())
"""Keywords that llguidance compiles, or refuses with a reason of its own."""
_UNHELD_WORDS = """
    not if then else uniqueItems contains minContains maxContains propertyNames dependencies dependentRequired
    dependentSchemas unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef contentEncoding
    contentMediaType contentSchema divisibleBy extends disallow nullable x-guidance
"""
UNHELD = frozenset(_UNHELD_WORDS.split())
"""Keywords that say something which is not held. `x-guidance` sets options of llguidance, some of which loosen."""
_ANNOTATIONS_WORDS = """
    title description default example examples deprecated readOnly writeOnly $comment $schema $id id $anchor
    $dynamicAnchor $recursiveAnchor $vocabulary $defs definitions discriminator externalDocs xml
"""
ANNOTATIONS = frozenset(_ANNOTATIONS_WORDS.split())
"""Keywords that allow and forbid nothing."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""
_DIRECT = ("items", "additionalItems", "additionalProperties", "anyOf", "allOf", "oneOf", "prefixItems")
"""Keywords whose value is a schema, or a list of schemas."""


class _Found(NamedTuple):
    keyword: str
    path: str


def check_keywords(schema: object) -> None:
    """Raises `RequestError` for the first keyword of a schema that would not be held."""
    for keyword, path in _keywords(schema):
        if keyword in HELD or keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
            continue
        where = f" at {path}" if path else ""
        if keyword in UNHELD:
            raise RequestError(
                f"expected a schema in structured_outputs that can be held, got the keyword {keyword!r}{where}, which "
                "is not supported; leave it out"
            )
        near = nearest(keyword, HELD)
        told = f"; nearest: {', '.join(near)}" if near else "; leave it out"
        raise RequestError(
            f"expected keywords of JSON Schema in structured_outputs, got {keyword[:40]!r}{where}, which is none{told}"
        )


def listed(value: object) -> list[object]:
    """A list as it is; an empty one in place of anything else."""
    match value:
        case list():
            return value
        case _:
            return []


def target_of(root: object, reference: str) -> object:
    """What a reference within a schema leads to; None if it leads nowhere, which llguidance refuses."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        match found:
            case Mapping():
                found = found.get(name)
            case list() if name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            case _:
                return None
    return found


def _keywords(schema: object) -> Iterator[_Found]:
    """Every keyword of a schema and of the schemas in it, with the path of its schema."""
    for each, path in schemas_in(schema):
        for keyword in each:
            yield _Found(keyword, path)


def schemas_in(schema: object) -> Iterator[tuple[dict[str, object], str]]:
    """A schema and all schemas in it that are objects, with their paths."""
    pending: list[tuple[object, str]] = [(schema, "")]
    while pending:
        value, path = pending.pop()
        match value:
            case dict():
                yield value, path
                pending += [(value[name], f"{path}/{name}") for name in _DIRECT if name in value]
                for name in _BY_NAME:
                    match value.get(name):
                        case dict() as named:
                            pending += [(each, f"{path}/{name}/{key}"[:80]) for key, each in named.items()]
            case list():
                pending += [(each, f"{path}/{index}") for index, each in enumerate(value)]
