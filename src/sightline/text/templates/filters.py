"""The filters and functions that a chat template may use.

Chooses among Jinja's filters, replaces those whose result can be much larger than their input, and adds the functions
that models' templates expect. Does not know how a template is compiled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_indent, do_round, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import safe_range
from jinja2.utils import Joiner, Namespace, pass_context, pass_environment

from sightline.text.templates import limits

MAX_JSON_INDENT = 64
MAX_DATE_LAYOUT = 256
MAX_NAMES = 1000
MAX_ROUND_DIGITS = 100

_PLAIN = "abs attr capitalize count d default e escape first float int items last length lower safe truncate upper"
"""Filters whose result is at most a few times as large as their input."""

_OVER_ELEMENTS = "dictsort groupby map max min reject rejectattr select selectattr sort title unique wordcount"
"""Filters that iterate over their input; a text has one element per character."""


def template_filters() -> dict[str, Callable[..., Any]]:
    """All filters by name. A template that uses any other filter is refused when it is compiled."""
    return {
        **{name: FILTERS[name] for name in _PLAIN.split()},
        **{name: _with_bounded_texts(FILTERS[name]) for name in _OVER_ELEMENTS.split()},
        "format": _format,
        "indent": _indent,
        "join": _join,
        "list": limits.bounded_list,
        "replace": _replace,
        "reverse": _reverse,
        "round": _round,
        "string": limits.text_of,
        "sum": _sum,
        "tojson": _tojson,
        "trim": _trim,
    }


def _with_bounded_texts(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*arguments: Any, **options: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, str):
                limits.require(len(argument) * limits.VALUE_OVERHEAD)
        return function(*arguments, **options)

    return bounded


def _format(layout: object, *values: Any) -> str:
    text = limits.text_of(layout)
    limits.check_remainder(text, values)
    return text % values


def _indent(text: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    checked = limits.text_of(text)
    limits.check_indent(checked, width)
    return do_indent(checked, width, first, blank)


@pass_environment
def _join(
    environment: jinja2.Environment, values: Iterable[Any], d: object = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return limits.joined(limits.text_of(d), map(limits.text_of, values))


def _replace(text: object, old: object, new: object, count: int | None = None) -> str:
    return limits.replaced(
        limits.text_of(text), limits.text_of(old), limits.text_of(new), -1 if count is None else count
    )


def _reverse(values: Any) -> Any:
    return values[::-1] if isinstance(values, str) else limits.bounded_list(values)[::-1]


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if not -MAX_ROUND_DIGITS <= precision <= MAX_ROUND_DIGITS:
        raise SecurityError(f"expected rounding to at most {MAX_ROUND_DIGITS} digits, got {precision}")
    return do_round(value, precision, method)


@pass_context
def _sum(context: Context, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    environment = context.environment
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    assert isinstance(environment, jinja2.sandbox.SandboxedEnvironment)
    return functools.reduce(functools.partial(environment.call_binop, context, "+"), values, start)


def _trim(text: object, chars: str | None = None) -> str:
    limits.check_pattern(chars)
    return limits.text_of(text).strip(chars)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes HTML: no model was trained on that."""
    limits.require_bounded(value)
    for width in (len(indent) if isinstance(indent, str) else indent or 0, *map(len, separators or ())):
        if width > MAX_JSON_INDENT:
            raise SecurityError(f"expected tojson to indent by at most {MAX_JSON_INDENT} characters, got {width}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    return limits.joined("", encoder.iterencode(value))


class TemplateNamespace(Namespace):
    """`namespace()` without names that start with an underscore, which could shadow attributes of Python objects."""

    # `self` has no name here, so that a template may write namespace(self=...).
    def __init__(*arguments: Any, **attributes: Any) -> None:
        names = dict(*arguments[1:], **attributes)
        if len(names) > MAX_NAMES:
            raise SecurityError(f"expected a namespace of at most {MAX_NAMES} names, got {len(names)}")
        for name in names:
            _refuse_underscore(name)
        Namespace.__init__(*arguments, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """Leaves out the values: namespaces can hold one another, so that their text would have no bound."""
        return "<Namespace>"


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"expected a namespace name without leading underscore, got {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(limits.text_of(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_DATE_LAYOUT:
        raise SecurityError(f"expected a date layout of at most {MAX_DATE_LAYOUT} characters, got {len(layout)}")
    return datetime.now().strftime(layout)


TEMPLATE_GLOBALS: Mapping[str, object] = MappingProxyType(
    {
        "dict": dict,
        "joiner": Joiner,
        "namespace": TemplateNamespace,
        "raise_exception": _raise_exception,
        "range": safe_range,
        "strftime_now": _strftime_now,
    }
)
