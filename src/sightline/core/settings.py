"""What is said once about a setting: name, type and default as a dataclass field, and its help, bounds and choices.

    max_model_len: int | None = setting(None, "Longest sequence, in tokens.", low=1)

Keywords of Python, options of the command line, fields of HTTP requests and docs/settings.md are derived from it. Does
not know what a setting does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, wraps
from inspect import get_annotations
from os import PathLike
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from sightline.core.errors import SightlineError
from sightline.core.words import answer_unknown

_T = TypeVar("_T")
_KINDS: Mapping[type, tuple[type | tuple[type, ...], str]] = MappingProxyType(
    {
        bool: (bool, "True or False"),
        int: (int, "a whole number"),
        float: ((int, float), "a finite number"),
        str: ((str, PathLike), "text"),
    }
)
"""Types that are checked: what Python has for them, and their names in messages."""
_INFINITIES = (float("inf"), -float("inf"))


@dataclass(frozen=True)
class Setting:
    """A setting. `stated` fills in what its dataclass field says."""

    help: str
    low: float | None = None
    high: float | None = None
    excludes_low: bool = False
    choices: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Short names that only the command line has: -m."""
    only_generates: bool = False
    """Has no use when texts are embedded."""
    name: str = ""
    kind: type = object
    """bool, int, float or str; object for everything else."""
    default: Any = None
    is_optional: bool = False

    @property
    def bounds(self) -> str:
        """The range of values in words; empty without one."""
        low, high = (f"{each:g}" if self.kind is float else str(each) for each in (self.low, self.high))
        if self.high is None:
            return "" if self.low is None else f"of at least {low}"
        return f"in ({low}, {high}]" if self.excludes_low else f"between {low} and {high}"

    def check(self, value: object, error: type[SightlineError], name: str = "") -> None:
        """Raises `error` unless the value has the right type, is in its bounds and is one of the choices."""
        name = name or self.name
        if value is None and self.is_optional:
            return
        if self.choices and value not in self.choices:
            raise error(f"expected {name} {', '.join(self.choices[:-1])} or {self.choices[-1]}, got {value!r}")
        if self.kind not in _KINDS:
            return
        accepted, what = _KINDS[self.kind]
        described = f"to be {what} {self.bounds if self.high is None else ''}".rstrip()
        number: Any = value
        is_alien = not isinstance(value, accepted) or isinstance(value, bool) is not (self.kind is bool)
        if is_alien or number != number or number in _INFINITIES:
            raise error(f"expected {name} {described}, got {value!r}")
        is_low = self.low is not None and (number <= self.low if self.excludes_low else number < self.low)
        if is_low or (self.high is not None and number > self.high):
            raise error(f"expected {name} {described if self.high is None else self.bounds}, got {value!r}")


@dataclass(frozen=True)
class Alias:
    """Another name of a setting."""

    of: str
    is_negated: bool = False
    """Says the opposite, as `disable_…` does."""
    fields: Callable[[Any], Mapping[str, object]] | None = None
    """Reads a value as some fields of the setting, which is a mapping or its JSON. None: it is the setting's value."""
    kind: type = object
    """The type of the setting, which `aliases_of` fills in."""

    def meaning(self, value: object) -> object:
        """The setting's value. Only a bool has an opposite; the setting's own check refuses anything else."""
        return not value if self.is_negated and isinstance(value, bool) else value


def setting(default: _T, help: str, **facts: Any) -> _T:
    """A dataclass field with its `Setting`, whose other fields are the `facts`."""
    return field(default=default, metadata={"stated": Setting(help, **facts)})


def alias(of: str, *, is_negated: bool = False, fields: Callable[[Any], Mapping[str, object]] | None = None) -> Any:
    """A dataclass field that is an `Alias`, with the default None."""
    return field(default=None, metadata={"stated": Alias(of, is_negated, fields)})


def with_fields(
    of: str, value: object, given: Mapping[str, Mapping[str, object]], error: Callable[[str], Exception]
) -> object:
    """A setting whose value is a mapping or its JSON, with the fields that other names give it.

    `of` is the setting's name. Raises `error` if two names give a field different values. A value that is no mapping is
    left to the setting's own check.
    """
    known: object = value
    if isinstance(value, str):
        try:
            known = json.loads(value)
        except ValueError:
            return value
    sources = {**given, **({} if known is None else {of: known})}
    found, names = dict[str, object](), dict[str, str]()
    for name, each in sources.items():
        if not isinstance(each, Mapping):
            return value
        for field_name, part in each.items():
            first = names.setdefault(field_name, name)
            if found.setdefault(field_name, part) != part:
                raise error(
                    f"expected one {field_name} of {of}, got {found[field_name]!r} by {first} and {part!r} by {name}; "
                    "leave one out"
                )
    return found


def stated(kind: type) -> Mapping[str, Setting]:
    """The settings of a dataclass by name: its own, then those that it inherits."""
    hashable: object = kind
    return _read(hashable)[0]


def aliases_of(kind: type) -> Mapping[str, Alias]:
    """The aliases that a dataclass has for settings, by name."""
    hashable: object = kind
    return _read(hashable)[1]


@cache
def _read(kind: Any) -> tuple[Mapping[str, Setting], Mapping[str, Alias]]:
    settings, aliases, hints = dict[str, Setting](), dict[str, Alias](), get_type_hints(kind)
    order = [name for owner in kind.__mro__ for name in get_annotations(owner)]
    for each in sorted(fields(kind), key=lambda each: order.index(each.name)):
        name, hint = each.name, hints[each.name]
        kinds = set(get_args(hint) if get_origin(hint) is UnionType else [hint])
        [plain, *others] = kinds - {NoneType}
        known = plain if plain in _KINDS and not others else object
        has_none = NoneType in kinds
        match each.metadata.get("stated"):
            case Setting() as said:
                settings[name] = replace(said, name=name, kind=known, default=each.default, is_optional=has_none)
            case Alias() as said:
                aliases[name] = replace(said, kind=known)
    return MappingProxyType(settings), MappingProxyType(aliases)


def check_settings(owner: object, error: type[SightlineError]) -> None:
    """Raises `error` for the first value of a dataclass that its setting does not allow."""
    for name, setting in stated(type(owner)).items():
        setting.check(vars(owner)[name], error)


def keywords(error: type[SightlineError], what: str, elsewhere: Mapping[str, str]) -> Callable[[type[_T]], type[_T]]:
    """Decorates a dataclass of settings, each of which messages call `what`.

    Its constructor takes an alias for what it stands for, and answers an unknown name with the nearest known ones.
    `elsewhere` says what other names are.
    """

    def decorate(kind: type[_T]) -> type[_T]:
        construct = vars(kind)["__init__"]

        @wraps(construct)
        def constructor(self: _T, *args: object, **given: object) -> None:
            settings, aliases = stated(kind), aliases_of(kind)
            values, said = dict[str, object](), dict[str, str]()
            parts: dict[str, dict[str, Mapping[str, object]]] = {}
            for name, value in given.items():
                if name not in settings and name not in aliases:
                    raise error(answer_unknown(name, settings, what, elsewhere))
                alias = aliases.get(name, Alias(name))
                if name in aliases and value is None:
                    continue
                if alias.fields is not None:
                    parts.setdefault(alias.of, {})[name] = alias.fields(value)
                    continue
                meant, first = alias.meaning(value), said.setdefault(alias.of, name)
                if values.setdefault(alias.of, meant) != meant and first != name:
                    raise error(
                        f"expected {first} or {name}, which are one setting, got {first} {given[first]!r} and {name} "
                        f"{value!r}; leave one out"
                    )
            values |= {name: with_fields(name, values.get(name), each, error) for name, each in parts.items()}
            construct(self, *args, **values)

        type.__setattr__(kind, "__init__", constructor)
        return kind

    return decorate
