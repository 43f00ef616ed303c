"""How much of a schema applies to one value at once, and how far its references lead.

    allOf: [A, B]   a value satisfies A and B; its property "p" satisfies A's schema of "p" and B's

llguidance makes one automaton of all patterns that apply to a value. Its size grows with a power of their number, and
with the product of all `multipleOf`; no limit of the library bounds the memory. A chain of references is followed by
recursion, which overflows the stack. Both are bounded here, before the library sees a schema. Does not know tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from sightline.core.errors import RequestError
from sightline.structured.keywords import listed, target_of

MAX_INTERSECTED = 6
"""The most patterns that one text may have to match at once."""
MAX_FACTOR = 1 << 16
"""The largest product of all `multipleOf` of one number, without zeros at their ends."""
MAX_CHAIN = 256
"""The most schemas within each other, with those that references lead to."""
MAX_MERGED = 1 << 17
"""The most names of properties that are merged, in all."""
_ONE_TEXT = ("pattern", "format", "multipleOf")
_SAME_VALUE = ("allOf", "anyOf", "oneOf")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_CHILDREN = ("items", "additionalItems", "additionalProperties", "prefixItems")


def check_intersections(schema: object) -> None:
    """Raises `RequestError` if too much of a schema applies to one value, or its references lead too far."""
    _Profiles(schema).check()


class _Weight(NamedTuple):
    """What applies to one value, or to any value within it."""

    patterns: int = 0
    factor: int = 1
    is_open: bool = False
    """True if it leads back into a schema whose weight is not known yet."""


_Join: TypeAlias = Callable[[Iterable[_Weight]], _Weight]
_NOTHING = _Weight()
_OPEN = _Weight(is_open=True)


@dataclass(frozen=True)
class _Profile:
    """What a schema says about a value, and about the values directly within it."""

    own: _Weight = _NOTHING
    named: Mapping[str, _Weight] = field(default_factory=lambda: MappingProxyType({}))
    """For properties by name."""
    others: _Weight = _NOTHING
    """For the properties that are not named, and for items."""
    most: _Weight = _NOTHING
    """The most that applies to a value of the schema, or to any value within it."""
    height: int = 0
    """The most schemas within each other, from this one on."""


_NO_PROFILE = _Profile()
_UNKNOWN = _Profile(_OPEN, others=_OPEN, most=_OPEN)


class _Profiles:
    """The profiles of the schemas in a root. Looks at each schema once."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._found: dict[int, _Profile] = {}
        """By the identity of a schema; unknown while it is looked at."""
        self._num_merged = 0

    def check(self) -> None:
        """Looks at every schema behind those that it leads to. Without recursion: a chain may be long."""
        pending = [iter([self._root])]
        around: list[dict[str, object]] = []
        while pending:
            match next(pending[-1], None):
                case dict() as schema if id(schema) not in self._found:
                    self._found[id(schema)] = _UNKNOWN
                    around.append(schema)
                    pending.append(iter(self._led_to(schema)))
                case None:
                    pending.pop()
                    if around:
                        self._look_at(around.pop())

    def _look_at(self, schema: dict[str, object]) -> None:
        found = self._found[id(schema)] = self._of_object(schema)
        if found.height > MAX_CHAIN:
            raise RequestError(
                f"expected a schema in structured_outputs nested at most {MAX_CHAIN} deep with what each '$ref' leads "
                "to, got more; leave some levels out"
            )

    def _led_to(self, schema: dict[str, object]) -> list[object]:
        found = [each for name in (*_SAME_VALUE, *_CHILDREN) for each in listed(schema.get(name)) or [schema.get(name)]]
        found += [each for name in _BY_NAME for each in _named(schema.get(name)).values()]
        found.append(self._target(schema))
        return [each for each in found if each is not None]

    def _target(self, schema: dict[str, object]) -> object:
        match schema.get("$ref"):
            case str(reference):
                return target_of(self._root, reference)
            case _:
                return None

    def _of_object(self, schema: dict[str, object]) -> _Profile:
        parts = [self._itself(schema), *self._all(listed(schema.get("allOf"))), *self._all([self._target(schema)])]
        parts += [self._merged(self._all(listed(schema.get(name))), _either) for name in ("anyOf", "oneOf")]
        # Definitions say nothing about a value until a reference leads to them.
        defined = [each for name in ("$defs", "definitions") for each in self._all(_named(schema.get(name)).values())]
        found = self._merged(parts, _both)
        height = max(each.height for each in (found, *defined))
        return replace(found, height=height + 1)

    def _all(self, schemas: Iterable[object]) -> list[_Profile]:
        return [self._found.get(id(each), _NO_PROFILE) for each in schemas]

    def _itself(self, schema: dict[str, object]) -> _Profile:
        """What the keywords say that lead to no other schema of the same value."""
        own = [_Weight(1, _factor(schema[name]) if name == "multipleOf" else 1) for name in _ONE_TEXT if name in schema]
        if "minLength" in schema or "maxLength" in schema:
            own.append(_Weight(1))
        properties = _named(schema.get("properties"))
        found = dict(zip(properties, self._all(properties.values()), strict=True))
        # The library refuses patterns of names that overlap: one of them applies at most.
        patterned = self._all(_named(schema.get("patternProperties")).values())
        values = (schema.get(name) for name in _CHILDREN)
        children = self._all([each for value in values for each in (listed(value) or [value])])
        pattern, others = _either([each.most for each in patterned]), _either([each.most for each in children])
        named = {name: _both([each.most, pattern]) for name, each in found.items()}
        height = max((each.height for each in (*found.values(), *patterned, *children)), default=0)
        return _profile(_both(own), named, _either([pattern, others]), height)

    def _merged(self, parts: Sequence[_Profile], join: _Join) -> _Profile:
        """The profiles joined: all of them apply, or one of them does."""
        told = [each for each in parts if each.most != _NOTHING]
        height = max((each.height for each in parts), default=0)
        if len(told) <= 1:
            return replace(told[0] if told else _NO_PROFILE, height=height)
        wide = [each for each in told if each.others != _NOTHING]
        others = join([each.others for each in wide])
        by_name: dict[str, list[_Profile]] = {}
        for each in told:
            self._num_merged += len(each.named)
            if self._num_merged > MAX_MERGED:
                raise RequestError(
                    f"expected a schema in structured_outputs that joins at most {MAX_MERGED:,} properties by allOf, "
                    "anyOf, oneOf or $ref, got more"
                )
            for name in each.named:
                by_name.setdefault(name, []).append(each)
        named = {}
        for name, having in by_name.items():
            is_many = len(wide) > MAX_INTERSECTED
            beside = [others] if is_many else [each.others for each in wide if name not in each.named]
            named[name] = join([*(each.named[name] for each in having), *beside])
        return _profile(join([each.own for each in told]), named, others, height)


def _profile(own: _Weight, named: Mapping[str, _Weight], others: _Weight, height: int) -> _Profile:
    return _Profile(own, named, others, _either([own, others, *named.values()]), height)


def _both(weights: Iterable[_Weight]) -> _Weight:
    """What applies to a value to which all of these apply. Raises `RequestError` if it is too much."""
    told = [each for each in weights if each != _NOTHING]
    if len(told) <= 1:
        return told[0] if told else _NOTHING
    patterns, factor = sum(each.patterns for each in told), prod(each.factor for each in told)
    if patterns > MAX_INTERSECTED or any(each.is_open for each in told):
        raise RequestError(
            f"expected a schema in structured_outputs of which at most {MAX_INTERSECTED} of the keywords pattern, "
            "format, multipleOf, minLength and maxLength apply to one value, got more by allOf, anyOf or $ref"
        )
    _check_factor(factor)
    return _Weight(patterns, factor)


def _either(weights: Iterable[_Weight]) -> _Weight:
    """What applies to a value to which one of these applies, at most."""
    found = _NOTHING
    for each in weights:
        found = _Weight(
            max(found.patterns, each.patterns), max(found.factor, each.factor), found.is_open or each.is_open
        )
    return found


def _factor(value: object) -> int:
    """A `multipleOf` as a whole number without zeros at its end: what llguidance's automaton grows with."""
    match value:
        case bool():
            return 1
        case int() | float():
            digits = Decimal(str(value)).normalize().as_tuple().digits
            found = int("".join(map(str, digits)) or "1")
            _check_factor(found)
            return found
        case _:
            return 1


def _check_factor(factor: int) -> None:
    if factor > MAX_FACTOR:
        raise RequestError(
            "expected a schema in structured_outputs that can be held, got the keyword 'multipleOf' with too many "
            f"digits; the product of all for one value may be at most {MAX_FACTOR:,}, without zeros at their ends"
        )


def _named(value: object) -> Mapping[str, object]:
    match value:
        case dict():
            return value
        case _:
            return {}
