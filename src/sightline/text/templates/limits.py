"""Limits on what a chat template may compute: how long it runs, and how large its values may grow.

Has the meter of a rendering, the size of values, and checks for operations whose result can be much larger than their
input. Each check is made before anything large exists. Does not know Jinja's syntax: `sandbox` decides where the checks
are made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from jinja2.exceptions import SecurityError

from sightline.core.errors import RequestError

RENDER_SECONDS = 10.0
MAX_OUTPUT_CHARACTERS = 1 << 24
MAX_VALUE = 1 << 24
"""The largest size of one value. What it holds is counted as often as it is held."""
MAX_TOTAL = 1 << 28
"""The largest total size of all values that one rendering makes, which bounds what it holds at any time."""
VALUE_OVERHEAD = 64
"""The size of a value without its characters or elements: about the bytes of a small Python object."""
MAX_PIECES = MAX_VALUE // VALUE_OVERHEAD
MAX_INTEGER_BITS = 4096
MAX_WIDTH = 1000
"""The widest formatted field, in characters."""
MAX_PATTERN = 256
"""The longest text to search for from the end, or to strip: both take time proportional to the product of two
lengths."""

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SEQUENCES: tuple[type[Any], ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.items()), type({}.values()))


class RenderMeter:
    """Counts the time and the values of one rendering."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._left = MAX_TOTAL

    def tick(self) -> None:
        """Raises `RequestError` after the deadline."""
        if time.monotonic() > self._deadline:
            raise RequestError(f"the model's chat template did not finish within {self._seconds} s")

    def charge(self, size: int) -> None:
        """Counts a new value. Raises `SecurityError` if all values together are too large."""
        self._left -= size
        if self._left < 0:
            raise SecurityError(f"expected a chat template whose values have a size of at most {MAX_TOTAL} together")
        self.tick()


def require(size: int) -> None:
    """Raises `SecurityError` if a value of this size would be too large."""
    if size > MAX_VALUE:
        raise SecurityError(f"expected values of a size of at most {MAX_VALUE} in a chat template, got {size}")


def own_size(value: Any) -> int:
    """The size of a value without what it holds."""
    if isinstance(value, str):
        return VALUE_OVERHEAD + len(value)
    elements = len(value) if isinstance(value, dict) or isinstance(value, _SEQUENCES) else 0  # noqa: SIM101
    return VALUE_OVERHEAD + 8 * elements


def require_bounded(value: object) -> None:
    """Raises `SecurityError` if a value is too large with everything that it holds, directly and indirectly.

    A list that holds another list twice, and so on, is small in memory, but its text and its comparison are not.
    """
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise SecurityError(f"expected integers of at most {MAX_INTEGER_BITS} bits in a chat template")
    size = 0
    pending: list[Any] = [value]
    while pending:
        held = pending.pop()
        size += VALUE_OVERHEAD
        if isinstance(held, str):
            size += len(held)
        elif isinstance(held, dict):
            pending.extend(held)
            pending.extend(held.values())
        elif isinstance(held, _SEQUENCES):
            pending.extend(held)
        require(size)


def text_of(value: object) -> str:
    """`str(value)`. Raises `SecurityError` if the text would be too long."""
    if not isinstance(value, str):
        require_bounded(value)
    return str(value)


def bounded_list(values: Iterable[Any]) -> list[Any]:
    """`list(values)`. Raises `SecurityError` if it would be too long."""
    found = list(islice(values, MAX_PIECES + 1))
    require(len(found) * VALUE_OVERHEAD)
    return found


def check_product(left: object, right: object) -> None:
    """Raises `SecurityError` if `left * right` would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() + right.bit_length())
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            require(len(sequence) * count * (1 if isinstance(sequence, str) else VALUE_OVERHEAD))


def check_power(left: object, right: object) -> None:
    """Raises `SecurityError` if `left ** right` would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() * right)


def _require_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise SecurityError(f"expected integers of at most {MAX_INTEGER_BITS} bits in a chat template, got {bits}")


def check_remainder(left: object, right: object) -> None:
    """Raises `SecurityError` if `left % right` would format too long a text."""
    if not isinstance(left, str):
        return
    if "%(" in left:
        raise SecurityError("expected a format without names in a chat template, got '%('")
    for width, precision in re.findall(r"%[#0\- +]*(\*|\d*)\.?(\*|\d*)", left):
        check_width(width)
        check_width(precision)
    require_bounded(right)
    fields = left.count("%")
    longest = max((len(text_of(value)) for value in (right if isinstance(right, tuple) else (right,))), default=0)
    require(len(left) + fields * (MAX_WIDTH + longest))


def check_width(width: str) -> None:
    """Checks the digits of a width or precision in a format; they may be empty."""
    if width == "*" or len(width) > 4 or int(width or 0) > MAX_WIDTH:
        raise SecurityError(f"expected a width of at most {MAX_WIDTH} in a format, got {width[:20]}")


def check_indent(text: str, indent: int | str) -> None:
    """Raises `SecurityError` if indenting each line of `text` makes it too long; `indent` is a width or a text."""
    width = len(indent) if isinstance(indent, str) else indent
    require(len(text) + (_count_lines(text) + 1) * max(width, 0))


def _count_lines(text: str) -> int:
    return sum(text.count(end) for end in _LINE_ENDS)


def check_pattern(*patterns: object) -> None:
    """Raises `SecurityError` for a pattern whose search would be slow."""
    for pattern in patterns:
        if isinstance(pattern, str) and len(pattern) > MAX_PATTERN:
            raise SecurityError(f"expected a pattern of at most {MAX_PATTERN} characters, got {len(pattern)}")


def replaced(text: str, old: str, new: str, count: int = -1) -> str:
    """`text.replace(old, new, count)`, with a limit on the result."""
    found = text.count(old)
    found = found if count < 0 else min(found, count)
    require(len(text) + found * max(len(new) - len(old), 0))
    return text.replace(old, new, count)


def joined(separator: str, values: Iterable[Any]) -> str:
    """`separator.join(values)`, with a limit on the result."""
    pieces: list[Any] = []
    size = 0
    for value in values:
        size += len(separator) + (len(value) if isinstance(value, str) else 0)
        require(size)
        pieces.append(value)
    return separator.join(pieces)


def _split(text: str, separator: str | None = None, maxsplit: int = -1) -> list[str]:
    return _cut(text.split, separator, maxsplit)


def _rsplit(text: str, separator: str | None = None, maxsplit: int = -1) -> list[str]:
    check_pattern(separator)
    return _cut(text.rsplit, separator, maxsplit)


def _cut(method: Callable[[str | None, int], list[str]], separator: str | None, maxsplit: int) -> list[str]:
    """Splits into at most `MAX_PIECES + 1` pieces, and raises `SecurityError` if there are more than allowed."""
    if 0 <= maxsplit < MAX_PIECES:
        return method(separator, maxsplit)
    pieces = method(separator, MAX_PIECES)
    require(len(pieces) * VALUE_OVERHEAD)
    return pieces


def _splitlines(text: str, keepends: bool = False) -> list[str]:
    require((_count_lines(text) + 1) * VALUE_OVERHEAD)
    return text.splitlines(keepends)


def _with_short_pattern(name: str) -> Callable[..., Any]:
    method = str.__dict__[name]

    def checked(text: str, *arguments: Any) -> Any:
        check_pattern(*arguments)
        return method(text, *arguments)

    return checked


GUARDED_METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "replace": replaced,
        "join": joined,
        "split": _split,
        "rsplit": _rsplit,
        "splitlines": _splitlines,
        **{name: _with_short_pattern(name) for name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition")},
    }
)
"""Replacements for string methods whose result or cost can be large: functions of the text and the arguments."""

_TEXT_METHODS = """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper lower partition removeprefix removesuffix startswith swapcase title
    upper
"""
ALLOWED_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, frozenset(_TEXT_METHODS.split())),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
    ((bytes, bytearray, int, float, complex, set, frozenset, type), frozenset()),
)
"""The attributes of built-in types that a template may use, besides `GUARDED_METHODS`. No method among them changes a
value, or returns one that is much larger than its input."""
