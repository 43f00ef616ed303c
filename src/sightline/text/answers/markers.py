"""Markers in text that arrives in pieces. White space within a marker may be any, up to a bound, or none."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

MAX_SPACE = 64
"""The most white space before a marker, and in each place within one. More is text: what is held back stays little."""


class Found(NamedTuple):
    """A marker in a text, or the place from which on one may begin."""

    start: int
    end: int
    marker: str | None
    """None: from `start` on, the text may be the beginning of a marker, and there is none before."""


@lru_cache(maxsize=256)
def _parts(marker: str) -> tuple[str, ...]:
    """The parts of a marker between white space. Cached, because each piece of text is searched for several."""
    return tuple(marker.split())


def match_marker(text: str, place: int, marker: str) -> int | None:
    """The place behind a marker that stands at `place`; -1 if more text is needed to know; None if there is none."""
    for part in _parts(marker):
        first = place
        while place < len(text) and text[place].isspace():
            place += 1
        if place - first > MAX_SPACE:
            return None
        if not text.startswith(part, place):
            return -1 if part.startswith(text[place:]) else None
        place += len(part)
    return place


def find_marker(text: str, markers: Iterable[str]) -> Found:
    """The first of some markers in a text, of which none is the beginning of another."""
    found = (_find(text, marker) for marker in markers)
    return min(found, key=lambda each: (each.start, each.marker is None), default=Found(len(text), len(text), None))


def _find(text: str, marker: str) -> Found:
    first, place = _parts(marker)[0], 0
    if first[0] not in text:
        return Found(len(text), len(text), None)
    while (start := text.find(first, place)) >= 0:
        match match_marker(text, start, marker):
            case None:
                place = start + 1
            case -1:
                return Found(start, len(text), None)
            case end:
                return Found(start, end, marker)
    for length in range(min(len(first) - 1, len(text)), 0, -1):
        if text.endswith(first[:length]):
            return Found(len(text) - length, len(text), None)
    return Found(len(text), len(text), None)
