"""Generates few and cheap cases that reach every goal of some domains.

Goals are reached first with company, then without. A case is built around a goal that is not yet reached: dimension by
dimension, it gets the value that reaches most further goals. Of several such cases, the one with most goals for its
time is taken. Random cases follow, for faults in the middle of a scale. Deterministic. Knows numbers and names, and no
backend.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TypeAlias

from sightline.attention.contract import CachePolicy
from sightline.attention.dimensions import (
    IN_ORDER,
    PLAIN_FEATURES,
    Company,
    Dimension,
    KeptStates,
    Reuse,
    Sharing,
    Span,
    Value,
    can_meet,
    features_name,
    is_sparse,
    possible_span,
)
from sightline.attention.kinds import Feature
from sightline.testing.conformance.cases import TIGHT, Case
from sightline.testing.conformance.domains import Domains, borders
from sightline.testing.conformance.goals import DERIVED, HIGH, LEAST_WINDOW, LOW, End, Goal, Goals, needs_longer_rows

_TRIES = 3
_MOST_TRIES = 8
"""Tries per goal: some cases do not reach the goal, or take too long."""
_NUM_MIDDLE = 30
"""Random cases within the domains."""
_CASE_SECONDS = 0.22
"""The time that a case may take, unless its goal alone takes more."""
_MOST_SECONDS = 6.0
"""The most that a case may take, unless its goal takes more with everything else as cheap as possible."""
_MIDDLE_SECONDS = 0.25
_PLAIN_NUMBERS = {
    Dimension.ROWS: 2,
    Dimension.NEW_TOKENS: 5,
    Dimension.LAYERS: 2,
    Dimension.KEY_HEADS: 2,
    Dimension.WINDOW: 9,
    Dimension.POOL_SLOTS: TIGHT,
}
_ANY_PAGE = 16
"""The page size, for layers whose states have none."""
_STAIRS = (2, 3, 4, 6, 8)
"""New tokens per row in steps with the most rows: many tokens in a step, few in a row."""
_CROWD = 8
"""Rows with the longest context, and the divisor of that context for the most rows: steps of many keys."""
_COMPILED_FOR = (
    Dimension.HEAD_DIM,
    Dimension.VALUE_DIM,
    Dimension.CONV_WIDTH,
    Dimension.UNIT_KEYS,
    Dimension.TOP_K,
    Dimension.RATIO,
    Dimension.OVERLAP,
    Dimension.GROUP_SIZE,
    Dimension.DTYPE,
    Dimension.CACHE_DTYPE,
    Dimension.FEATURES,
)
_COSTLY = frozenset(
    {
        *(dimension for dimension in Dimension if dimension.is_scale),
        Dimension.COMPANY,
        Dimension.SHARING,
        Dimension.GROUP_SIZE,
        Dimension.HEAD_DIM,
        Dimension.VALUE_DIM,
        Dimension.TOP_K,
        Dimension.RATIO,
        Dimension.PAGE_SIZE,
        Dimension.KEPT,
        Dimension.REUSE,
    }
)
"""Dimensions whose values differ in the time that a case takes."""
_TURNS = (
    # Dimensions that restrict others come first.
    Dimension.POLICY,
    Dimension.COMPANY,
    Dimension.SHARING,
    Dimension.PAGE_ORDER,
    Dimension.FEATURES,
)


def cases_for(domains: Domains, seconds: float | None = None, seed: int = 0) -> tuple[Case, ...]:
    """Returns cases that reach every goal of the domains, or within `seconds` those that reach most for their time."""
    goals, cases = _all_cases(domains, seed)
    return cases if seconds is None else tuple(_best(cases, goals, seconds))


@lru_cache(8)
def _all_cases(domains: Domains, seed: int) -> tuple[Goals, tuple[Case, ...]]:
    """Cached: it takes seconds, and every share of a check needs the same cases."""
    goals = Goals(domains)
    return goals, tuple(_Builder(goals, seed).cases())


Reach: TypeAlias = Callable[[Case], set[Goal]]
_APART: frozenset[End] = frozenset(
    {
        (Dimension.LAYERS, 1),
        (Dimension.ROWS, 1),
        (Dimension.KEY_HEADS, 1),
        (Dimension.CONTEXT, 0),
        (Dimension.POLICY, CachePolicy.TRANSIENT.value),
        (Dimension.COMPANY, Company.ALONE.value),
    }
)
"""Values that leave a case without company."""


class _Builder:
    """Builds the cases of some domains."""

    def __init__(self, goals: Goals, seed: int) -> None:
        self._goals = goals
        self._domains = goals.domains
        self._draw = random.Random(seed)
        self._compiled: set[tuple[Value, ...]] = set()
        self._cases: list[Case] = []

    @cached_property
    def _free(self) -> tuple[Dimension, ...]:
        """The dimensions whose values are chosen for a case."""
        return tuple(each for each in self._goals.dimensions if each not in DERIVED)

    @cached_property
    def _cheapest(self) -> dict[Dimension, Value]:
        cheapest = {dimension: min(values, key=_cheapness) for dimension, values in self._domains.values.items()}
        several = [int(size) for size in self._domains.values[Dimension.GROUP_SIZE] if int(size) > 1]
        if self._has_one_key_head and several:
            cheapest[Dimension.GROUP_SIZE] = min(several)
        if Dimension.TOP_K in cheapest:
            # The choice of a single token says little.
            cheapest[Dimension.TOP_K] = self._domains.values[Dimension.TOP_K][0]
        return cheapest

    @property
    def _has_one_key_head(self) -> bool:
        """If True, neighbouring heads belong to one group."""
        return self._domains.scales[Dimension.KEY_HEADS].high == 1

    def cases(self) -> list[Case]:
        for is_close in (True, False):
            reach = self._goals.reached_closely if is_close else self._goals.reached
            missing = set(self._goals.close if is_close else self._goals.all)
            missing -= {goal for case in self._cases for goal in reach(case)}
            for goal in sorted(missing, key=self._goals.order):
                case = self._best_around(goal, missing, reach, is_close=is_close) if goal in missing else None
                if case is not None:
                    self._take(case)
                    missing -= reach(case)
        rows, context = (self._domains.scales[each].high for each in (Dimension.ROWS, Dimension.CONTEXT))
        more = [self._crowd(rows, new, 37) for new in _STAIRS]
        more += [self._crowd(min(rows, _CROWD), 1, context), self._crowd(rows, 1, context * _CROWD // rows)]
        more = [case for case in more if case.seconds <= _MOST_SECONDS]
        more += self._middle()
        return [*self._without_needless(more), *more]

    def _without_needless(self, others: Sequence[Case]) -> list[Case]:
        """Drops cases whose goals are all reached by other cases, the costliest first."""
        brought = {case: _both_ways(self._goals, case) for case in (*self._cases, *others)}
        counts = Counter(goal for goals in brought.values() for goal in goals)
        needless: set[Case] = set()
        for case in sorted(self._cases, key=lambda each: -each.seconds):
            if all(counts[goal] > 1 for goal in brought[case]):
                needless.add(case)
                counts.subtract(brought[case])
        return [case for case in self._cases if case not in needless]

    def _take(self, case: Case) -> None:
        self._cases.append(case)
        self._compiled.add(_compiled_for(case))

    def _best_around(self, goal: Goal, missing: set[Goal], reach: Reach, *, is_close: bool) -> Case | None:
        """Returns a case that reaches the goal, and many others for its time, or None if there is none."""
        fixed = self._fixed(goal)
        if fixed is None:
            return None
        most = max(_MOST_SECONDS, 2 * self._completed(fixed).seconds)
        able: list[tuple[float, Case]] = []
        for number in range(_MOST_TRIES):
            case = self._around(fixed, missing, number, is_close=is_close)
            goals = reach(case) if case.seconds <= most else set()
            if goal in goals:
                able.append((self._worth(case, goals & missing), case))
            if len(able) == _TRIES:
                break
        return max(able, key=lambda each: each[0], default=(0.0, None))[1]

    def _worth(self, case: Case, goals: set[Goal]) -> float:
        is_new = _compiled_for(case) not in self._compiled
        return len(goals) / (case.seconds + self._domains.compile_seconds * is_new + 0.02)

    def _around(self, fixed: Mapping[Dimension, Value], missing: set[Goal], number: int, *, is_close: bool) -> Case:
        chosen = self._seen(fixed) if is_close else dict(fixed)
        if number and self._domains.compile_seconds:
            chosen = self._with_known_spec(chosen)
        most = max(_CASE_SECONDS, 1.3 * self._completed(chosen).seconds)
        turns = [each for each in self._free if each not in chosen]
        self._draw.shuffle(turns)
        turns.sort(key=lambda each: _TURNS.index(each) if each in _TURNS and number % 2 else len(_TURNS))
        apart = _APART if is_close else frozenset()
        if is_close and self._has_one_key_head:
            apart |= {(Dimension.GROUP_SIZE, 1)}
        for dimension in turns:
            chosen[dimension] = self._chosen(dimension, chosen, missing, most, apart)
            if is_close:
                chosen = self._seen(chosen)
        return replace(self._completed(chosen), seed=1000 * number + len(self._cases))

    def _fixed(self, goal: Goal) -> dict[Dimension, Value] | None:
        """Returns the values that the goal requires, or None if they contradict each other."""
        fixed: dict[Dimension, Value] = {}
        ends = dict(self._goals.ends(goal))
        if needs_longer_rows(*self._goals.ends(goal)):
            ends[Dimension.CONTEXT] = HIGH
        for dimension, value in ends.items():
            if dimension is Dimension.STEP_TOKENS:
                wanted = {Dimension.NEW_TOKENS: value} | ({Dimension.ROWS: value} if value == LOW else {})
            else:
                wanted = {dimension: value}
            for each, end in wanted.items():
                number: Value = self._number(each, str(end), ends) if each.is_scale else end
                if fixed.setdefault(each, number) != number:
                    return None
        most, longest = (self._domains.scales[each].high for each in (Dimension.STEP_TOKENS, Dimension.NEW_TOKENS))
        if ends.get(Dimension.STEP_TOKENS) == HIGH and longest < most:
            # One row cannot have all tokens of the largest step.
            fixed[Dimension.STEP_TOKENS] = most
            fixed.setdefault(Dimension.ROWS, -(-most // longest))
        return fixed if self._is_allowed(fixed) else None

    def _with_known_spec(self, chosen: dict[Dimension, Value]) -> dict[Dimension, Value]:
        """Adds the spec of another case to the chosen values, if one fits."""
        known = [each for each in _COMPILED_FOR if each in self._domains.values]
        specs = [dict(zip(known, values, strict=True)) for values in sorted(self._compiled, key=str)]
        fitting = [spec for spec in specs if all(spec.get(each, value) == value for each, value in chosen.items())]
        return {**chosen, **self._draw.choice(fitting)} if fitting else chosen

    def _number(self, scale: Dimension, end: str, beside: Mapping[Dimension, Value] | None = None) -> int:
        """Returns the number at an end of a scale, within what the other values allow."""
        if scale is Dimension.POOL_SLOTS and end == LOW:
            return TIGHT
        span = self._domains.scales[scale]
        for dimension, value in (beside or {}).items():
            if not dimension.is_scale:
                span = possible_span(dimension, value, scale, {**self._domains.scales, scale: span}) or span
        return span.high if end == HIGH else span.low

    @staticmethod
    def _seen(chosen: Mapping[Dimension, Value]) -> dict[Dimension, Value]:
        """Widens a window of 1, in which a query sees only itself."""
        window = chosen.get(Dimension.WINDOW)
        return {**chosen, **({Dimension.WINDOW: LEAST_WINDOW} if window == 1 else {})}

    def _chosen(
        self,
        dimension: Dimension,
        chosen: Mapping[Dimension, Value],
        missing: set[Goal],
        most: float,
        apart: frozenset[End],
    ) -> Value:
        """Returns the allowed value that reaches most missing goals with those chosen, if possible not in `apart`."""
        options = list(self._options(dimension, chosen))
        self._draw.shuffle(options)
        allowed = [value for value in options if self._is_allowed({**chosen, dimension: value})]
        allowed = [value for value in allowed if (dimension, value) not in apart] or allowed
        beside = [number for each in chosen.items() if (number := self._goals.number(self._end(*each))) >= 0]
        ranked = sorted(allowed, key=lambda value: -self._gain((dimension, value), beside, missing))
        if not ranked or dimension not in _COSTLY:
            return (ranked or options)[0]
        seconds = {}
        for value in ranked:
            if value == self._cheapest.get(dimension) or (
                dimension.is_scale and self._end(dimension, value)[1] != HIGH
            ):
                return value
            seconds[value] = self._completed({**chosen, dimension: value}).seconds
            if seconds[value] <= most:
                return value
        return min(ranked, key=lambda value: seconds[value])

    def _options(self, dimension: Dimension, chosen: Mapping[Dimension, Value]) -> Iterator[Value]:
        if not dimension.is_scale:
            has_window = dimension is Dimension.FEATURES and Dimension.WINDOW in chosen
            able = self._domains.values[dimension]
            yield from [value for value in able if _has_window(value)] if has_window else able
            return
        for end in (LOW, HIGH):
            yield self._number(dimension, end, chosen)
        yield self._plain_number(dimension, chosen)

    def _plain_number(self, scale: Dimension, chosen: Mapping[Dimension, Value]) -> int:
        span = self._domains.scales[scale]
        pages = self._domains.values.get(Dimension.PAGE_SIZE, (_ANY_PAGE,))
        page = int(chosen.get(Dimension.PAGE_SIZE, max(map(int, pages))))
        plain = 2 * page + 5 if scale is Dimension.CONTEXT else _PLAIN_NUMBERS[scale]
        return plain if plain == TIGHT else min(max(plain, span.low), span.high)

    def _gain(self, chosen: End, beside: Sequence[int], missing: set[Goal]) -> int:
        """Counts the missing goals of a value with the ends `beside` it, which are given by number."""
        own, of_numbers = self._goals.number(self._end(*chosen)), self._goals.of_numbers
        return 0 if own < 0 else sum(of_numbers(own, other) in missing for other in beside)

    def _end(self, dimension: Dimension, value: Value) -> End:
        if not dimension.is_scale:
            return dimension, value
        span = self._domains.scales[dimension]
        least = max(span.low, LEAST_WINDOW) if dimension is Dimension.WINDOW else span.low
        is_low = value == TIGHT if dimension is Dimension.POOL_SLOTS else int(value) <= least
        return dimension, LOW if is_low else HIGH if int(value) >= span.high else "between"

    def _is_allowed(self, chosen: Mapping[Dimension, Value]) -> bool:
        """True if the chosen values can be in one case."""
        rows, context = chosen.get(Dimension.ROWS), chosen.get(Dimension.CONTEXT)
        company, sharing = chosen.get(Dimension.COMPANY), chosen.get(Dimension.SHARING)
        new, order = chosen.get(Dimension.NEW_TOKENS), chosen.get(Dimension.PAGE_ORDER)
        shares = sharing == Sharing.PREFIX.value
        is_ordered = order not in (None, IN_ORDER)
        page = int(chosen.get(Dimension.PAGE_SIZE, 1))
        goes_on = chosen.get(Dimension.REUSE) == Reuse.GOES_ON.value
        is_transient = chosen.get(Dimension.POLICY) == CachePolicy.TRANSIENT.value
        keeps = chosen.get(Dimension.KEPT) not in (None, KeptStates.LAST.value)
        in_slots = chosen.get(Dimension.SLOT_ORDER) not in (None, IN_ORDER)
        wrong = (
            company == Company.ALONE.value and (shares or rows not in (None, 1)),
            company not in (None, Company.ALONE.value) and rows == 1,
            shares and (rows == 1 or (context is not None and int(context) < page)),
            is_transient and (shares or is_ordered or context not in (None, 0)),
            goes_on and (is_transient or context == 0),
            is_ordered and context is not None and new is not None and int(context) + int(new) <= 2 * page,
            is_transient and (keeps or in_slots),
            keeps and new == 1,
        )
        choice = [(each, chosen[each]) for each in (Dimension.FEATURES, Dimension.TOP_K) if each in chosen]
        return not any(wrong) and (len(choice) < 2 or can_meet(*choice))

    def _completed(self, chosen: Mapping[Dimension, Value]) -> Case:
        """Returns a case with the chosen values and otherwise plain and cheap ones."""
        values = dict(chosen)
        if Dimension.PAGE_SIZE in self._domains.values:
            values.setdefault(Dimension.PAGE_SIZE, self._domains.values[Dimension.PAGE_SIZE][0])
        for scale in self._domains.scales:
            if scale not in DERIVED:
                values.setdefault(scale, self._plain_number(scale, values))
        if Dimension.WINDOW in chosen:
            able = self._domains.values[Dimension.FEATURES]
            values.setdefault(Dimension.FEATURES, next(value for value in able if _has_window(value)))
        self._settle_choice(values)
        values = {**self._cheapest, **values}
        return Case(repaired(values), seed=len(self._cases), most_pool_bytes=self._domains.most_pool_bytes)

    def _settle_choice(self, values: dict[Dimension, Value]) -> None:
        """Adds whether tokens are chosen to how many are, or the reverse, if only one of them is there."""
        for given, missing in ((Dimension.TOP_K, Dimension.FEATURES), (Dimension.FEATURES, Dimension.TOP_K)):
            if given in values and missing not in values and missing in self._domains.values:
                able = [
                    value
                    for value in self._domains.values[missing]
                    if can_meet((given, values[given]), (missing, value))
                ]
                values[missing] = able[0] if able else self._cheapest[missing]

    def _crowd(self, rows: int, new: int, context: int) -> Case:
        """Returns a case of many equal rows, within the domains, and otherwise plain values."""
        plain = {each: values[0] for each, values in self._domains.values.items()}
        chosen: dict[Dimension, Value] = {
            Dimension.ROWS: rows,
            Dimension.NEW_TOKENS: min(new, self._domains.scales[Dimension.NEW_TOKENS].high),
            Dimension.CONTEXT: min(context, self._domains.scales[Dimension.CONTEXT].high),
            Dimension.COMPANY: (Company.SAME if rows > 1 else Company.ALONE).value,
        }
        return self._completed({**plain, **chosen})

    def _middle(self) -> list[Case]:
        """Draws random cases: numbers log-uniformly or at borders, other values uniformly."""
        found: list[Case] = []
        # For large models hardly any case is cheap.
        for _ in range(20 * _NUM_MIDDLE):
            values: dict[Dimension, Value] = {
                dimension: self._draw.choice(options) for dimension, options in self._domains.values.items()
            }
            page = int(values.get(Dimension.PAGE_SIZE, _ANY_PAGE))
            for scale, span in self._domains.scales.items():
                if scale not in DERIVED:
                    values[scale] = self._number_within(scale, span, page)
            case = Case(repaired(values), len(self._cases) + len(found), self._domains.most_pool_bytes)
            is_known = self._domains.compile_seconds == 0 or _compiled_for(case) in self._compiled
            if case.seconds <= _MIDDLE_SECONDS and self._is_allowed(case.values) and is_known:
                found.append(case)
            if len(found) == _NUM_MIDDLE:
                break
        return found

    def _number_within(self, scale: Dimension, span: Span, page: int) -> int:
        if scale is Dimension.POOL_SLOTS:
            return TIGHT
        if self._draw.random() < 0.5:
            return self._draw.choice(borders(span, page))
        low, high = math.log(span.low + 1), math.log(span.high + 1)
        return min(span.high, round(math.exp(self._draw.uniform(low, high))) - 1) or span.low


def _has_window(features: Value) -> bool:
    return Feature.WINDOW.value in str(features).split("+")


def _cheapness(value: Value) -> tuple[int, int]:
    """A sort key by which the smallest number, or the first name, is the cheapest."""
    return (0, value) if isinstance(value, int) else (0, 0)


def repaired(values: Mapping[Dimension, Value]) -> dict[Dimension, Value]:
    """Returns the values with those corrected that follow from others."""
    fixed = dict(values)
    if fixed[Dimension.POLICY] == CachePolicy.TRANSIENT.value:
        fixed[Dimension.CONTEXT] = 0
        fixed |= {order: IN_ORDER for order in (Dimension.PAGE_ORDER, Dimension.SLOT_ORDER) if order in fixed}
        if Dimension.KEPT in fixed:
            fixed[Dimension.KEPT] = KeptStates.LAST.value
    if fixed[Dimension.COMPANY] == Company.ALONE.value:
        fixed[Dimension.ROWS] = 1
    elif fixed[Dimension.ROWS] == 1:
        fixed[Dimension.COMPANY] = Company.ALONE.value
    if fixed[Dimension.REUSE] == Reuse.GOES_ON.value and fixed[Dimension.CONTEXT] == 0:
        fixed[Dimension.REUSE] = Reuse.AFTER_OTHERS.value
    if Dimension.SHARING in fixed and (
        fixed[Dimension.ROWS] == 1 or int(fixed[Dimension.CONTEXT]) < int(fixed[Dimension.PAGE_SIZE])
    ):
        fixed[Dimension.SHARING] = Sharing.NONE.value
    if Dimension.KEPT in fixed and int(fixed[Dimension.NEW_TOKENS]) == 1:
        fixed[Dimension.KEPT] = KeptStates.LAST.value
    if fixed.get(Dimension.TOP_K) == 0 or not is_sparse(fixed[Dimension.FEATURES]):
        features = {each for each in str(fixed[Dimension.FEATURES]).split("+") if each != Feature.SPARSE.value}
        fixed[Dimension.FEATURES] = features_name(features - {PLAIN_FEATURES})
        fixed |= {Dimension.TOP_K: 0} if Dimension.TOP_K in fixed else {}
    if not _has_window(fixed[Dimension.FEATURES]):
        fixed.pop(Dimension.WINDOW, None)
    return fixed


def _compiled_for(case: Case) -> tuple[Value, ...]:
    return tuple(case.values[dimension] for dimension in _COMPILED_FOR if dimension in case.values)


def _both_ways(goals: Goals, case: Case) -> set[tuple[Goal, bool]]:
    """Returns the goals that a case reaches with company (True) and without (False)."""
    close = {(goal, True) for goal in goals.reached_closely(case)}
    return close | {(goal, False) for goal in goals.reached(case)}


def _best(cases: Sequence[Case], goals: Goals, seconds: float) -> Iterator[Case]:
    """Yields the cases that reach most new goals for their time, while time is left."""
    missing = {(goal, way) for goal in goals.all for way in (False, True)}
    left = {place: _both_ways(goals, case) for place, case in enumerate(cases)}
    while left:
        worth = {
            place: len(brought & missing) / (cases[place].seconds + goals.domains.compile_seconds + 0.02)
            for place, brought in left.items()
            if cases[place].seconds <= seconds
        }
        place = max(worth, key=lambda each: worth[each], default=-1)
        if place < 0 or worth[place] == 0:
            return
        missing -= left.pop(place)
        seconds -= cases[place].seconds + goals.domains.compile_seconds
        yield cases[place]
