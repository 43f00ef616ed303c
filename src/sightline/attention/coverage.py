"""The range of cases that a proof covered, and whether it is enough for what an engine will ask for.

A *point* is one tested case: a value for each dimension that the case has. A `Coverage` keeps, for every two
dimensions, how far the points reach in them together. A `Demand` is what an engine can reach: a range or a set of
values for each dimension.

There are two kinds of dimension. The values of a *scale* (rows, lengths, layers) are ordered, and a fault in one is
assumed to have a threshold: it shows from some value on, or up to some value. The values of every other dimension (page
sizes, dtypes, masks) are independent. `Coverage.gaps` is empty only if every fault with a threshold in one dimension,
or in two together, that the engine could meet was met by a point: for two scales, at each of the four corners of what
the engine can reach there is a point at least as far out.

    demand of two scales        ┌──────────┐ ● a point at least as far out as this corner
                                │          │
                                └──────────┘

Some values never occur together: a single row has no other rows, a step without a cache has no context. No coverage of
those is required. Knows numbers and names. Does not know how a case is tested, nor where proofs are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sightline.attention.dimensions import Dimension, Point, Span, Value, can_meet, possible_span

_OF_SPECS = frozenset(
    {
        Dimension.KIND,
        Dimension.GROUP_SIZE,
        Dimension.HEAD_DIM,
        Dimension.VALUE_DIM,
        Dimension.CONV_WIDTH,
        Dimension.UNIT_KEYS,
        Dimension.TOP_K,
        Dimension.RATIO,
        Dimension.OVERLAP,
        Dimension.PAGE_SIZE,
        Dimension.DTYPE,
        Dimension.CACHE_DTYPE,
    }
)
Pair: TypeAlias = tuple[Dimension, Dimension]
Corner: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Demand:
    """What an engine can ask of a backend."""

    scales: Mapping[Dimension, Span]
    values: Mapping[Dimension, frozenset[Value]]
    """All of these values will be asked for."""

    def __post_init__(self) -> None:
        wrong = [dimension for dimension in self.scales if not dimension.is_scale]
        wrong += [dimension for dimension in self.values if dimension.is_scale]
        if wrong:
            raise ValueError(f"expected a span for each scale and a set for each other dimension, got {wrong}")


@dataclass(frozen=True)
class Gap:
    """A demanded value, or pair of values, that no point covers."""

    dimensions: tuple[Dimension, ...]
    wanted: str
    covered: str

    def __str__(self) -> str:
        return f"{self.wanted} (proven: {self.covered})"


@dataclass(frozen=True)
class Coverage:
    """How far the points of a proof reach, for every dimension and every pair of dimensions."""

    spans: Mapping[Dimension, Span]
    values: Mapping[Dimension, frozenset[Value]]
    met: Mapping[Pair, frozenset[tuple[Value, Value]]]
    """For two dimensions that are not scales: the pairs of values that occurred together."""
    reach: Mapping[Pair, Mapping[Value, Span]]
    """For a non-scale and a scale: the range of the scale for each value of the first."""
    corners: Mapping[Pair, tuple[tuple[Corner, ...], ...]]
    """For two scales: the outermost points towards (high, high), (high, low), (low, high) and (low, low)."""

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
        """The union of both coverages. Both must be about the same thing."""
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
        """Every demanded value that no point covers; single dimensions first, then pairs.

        A pair is reported only if each of its dimensions is covered on its own.
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
                wanted = possible_span(one, value, two, demand.scales)
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
        """Human-readable lines: the ranges of scales, then the values of specs and pages, then those of steps."""
        spans = ", ".join(f"{scale.value} {span}" for scale, span in self.spans.items())
        told = {
            dimension: f"{dimension.value} {', '.join(map(str, _sorted(values)))}"
            for dimension, values in self.values.items()
        }
        of_specs = "; ".join(line for dimension, line in told.items() if dimension in _OF_SPECS)
        of_steps = "; ".join(line for dimension, line in told.items() if dimension not in _OF_SPECS)
        return [line for line in (spans, of_specs, of_steps) if line]

    def to_data(self) -> dict[str, Any]:
        """JSON-serializable data; `from_data` reads it back."""
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
        """Reads `to_data`'s result. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
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


def _possible_corner(pair: Pair, corner: Corner, demand: Demand) -> Corner:
    """The corner, or the nearest possible one: a step has at least as many tokens as rows, and as any one row."""
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
    """The Pareto front: places that no other exceeds in the direction of the two signs."""
    kept: list[Corner] = []
    best: int | None = None
    for a, b in sorted(set(places), key=lambda place: (-first * place[0], -second * place[1])):
        if best is None or second * b > best:
            kept.append((a, b))
            best = second * b
    return tuple(kept)


def _pairs(dimensions: Sequence[Dimension]) -> list[Pair]:
    """Every pair of dimensions, non-scales first within each."""
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
