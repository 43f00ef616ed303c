"""What a proof covered, as ranges, and whether that is enough for what an engine will ask for.

A *point* is one case that was tried: a value for each dimension that the case has. A `Coverage` keeps, for every two
dimensions, how far the points reach in them together. A `Demand` is what an engine can reach: a range or a set of
values for each dimension.

Two kinds of dimension. The values of a *scale* (rows, lengths, layers) are ordered, and a fault in one is taken to have
a threshold: it shows from some value on, or up to some value. The values of every other dimension (page sizes, dtypes,
masks) stand each for itself. `Coverage.gaps` is empty only if every fault with a threshold in one dimension, or in two
together, that the engine could meet was met by a point: for two scales, at each of the four corners of what the engine
can reach there is a point at least as far out.

    demand of two scales        ┌──────────┐ ● a point at least as far out as this corner
                                │          │
                                └──────────┘

Some values never meet: a row that is alone has no rows beside it, a step without a cache has no context. Nothing is
asked of those. Knows numbers and names. Does not know how a case is tried, nor where proofs are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias


class Dimension(Enum):
    """One way in which two steps, specs or groups can differ."""

    ROWS = "rows"
    NEW_TOKENS = "new tokens of a row"
    CONTEXT = "context of a row"
    STEP_TOKENS = "tokens of a step"
    LAYERS = "layers of a group"
    KEY_HEADS = "key heads"
    WINDOW = "window"
    """Only of cases that have one; `FEATURES` says which do."""
    POOL_SLOTS = "slots of a pool"
    KIND = "kind of attention"
    GROUP_SIZE = "query heads on a key head"
    HEAD_DIM = "head dimension"
    PAGE_SIZE = "page size"
    DTYPE = "dtype"
    CACHE_DTYPE = "cache dtype"
    FEATURES = "features"
    """Of the spec and of the step, masks aside: see `features_name`."""
    MASK = "mask"
    POLICY = "cache policy"
    SHARING = "pages shared between rows"
    PAGE_ORDER = "order of pages"
    """`in order` also where a row has two pages at most: other orders need three to differ."""
    PADDING = "padding"
    REUSE = "steps planned before on the same backend"
    COMPANY = "rows beside the longest"
    LANE = "lane"

    __hash__ = object.__hash__  # an enum's own is slow, and millions of points are looked up

    @property
    def is_scale(self) -> bool:
        return self in _SCALES


_SCALES = frozenset(
    {
        Dimension.ROWS,
        Dimension.NEW_TOKENS,
        Dimension.CONTEXT,
        Dimension.STEP_TOKENS,
        Dimension.LAYERS,
        Dimension.KEY_HEADS,
        Dimension.WINDOW,
        Dimension.POOL_SLOTS,
    }
)

_OF_SPECS = frozenset(
    {
        Dimension.KIND,
        Dimension.GROUP_SIZE,
        Dimension.HEAD_DIM,
        Dimension.PAGE_SIZE,
        Dimension.DTYPE,
        Dimension.CACHE_DTYPE,
    }
)


class Sharing(Enum):
    """Values of `Dimension.SHARING`."""

    NONE = "none"
    PREFIX = "prefix"
    """Rows read the same pages at their beginning."""


class Padding(Enum):
    """Values of `Dimension.PADDING`."""

    NONE = "none"
    PADDED = "padded"
    """With rows or tokens that belong to nobody."""


class Reuse(Enum):
    """Values of `Dimension.REUSE`."""

    FIRST = "first"
    """The step is the first that the backend plans."""
    AFTER_OTHERS = "after others"
    """Steps of other rows were planned before it."""
    AGAIN = "planned again"
    """It was planned, then another, then it again."""
    GOES_ON = "goes on"
    """Its rows read what an earlier step of theirs wrote."""


class Company(Enum):
    """Values of `Dimension.COMPANY`."""

    ALONE = "alone"
    SHORTER = "shorter"
    """Beside rows that have less context and fewer new tokens, or as many."""
    SAME = "same"
    """All rows of a step have the same lengths."""


class LaneUse(Enum):
    """Values of `Dimension.LANE`."""

    MAIN = "main"
    SECOND = "second"
    """In another lane than the main one, with a plan alive in each."""


PLAIN_FEATURES = "plain"
IN_ORDER = "in order"
WITHOUT_CACHE = "transient"


def features_name(names: Iterable[str]) -> str:
    """The value of `Dimension.FEATURES`: the names sorted and joined by `+`, or `plain`."""
    return "+".join(sorted(names)) or PLAIN_FEATURES


Value: TypeAlias = int | str
Point: TypeAlias = Mapping[Dimension, Value]
"""One case. A dimension that the case does not have, such as the window of one without, is not there."""
Pair: TypeAlias = tuple[Dimension, Dimension]
Corner: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """Numbers from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"expected a span from low to high, got {self.low} to {self.high}")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class Demand:
    """What an engine can ask of a backend."""

    scales: Mapping[Dimension, Span]
    values: Mapping[Dimension, frozenset[Value]]
    """Every one of them will be asked for."""

    def __post_init__(self) -> None:
        wrong = [dimension for dimension in self.scales if not dimension.is_scale]
        wrong += [dimension for dimension in self.values if dimension.is_scale]
        if wrong:
            raise ValueError(f"expected a span for each scale and a set for each other dimension, got {wrong}")


@dataclass(frozen=True)
class Gap:
    """Something that an engine will ask for and that no point covers."""

    dimensions: tuple[Dimension, ...]
    wanted: str
    covered: str

    def __str__(self) -> str:
        return f"{self.wanted} (proven: {self.covered})"


@dataclass(frozen=True)
class Coverage:
    """How far the points of a proof reach, for every dimension and every two of them."""

    spans: Mapping[Dimension, Span]
    values: Mapping[Dimension, frozenset[Value]]
    met: Mapping[Pair, frozenset[tuple[Value, Value]]]
    """Two dimensions that are no scales: the values that came together."""
    reach: Mapping[Pair, Mapping[Value, Span]]
    """A dimension that is no scale, and a scale: by value of the first, the range of the second."""
    corners: Mapping[Pair, tuple[tuple[Corner, ...], ...]]
    """Two scales: the outermost points towards (high, high), (high, low), (low, high) and (low, low)."""

    @staticmethod
    def of(points: Iterable[Point]) -> Coverage:
        kept = list({tuple(sorted(point.items(), key=lambda item: item[0].name)): point for point in points}.values())
        dimensions = [dimension for dimension in Dimension if any(dimension in point for point in kept)]
        spans, values = {}, {}
        for dimension in dimensions:
            if dimension.is_scale:
                spans[dimension] = _span([int(point[dimension]) for point in kept if dimension in point])
            else:
                values[dimension] = frozenset(point[dimension] for point in kept if dimension in point)
        met: dict[Pair, frozenset[tuple[Value, Value]]] = {}
        reach: dict[Pair, Mapping[Value, Span]] = {}
        corners: dict[Pair, tuple[tuple[Corner, ...], ...]] = {}
        for pair in _pairs(dimensions):
            one, two = pair
            both = {(point[one], point[two]) for point in kept if one in point and two in point}
            if not both:
                continue
            if one.is_scale:
                places = [(int(first), int(second)) for first, second in both]
                corners[pair] = tuple(_front(places, *signs) for signs in _SIGNS)
            elif two.is_scale:
                reach[pair] = {
                    value: _span([int(second) for first, second in both if first == value]) for value, _ in both
                }
            else:
                met[pair] = frozenset(both)
        return Coverage(spans, values, met, reach, corners)

    def joined(self, other: Coverage) -> Coverage:
        """What both cover together. Only proofs of the same thing may be joined."""
        return Coverage(
            {key: _span([n for s in found for n in (s.low, s.high)]) for key, found in _both(self.spans, other.spans)},
            {key: frozenset().union(*found) for key, found in _both(self.values, other.values)},
            {key: frozenset().union(*found) for key, found in _both(self.met, other.met)},
            {key: _joined_reach(found) for key, found in _both(self.reach, other.reach)},
            {
                key: tuple(
                    _front([place for front in fronts for place in front], *signs)
                    for signs, fronts in zip(_SIGNS, zip(*found, strict=True), strict=True)
                )
                for key, found in _both(self.corners, other.corners)
            },
        )

    def gaps(self, demand: Demand) -> tuple[Gap, ...]:
        """Everything that the demand reaches and no point covers; a dimension alone first, then two together.

        A pair is told only where each of its dimensions alone is covered.
        """
        alone = [gap for dimension in Dimension for gap in self._gaps_of(dimension, demand)]
        open_dimensions = {gap.dimensions[0] for gap in alone}
        asked = [*demand.values, *demand.scales]
        together = [
            gap
            for pair in _pairs([dimension for dimension in Dimension if dimension in asked])
            if not open_dimensions & set(pair)
            for gap in self._pair_gaps(pair, demand)
        ]
        return (*alone, *together)

    def _gaps_of(self, dimension: Dimension, demand: Demand) -> Iterable[Gap]:
        if dimension in demand.scales:
            wanted, span = demand.scales[dimension], self.spans.get(dimension)
            if span is None or span.low > wanted.low or span.high < wanted.high:
                yield Gap((dimension,), f"{dimension.value} {wanted}", "none" if span is None else str(span))
        elif dimension in demand.values:
            known = self.values.get(dimension, frozenset())
            for value in _sorted(demand.values[dimension] - known):
                yield Gap((dimension,), f"{dimension.value} {value}", ", ".join(map(str, _sorted(known))) or "none")

    def _pair_gaps(self, pair: Pair, demand: Demand) -> Iterable[Gap]:
        one, two = pair
        if one.is_scale:
            yield from self._corner_gaps(pair, demand)
        elif two.is_scale:
            for value in _sorted(demand.values[one]):
                wanted = _asked_span(one, value, two, demand)
                if wanted is None:
                    continue
                span = self.reach.get(pair, {}).get(value)
                if span is None or span.low > wanted.low or span.high < wanted.high:
                    told = "none" if span is None else f"{two.value} {span}"
                    yield Gap(pair, f"{one.value} {value} with {two.value} {wanted}", told)
        else:
            met = self.met.get(pair, frozenset())
            for values in itertools.product(_sorted(demand.values[one]), _sorted(demand.values[two])):
                if values not in met and can_meet((one, values[0]), (two, values[1])):
                    yield Gap(pair, f"{one.value} {values[0]} with {two.value} {values[1]}", "each, but not together")

    def _corner_gaps(self, pair: Pair, demand: Demand) -> Iterable[Gap]:
        fronts = self.corners.get(pair, ((),) * len(_SIGNS))
        one, two = (demand.scales[dimension] for dimension in pair)
        for (first, second), front in zip(_SIGNS, fronts, strict=True):
            corner = _possible_corner(
                pair, (one.high if first > 0 else one.low, two.high if second > 0 else two.low), demand
            )
            if not any(first * (a - corner[0]) >= 0 and second * (b - corner[1]) >= 0 for a, b in front):
                nearest = ", ".join(f"{a} with {b}" for a, b in front) or "none"
                yield Gap(pair, f"{pair[0].value} {corner[0]} with {pair[1].value} {corner[1]}", nearest)

    def lines(self) -> list[str]:
        """For a person: the ranges of scales, then the values of specs and pages, then those of steps."""
        spans = ", ".join(f"{scale.value} {span}" for scale, span in self.spans.items())
        told = {
            dimension: f"{dimension.value} {', '.join(map(str, _sorted(values)))}"
            for dimension, values in self.values.items()
        }
        of_specs = "; ".join(line for dimension, line in told.items() if dimension in _OF_SPECS)
        of_steps = "; ".join(line for dimension, line in told.items() if dimension not in _OF_SPECS)
        return [line for line in (spans, of_specs, of_steps) if line]

    def to_data(self) -> dict[str, Any]:
        """In terms of JSON; `from_data` reads it back."""
        return {
            "spans": {key.name: [span.low, span.high] for key, span in self.spans.items()},
            "values": {key.name: _sorted(values) for key, values in self.values.items()},
            "met": {_name(pair): [list(each) for each in sorted(met, key=str)] for pair, met in self.met.items()},
            "reach": {
                _name(pair): [[value, reach[value].low, reach[value].high] for value in _sorted(reach)]
                for pair, reach in self.reach.items()
            },
            "corners": {
                _name(pair): [[list(place) for place in front] for front in fronts]
                for pair, fronts in self.corners.items()
            },
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Coverage:
        """Raises `ValueError`, `KeyError` or `TypeError` for anything that `to_data` would not write."""
        coverage = Coverage(
            {Dimension[key]: Span(int(low), int(high)) for key, (low, high) in data["spans"].items()},
            {Dimension[key]: frozenset(map(_value, values)) for key, values in data["values"].items()},
            {_pair(key): frozenset((_value(a), _value(b)) for a, b in met) for key, met in data["met"].items()},
            {
                _pair(key): {_value(value): Span(int(low), int(high)) for value, low, high in reach}
                for key, reach in data["reach"].items()
            },
            {
                _pair(key): _fronts(tuple(tuple((int(a), int(b)) for a, b in front) for front in fronts))
                for key, fronts in data["corners"].items()
            },
        )
        if coverage.to_data() != data:
            raise ValueError("a coverage that is written otherwise")
        return coverage


_SIGNS = ((1, 1), (1, -1), (-1, 1), (-1, -1))
_NEVER_MEET: tuple[frozenset[tuple[Dimension, Value]], ...] = tuple(
    frozenset(pair)
    for pair in (
        ((Dimension.POLICY, WITHOUT_CACHE), (Dimension.SHARING, Sharing.PREFIX.value)),
        ((Dimension.POLICY, WITHOUT_CACHE), (Dimension.REUSE, Reuse.GOES_ON.value)),
        ((Dimension.COMPANY, Company.ALONE.value), (Dimension.SHARING, Sharing.PREFIX.value)),
    )
)


def can_meet(one: tuple[Dimension, Value], two: tuple[Dimension, Value]) -> bool:
    """False for two values that no step can have at once."""
    ordered = any(
        a == (Dimension.POLICY, WITHOUT_CACHE) and b[0] is Dimension.PAGE_ORDER and b[1] != IN_ORDER
        for a, b in ((one, two), (two, one))
    )
    return not ordered and frozenset((one, two)) not in _NEVER_MEET


def possible_span(dimension: Dimension, value: Value, scale: Dimension, span: Span) -> Span | None:
    """The part of the span of a scale that steps with that value can have; None where there is none.

    A shared prefix, and an order of pages, take some whole pages: how many tokens these hold is the page size's
    matter, so that of a context only the far end is asked for.
    """
    match dimension, scale:
        case Dimension.COMPANY, Dimension.ROWS if value == Company.ALONE.value:
            return Span(1, 1) if span.low <= 1 else None
        case Dimension.COMPANY | Dimension.SHARING, Dimension.ROWS | Dimension.STEP_TOKENS:
            needs_two = value not in (Company.ALONE.value, Sharing.NONE.value)
            if not needs_two:
                return span
            return Span(max(2, span.low), span.high) if span.high >= 2 else None
        case Dimension.POLICY, Dimension.CONTEXT if value == WITHOUT_CACHE:
            return Span(0, 0) if span.low <= 0 else None
        case Dimension.REUSE, Dimension.CONTEXT if value == Reuse.GOES_ON.value:
            return Span(max(1, span.low), span.high) if span.high >= 1 else None
        case Dimension.SHARING, Dimension.CONTEXT if value == Sharing.PREFIX.value:
            return Span(span.high, span.high) if span.high > 0 else None
        case Dimension.PAGE_ORDER, Dimension.CONTEXT if value != IN_ORDER:
            return Span(span.high, span.high) if span.high > 0 else None
        case Dimension.FEATURES, Dimension.WINDOW if "window" not in str(value).split("+"):
            return None
        case _:
            return span


def _asked_span(dimension: Dimension, value: Value, scale: Dimension, demand: Demand) -> Span | None:
    """As `possible_span`, of a demand: beside a row of one new token and no context none can be shorter."""
    span = possible_span(dimension, value, scale, demand.scales[scale])
    if span is None or (dimension, value) != (Dimension.COMPANY, Company.SHORTER.value):
        return span
    new, context = demand.scales.get(Dimension.NEW_TOKENS), demand.scales.get(Dimension.CONTEXT)
    least = span.low
    if scale is Dimension.CONTEXT and new is not None and new.high == 1:
        least = max(1, span.low)
    elif context is not None and context.high == 0:
        least = max({Dimension.NEW_TOKENS: 2, Dimension.STEP_TOKENS: 3}.get(scale, 0), span.low)
    return Span(least, span.high) if span.high >= least else None


def _possible_corner(pair: Pair, corner: Corner, demand: Demand) -> Corner:
    """The corner, or the nearest that a step can have: a step has at least as many tokens as rows, and as a row has."""
    one, two = pair
    first, second = corner
    if two is Dimension.STEP_TOKENS and one in (Dimension.ROWS, Dimension.NEW_TOKENS):
        second = max(first, second)
        other = Dimension.NEW_TOKENS if one is Dimension.ROWS else Dimension.ROWS
        if other in demand.scales:
            second = min(second, first * demand.scales[other].high)
    if two is Dimension.POOL_SLOTS and one is not Dimension.WINDOW:
        second = max(second, demand.scales[two].high) if first > second else second
    return first, second


def _front(places: Sequence[Corner], first: int, second: int) -> tuple[Corner, ...]:
    """The places that no other is beyond, in the direction of the two signs."""
    kept: list[Corner] = []
    best: int | None = None
    for a, b in sorted(set(places), key=lambda place: (-first * place[0], -second * place[1])):
        if best is None or second * b > best:
            kept.append((a, b))
            best = second * b
    return tuple(kept)


def _pairs(dimensions: Sequence[Dimension]) -> list[Pair]:
    """Every two, those that are no scales first in each."""
    ordered = sorted(dimensions, key=lambda dimension: dimension.is_scale)
    return list(itertools.combinations(ordered, 2))


def _both(one: Mapping[Any, Any], two: Mapping[Any, Any]) -> Iterable[tuple[Any, list[Any]]]:
    for key in {**one, **two}:
        yield key, [found[key] for found in (one, two) if key in found]


def _joined_reach(found: Sequence[Mapping[Value, Span]]) -> dict[Value, Span]:
    values = {value for reach in found for value in reach}
    return {
        value: _span([n for reach in found if value in reach for n in (reach[value].low, reach[value].high)])
        for value in values
    }


def _span(numbers: Sequence[int]) -> Span:
    return Span(min(numbers), max(numbers))


def _sorted(values: Iterable[Value]) -> list[Value]:
    by_kind: Callable[[Value], tuple[bool, Any]] = lambda value: (isinstance(value, str), value)  # noqa: E731
    return sorted(values, key=by_kind)


def _name(pair: Pair) -> str:
    return f"{pair[0].name} {pair[1].name}"


def _pair(name: str) -> Pair:
    one, two = name.split(" ")
    return Dimension[one], Dimension[two]


def _value(value: object) -> Value:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"expected a number or a name, got {value!r}")
    return value


def _fronts(fronts: tuple[tuple[Corner, ...], ...]) -> tuple[tuple[Corner, ...], ...]:
    if len(fronts) != len(_SIGNS):
        raise ValueError(f"expected {len(_SIGNS)} corners, got {len(fronts)}")
    return fronts
