"""Finds the fields of a config that have no effect on the definition.

A field has an effect if another value of it gives another definition, or if every other value is refused. That a
family's code reads a field proves nothing. Definitions are made without weights, so making one per field takes
milliseconds. Does not know families, nor what is done about a field without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from sightline.core.errors import UnsupportedModelError

Config = Mapping[str, object]
Path = tuple[str, ...]
"""The keys that lead to a value, outermost first."""
_T = TypeVar("_T")


def fields_without_effect(
    config: Config, define: Callable[[Config], _T], definition: _T, choices: Mapping[str, Sequence[str]]
) -> list[Path]:
    """The fields that `definition` does not depend on, those of nested sections included.

    `define` must be pure, and raise `UnsupportedModelError` for a config that it refuses. `choices` has the valid
    values of string fields. Fields that are null are skipped.
    """
    return [
        path
        for path, value in _leaves(config)
        if value is not None
        and not _reaches(config, path, _others(value, choices.get(path[-1], ())), define, definition)
    ]


def _reaches(
    config: Config, path: Path, others: Iterator[object], define: Callable[[Config], _T], definition: _T
) -> bool:
    was_accepted = False
    for other in others:
        try:
            changed = define(_replaced(config, path, other)) != definition
        except UnsupportedModelError:
            continue
        if changed:
            return True
        was_accepted = True
    return not was_accepted


def _leaves(section: Config, prefix: Path = ()) -> Iterator[tuple[Path, object]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*prefix, str(name)))
        else:
            yield (*prefix, str(name)), value


def _others(value: object, choices: Sequence[str]) -> Iterator[object]:
    """Other values of the same type: a value of another type would be refused for its type alone."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (other for other in (value + 1, value - 1, 2 * value) if other != value)
        case float():
            yield from (2.0 * value, value / 2.0) if value else (1.0,)
        case str():
            yield from [other for other in choices if other != value] or [value + "?"]
        case []:
            yield [0]
            yield from ([other] for other in choices)
        case [first, *rest]:
            yield from ([other, *rest] for other in _others(first, choices))
            yield rest
        case _:
            yield None


def _replaced(section: Config, path: Path, value: object) -> dict[str, object]:
    """A copy of the section with another value at the end of the path."""
    name, *rest = path
    inner = section[name]
    if rest:
        assert isinstance(inner, Mapping)
        value = _replaced(inner, tuple(rest), value)
    return {**section, name: value}
