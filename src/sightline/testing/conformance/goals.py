"""Goals: the pairs of ends and values that must occur together in a case, and those that a given case reaches.

As in `Coverage.gaps`: the four corners of every two scales, both ends of every scale with each value of another
dimension, and every two values. A goal is an integer, so that millions can be looked up. Knows numbers and names. Does
not know how cases are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NewType, TypeAlias

from sightline.attention.contract import CachePolicy
from sightline.attention.dimensions import Company, Dimension, Span, Value, can_meet, possible_span
from sightline.testing.conformance.cases import Case
from sightline.testing.conformance.domains import Domains

LOW, HIGH = "low", "high"
End: TypeAlias = tuple[Dimension, Value]
"""A value of a dimension, or LOW or HIGH of a scale."""
Goal = NewType("Goal", int)

DERIVED = frozenset({Dimension.STEP_TOKENS})
"""Scales whose number follows from the other values of a case."""
WITHOUT_CONTEXT: frozenset[End] = frozenset({(Dimension.CONTEXT, LOW), (Dimension.POLICY, CachePolicy.TRANSIENT.value)})
_ENTANGLED = ({Dimension.STEP_TOKENS, Dimension.ROWS}, {Dimension.STEP_TOKENS, Dimension.NEW_TOKENS})
"""Pairs of scales that are no goals, except for the largest step with the most rows: one follows from the other."""
_FULL_STEP: frozenset[End] = frozenset({(Dimension.ROWS, HIGH), (Dimension.STEP_TOKENS, HIGH)})
_ALONE: frozenset[End] = frozenset(
    {(Dimension.ROWS, LOW), (Dimension.STEP_TOKENS, LOW), (Dimension.COMPANY, Company.ALONE.value)}
)
_MOST_ENDS = 1 << 12
LEAST_WINDOW = 2
"""In a smaller window a query sees only itself, which hides whatever is wrong with other keys."""


class Goals:
    """The goals of some domains."""

    def __init__(self, domains: Domains) -> None:
        self.domains = domains
        self.dimensions = tuple(each for each in Dimension if each in domains.scales or each in domains.values)
        self._ends = [end for dimension in self.dimensions for end in self._ends_of(dimension)]
        self._numbers = {end: number for number, end in enumerate(self._ends)}
        self._spans = {
            (end, scale): possible_span(*end, scale, domains.scales)
            for end in self._ends
            if not end[0].is_scale
            for scale in domains.scales
        }
        self.all = frozenset(
            self.goal(one, two)
            for first, second in itertools.combinations(self.dimensions, 2)
            for one, two in itertools.product(self._ends_of(first), self._ends_of(second))
            if self._is_possible(one, two)
        )

    def goal(self, one: End, two: End) -> Goal:
        """Returns the goal of two ends, in either order, or -1 if the domains do not have one of them."""
        a, b = self.number(one), self.number(two)
        return Goal(-1) if a < 0 or b < 0 else self.of_numbers(a, b)

    def number(self, end: End) -> int:
        """Returns the number of an end, or -1 if the domains do not have it."""
        return self._numbers.get(end, -1)

    @staticmethod
    def of_numbers(one: int, two: int) -> Goal:
        """Returns the goal of two ends, given their numbers."""
        return Goal(one * _MOST_ENDS + two if one < two else two * _MOST_ENDS + one)

    def ends(self, goal: Goal) -> tuple[End, End]:
        return self._ends[goal // _MOST_ENDS], self._ends[goal % _MOST_ENDS]

    def order(self, goal: Goal) -> tuple[int, int]:
        """A sort key that puts corners first: they cost most, and whatever else their cases reach is free."""
        return -sum(dimension.is_scale for dimension, _ in self.ends(goal)), goal

    def reached(self, case: Case) -> set[Goal]:
        """Returns the goals that a case reaches."""
        return self._reached(case, (), self.domains.scales)

    def reached_closely(self, case: Case) -> set[Goal]:
        """Returns the goals that a case reaches with company: a second layer, row, head and key, and a cache.

        Some faults show only with company, such as reading a neighbour's entries.
        """
        if case.window is not None and case.window < LEAST_WINDOW:
            return set()
        must_have = _impossible_without(
            layers=case.number(Dimension.LAYERS),
            rows=case.number(Dimension.ROWS),
            q_heads=case.num_q_heads,
            context=case.number(Dimension.CONTEXT),
            main_len=case.main_len,
            policies={case.name(Dimension.POLICY)},
        )
        return self._reached(case, must_have, {**self.domains.scales, **self._close_windows})

    @cached_property
    def close(self) -> frozenset[Goal]:
        """The goals without those that no case of the domains reaches with company, whatever its values."""
        most = {scale: span.high for scale, span in self.domains.scales.items()}
        must_have = _impossible_without(
            layers=most[Dimension.LAYERS],
            rows=most[Dimension.ROWS],
            q_heads=self.domains.most_q_heads,
            context=most[Dimension.CONTEXT],
            main_len=most[Dimension.CONTEXT] + most[Dimension.NEW_TOKENS],
            policies=set(self.domains.values[Dimension.POLICY]),
        )
        return frozenset(goal for goal in self.all if all(ends & set(self.ends(goal)) for ends in must_have))

    @cached_property
    def _close_windows(self) -> dict[Dimension, Span]:
        """The windows in which a query sees more than its own key."""
        window = self.domains.scales.get(Dimension.WINDOW)
        if window is None or window.high < LEAST_WINDOW:
            return {}
        return {Dimension.WINDOW: Span(max(window.low, LEAST_WINDOW), window.high)}

    def _reached(self, case: Case, must_have: Iterable[frozenset[End]], within: Mapping[Dimension, Span]) -> set[Goal]:
        """Returns the goals that a case reaches for these spans, and that have an end of each `must_have`."""
        point, goal = case.point(), self.goal
        values: list[End] = [(dimension, value) for dimension, value in point.items() if not dimension.is_scale]
        scales = [scale for scale in self.domains.scales if scale in point]
        found = {(one, two) for one, two in itertools.combinations(values, 2)}
        for scale in scales:
            number = int(point[scale])
            for value in values:
                span = self._spans.get((value, scale))
                if span is not None and scale is Dimension.WINDOW:
                    span = within[scale]
                if span is not None:
                    found |= {(value, (scale, which)) for which in _ends_at(case, scale, number, span)}
        ends = [(scale, which) for scale in scales for which in _ends_at(case, scale, int(point[scale]), within[scale])]
        found |= {(one, two) for one, two in itertools.combinations(ends, 2) if one[0] is not two[0]}
        for wanted in must_have:
            found = {(one, two) for one, two in found if one in wanted or two in wanted}
        if case.window is not None and case.window >= case.main_len:
            found = {pair for pair in found if not needs_longer_rows(*pair)}
        return {goal(one, two) for one, two in found} & self.all

    def _ends_of(self, dimension: Dimension) -> Iterator[End]:
        if dimension.is_scale:
            yield from ((dimension, LOW), (dimension, HIGH))
        else:
            yield from ((dimension, value) for value in self.domains.values[dimension])

    def _is_possible(self, one: End, two: End) -> bool:
        """True if a case can have both ends."""
        if one[0].is_scale and two[0].is_scale:
            return {one[0], two[0]} not in _ENTANGLED or {one, two} == _FULL_STEP
        if not one[0].is_scale and not two[0].is_scale:
            return can_meet(one, two)
        value, (scale, which) = (two, one) if one[0].is_scale else (one, two)
        possible = self._spans[value, scale]
        if possible is None:
            return False
        if value == (Dimension.COMPANY, Company.ALONE.value) and scale is Dimension.ROWS:
            return which == LOW
        # If only the far end is possible, both ends are the same number.
        is_far_only = possible.low == possible.high != self.domains.scales[scale].low
        return not (is_far_only and which == LOW)


def needs_longer_rows(one: End, two: End) -> bool:
    """True for a large window, which has no effect without a longer row, unless the other end forbids longer rows."""
    return (Dimension.WINDOW, HIGH) in (one, two) and not {one, two} & WITHOUT_CONTEXT


def _ends_at(case: Case, scale: Dimension, number: int, span: Span) -> tuple[str, ...]:
    is_low = case.is_pool_tight if scale is Dimension.POOL_SLOTS else number <= span.low
    return (LOW,) * is_low + (HIGH,) * (number >= span.high)


def _impossible_without(
    *, layers: int, rows: int, q_heads: int, context: int, main_len: int, policies: set[Value]
) -> list[frozenset[End]]:
    """Returns, for each kind of company that these numbers lack, the ends that make it impossible."""
    transient = CachePolicy.TRANSIENT.value
    lacking: tuple[tuple[bool, frozenset[End]], ...] = (
        (layers < 2, frozenset({(Dimension.LAYERS, LOW)})),
        (rows < 2, _ALONE),
        (q_heads < 2, frozenset({(Dimension.KEY_HEADS, LOW), (Dimension.GROUP_SIZE, 1)})),
        (context < 1, WITHOUT_CONTEXT),
        (policies == {transient}, frozenset({(Dimension.POLICY, transient)})),
        (main_len < 3, frozenset({(Dimension.CONTEXT, LOW), (Dimension.NEW_TOKENS, LOW)})),
    )
    return [ends for lacks, ends in lacking if lacks]
