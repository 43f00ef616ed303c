"""Shrinks a failing case, and finds the dimensions that matter.

Gives each dimension its plain value in turn. If the case still fails, it keeps the plain value; if not, the dimension
matters. For a scale that matters, the border is then found by bisection. Limited in runs and time. Knows cases, and a
function that tries one.
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
"""Shrunk first, because they make a case slow."""
Fails: TypeAlias = Callable[[Case], bool]


@dataclass
class Shrunk:
    """The smallest failing case that was found, and the dimensions that matter."""

    case: Case
    matters: dict[Dimension, str] = field(default_factory=dict)
    """The condition on each dimension under which the case fails, in words."""

    def __str__(self) -> str:
        told = " and ".join(self.matters.values())
        return f"fails {told}; everything else plain" if told else "fails with everything plain"


def shrink(case: Case, domains: Domains, fails: Fails) -> Shrunk:
    """Returns the smallest case that fails; `case` must fail."""
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
    # The window first: it has an effect only in a longer row.
    for dimension, plain in sorted(passing.items(), key=lambda each: each[0] is not Dimension.WINDOW):
        # A dimension that mattered before others were shrunk may not matter any more.
        simpler = _with(shrunk.case, {dimension: plain})
        if dimension not in shrunk.case.values or simpler.values == shrunk.case.values:
            continue
        if bounded(simpler):
            shrunk.case = simpler
            continue
        shrunk.matters[dimension] = _told(shrunk, dimension, plain, bounded)
    return shrunk


class _Bounded:
    """Tries cases within the limits, and then reports every case as passing, so that shrinking stops."""

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
    """Returns the case with changed values, and with others adapted to them."""
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
    """Describes how a dimension matters. For a scale, finds the border and moves the case to it."""
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
