"""A coverage says exactly which demands its points do not reach."""

from __future__ import annotations

import json
import random

import pytest

from sightline.attention.coverage import Coverage, Demand
from sightline.attention.dimensions import Dimension, Point, Span

ROWS, CONTEXT, DTYPE, MASK = Dimension.ROWS, Dimension.CONTEXT, Dimension.DTYPE, Dimension.MASK


def demand(rows: Span, context: Span, dtypes: set[str]) -> Demand:
    return Demand({ROWS: rows, CONTEXT: context}, {DTYPE: frozenset(dtypes)})


CORNERS: list[Point] = [{ROWS: rows, CONTEXT: context, DTYPE: "float32"} for rows in (1, 64) for context in (0, 1000)]


def test_points_at_all_corners_cover_what_lies_between() -> None:
    assert Coverage.of(CORNERS).gaps(demand(Span(1, 64), Span(0, 1000), {"float32"})) == ()
    assert Coverage.of(CORNERS).gaps(demand(Span(3, 20), Span(7, 7), {"float32"})) == ()


@pytest.mark.parametrize("left_out", range(4))
def test_every_corner_is_needed(left_out: int) -> None:
    points = [point for place, point in enumerate(CORNERS) if place != left_out]
    [gap] = [
        gap
        for gap in Coverage.of(points).gaps(demand(Span(1, 64), Span(0, 1000), {"float32"}))
        if gap.dimensions == (ROWS, CONTEXT)
    ]
    missing = CORNERS[left_out]
    assert gap.wanted == f"rows {missing[ROWS]} with context of a row {missing[CONTEXT]}"


def test_a_value_is_covered_with_the_lengths_that_it_met_alone() -> None:
    points: list[Point] = [*CORNERS, {ROWS: 2, CONTEXT: 10, DTYPE: "bfloat16"}]
    gaps = Coverage.of(points).gaps(demand(Span(1, 2), Span(0, 10), {"bfloat16"}))
    assert [str(gap) for gap in gaps] == [
        "dtype bfloat16 with rows 1 to 2 (proven: rows 2)",
        "dtype bfloat16 with context of a row 0 to 10 (proven: context of a row 10)",
    ]


def test_a_dimension_that_is_open_alone_is_told_once() -> None:
    gaps = Coverage.of(CORNERS).gaps(demand(Span(1, 65), Span(0, 1000), {"float32", "float16"}))
    assert [str(gap) for gap in gaps] == [
        "rows 1 to 65 (proven: 1 to 64)",
        "dtype float16 (proven: float32)",
    ]


def test_nothing_tried_covers_nothing() -> None:
    gaps = Coverage.of([]).gaps(demand(Span(1, 1), Span(0, 0), {"float32"}))
    assert {gap.dimensions for gap in gaps} == {(ROWS,), (CONTEXT,), (DTYPE,)}


def test_values_must_have_met() -> None:
    points: list[Point] = [{DTYPE: "a", MASK: "x"}, {DTYPE: "b", MASK: "y"}]
    gaps = Coverage.of(points).gaps(Demand({}, {DTYPE: frozenset({"a", "b"}), MASK: frozenset({"x"})}))
    assert [gap.wanted for gap in gaps] == ["dtype b with mask x"]


def random_points(draw: random.Random, count: int) -> list[Point]:
    return [
        {ROWS: draw.randint(1, 9), CONTEXT: draw.randint(0, 9), DTYPE: draw.choice("ab"), MASK: draw.choice("xy")}
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_no_gap_means_that_every_threshold_fault_within_the_demand_was_met(seed: int) -> None:
    """The claim of the module, tried on every fault of a small space."""
    draw = random.Random(seed)
    points = random_points(draw, draw.choice([3, 10, 60]))
    rows, context = (sorted(draw.sample(range(1, 10), 2)) for _ in range(2))
    wanted = demand(Span(*rows), Span(*context), {"a"})
    missed = [
        fault
        for fault in [
            (first, one, second, two)
            for first in (1, -1)
            for second in (1, -1)
            for one in range(1, 10)
            for two in range(10)
        ]
        if _can_reach(fault, wanted) and not any(_meets(fault, int(p[ROWS]), int(p[CONTEXT])) for p in points)
    ]
    gaps = Coverage.of(points).gaps(wanted)
    pairs = [gap for gap in gaps if gap.dimensions in ((ROWS,), (CONTEXT,), (ROWS, CONTEXT))]
    assert bool(pairs) == bool(missed)


def _meets(fault: tuple[int, int, int, int], rows: int, context: int) -> bool:
    first, one, second, two = fault
    return first * (rows - one) >= 0 and second * (context - two) >= 0


def _can_reach(fault: tuple[int, int, int, int], wanted: Demand) -> bool:
    rows, context = wanted.scales[ROWS], wanted.scales[CONTEXT]
    return any(
        _meets(fault, a, b) for a in range(rows.low, rows.high + 1) for b in range(context.low, context.high + 1)
    )


@pytest.mark.parametrize("seed", range(5))
def test_joined_is_the_coverage_of_all_points_and_survives_json(seed: int) -> None:
    draw = random.Random(seed)
    one, two = random_points(draw, 12), random_points(draw, 12)
    joined = Coverage.of(one).joined(Coverage.of(two))
    assert joined == Coverage.of([*one, *two])
    assert Coverage.from_data(json.loads(json.dumps(joined.to_data()))) == joined


def test_a_demand_gives_spans_for_scales_alone() -> None:
    with pytest.raises(ValueError, match="expected a span for each scale"):
        Demand({DTYPE: Span(1, 2)}, {})
