"""Shrinking: the smallest case that still fails, and which dimensions it fails for.

Each dimension in turn is given its plain value; where the case still fails it keeps it, and where it does not the
dimension matters. Of a scale that matters the border is then searched for between the two. Bounded in runs and in time,
which only a backend that fails pays for. Knows cases, and a function that tries one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from sightline.attention.dimensions import Company, Dimension, Value
from sightline.testing.conformance.cases import TIGHT, Case
from sightline.testing.conformance.domains import Domains
from sightline.testing.conformance.generator import repaired

_MOST_RUNS = 60
_MOST_SECONDS = 12.0
_PLAIN = {
    Dimension.ROWS: 3,
    Dimension.NEW_TOKENS: 4,
    Dimension.CONTEXT: 20,
    Dimension.STEP_TOKENS: 1,
    Dimension.LAYERS: 2,
    Dimension.KEY_HEADS: 2,
    Dimension.WINDOW: 8,
    Dimension.POOL_SLOTS: TIGHT,
}
_FIRST = (Dimension.LAYERS, Dimension.KEY_HEADS, Dimension.ROWS, Dimension.NEW_TOKENS, Dimension.CONTEXT)
"""What costs most to run is made smaller first."""
Fails: TypeAlias = Callable[[Case], bool]


@dataclass
class Shrunk:
    """The smallest case that was found, and why it is the smallest."""

    case: Case
    matters: dict[Dimension, str] = field(default_factory=dict)
    """By dimension: what it takes for the case to fail."""

    def __str__(self) -> str:
        told = " and ".join(self.matters.values())
        return f"fails {told}; everything else plain" if told else "fails with everything plain"


def shrink(case: Case, domains: Domains, fails: Fails) -> Shrunk:
    """`case` fails; so does what is returned."""
    bounded = _Bounded(fails)
    shrunk = Shrunk(case)
    passing: dict[Dimension, Value] = {}
    for dimension in _order(case):
        plain = _plain(dimension, domains)
        if shrunk.case.values.get(dimension, plain) == plain:
            continue
        simpler = _with(shrunk.case, {dimension: plain})
        if bounded(simpler):
            shrunk.case = simpler
        else:
            passing[dimension] = plain
    # The window first: a row must be longer for it to be seen.
    for dimension, plain in sorted(passing.items(), key=lambda each: each[0] is not Dimension.WINDOW):
        # What mattered beside others may not matter alone.
        simpler = _with(shrunk.case, {dimension: plain})
        if dimension not in shrunk.case.values or simpler.values == shrunk.case.values:
            continue
        if bounded(simpler):
            shrunk.case = simpler
            continue
        shrunk.matters[dimension] = _told(shrunk, dimension, plain, bounded)
    return shrunk


class _Bounded:
    """Tries cases as long as there is time; then nothing fails any more, so that nothing becomes smaller."""

    def __init__(self, fails: Fails) -> None:
        self._fails = fails
        self._runs = 0
        self._until = time.monotonic() + _MOST_SECONDS

    def __call__(self, case: Case) -> bool:
        self._runs += 1
        if self._runs > _MOST_RUNS or time.monotonic() > self._until:
            return False
        return self._fails(case)


def _order(case: Case) -> list[Dimension]:
    return [*_FIRST, *(dimension for dimension in case.values if dimension not in _FIRST)]


def _plain(dimension: Dimension, domains: Domains) -> Value:
    if not dimension.is_scale:
        return domains.values[dimension][0]
    span = domains.scales[dimension]
    plain = _PLAIN[dimension]
    return plain if plain == TIGHT else min(max(plain, span.low), span.high)


def _with(case: Case, changes: Mapping[Dimension, Value]) -> Case:
    """The case with something changed, and with what follows from that."""
    values = {**case.values, **changes}
    if int(values[Dimension.ROWS]) > 1 and values[Dimension.COMPANY] == Company.ALONE.value:
        moved = Dimension.ROWS if Dimension.COMPANY in changes else Dimension.COMPANY
        values[moved] = 1 if moved is Dimension.ROWS else Company.SHORTER.value
    elif (
        int(values[Dimension.ROWS]) == 1
        and changes.get(Dimension.COMPANY, Company.ALONE.value) != values[Dimension.COMPANY]
    ):
        values[Dimension.ROWS] = _PLAIN[Dimension.ROWS]
    return Case(repaired(values), case.seed, case.most_pool_bytes)


def _told(shrunk: Shrunk, dimension: Dimension, plain: Value, fails: Fails) -> str:
    """What it takes of a dimension, with the border of a scale, which the case is then moved to."""
    if not dimension.is_scale:
        return f"with {dimension.value} {shrunk.case.values[dimension]}"
    bad, good = int(shrunk.case.values[dimension]), int(plain)
    while abs(bad - good) > 1:
        between = (bad + good) // 2
        tried = _with(shrunk.case, {dimension: between})
        if fails(tried):
            bad, shrunk.case = between, tried
        else:
            good = between
    if dimension is Dimension.POOL_SLOTS:
        return f"with {bad} {dimension.value}"
    if bad > good:
        return f"from {bad} {dimension.value} on ({good} passes)"
    return f"up to {bad} {dimension.value} ({good} passes)"
