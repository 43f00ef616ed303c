"""Cases reach every goal of their domains, in every process the same, whatever a row or an engine asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.attention.backends import registry
from sightline.attention.coverage import Coverage, Demand
from sightline.attention.dimensions import Company, Dimension, Span
from sightline.attention.kinds import Feature, SpecKind
from sightline.core.device import detect_device
from sightline.testing.conformance.case_run import try_case
from sightline.testing.conformance.cases import Case
from sightline.testing.conformance.domains import Domains, borders, domains_of, domains_of_demand
from sightline.testing.conformance.generator import cases_for
from sightline.testing.conformance.goals import Goals
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.rows import RowToTry, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.shrink import shrink
from sightline.testing.conformance.trial import Effort, Trial

CPU = detect_device("cpu")
ROWS = [row.subject for row in list_rows(registry.BUILT_IN, CPU) if isinstance(row, RowToTry)]
FEW = Samples(head_dims=(16, 64), group_sizes=(1, 4), page_sizes=(16, 1))


def subject_of(kind: SpecKind) -> Subject:
    return next(subject for subject in ROWS if subject.kind is kind)


@pytest.fixture(scope="module", params=SpecKind, ids=lambda kind: kind.value)
def domains(request: pytest.FixtureRequest) -> Domains:
    return domains_of(subject_of(request.param), FEW)


def test_every_goal_is_reached(domains: Domains) -> None:
    goals = Goals(domains)
    missing = goals.all - {goal for case in cases_for(domains) for goal in goals.reached(case)}
    assert [goals.ends(goal) for goal in missing] == []


def test_all_but_what_cannot_be_is_reached_with_company(domains: Domains) -> None:
    goals = Goals(domains)
    missing = goals.all - {goal for case in cases_for(domains) for goal in goals.reached_closely(case)}
    transient = (Dimension.POLICY, "transient")
    # One token and no cache: there is nothing else to see.
    expected = {((Dimension.STEP_TOKENS, "low"), transient)}
    if domains.kind is SpecKind.COMPRESSED_INDEX:
        # Without a cache, the most rows are too short for an entry each.
        expected.add(((Dimension.ROWS, "high"), transient))
    assert {goals.ends(goal) for goal in missing} == expected


@pytest.mark.parametrize("narrow", [Dimension.LAYERS, Dimension.KEY_HEADS], ids=lambda each: each.value)
def test_only_goals_that_can_be_reached_with_company_are_tried_with_it(narrow: Dimension) -> None:
    """A model of one layer, or of one head, leaves hardly any such goal."""
    usual = domains_of(subject_of(SpecKind.SOFTMAX), FEW)
    low = usual.scales[narrow].low
    alone = replace(
        usual,
        scales={**usual.scales, narrow: Span(low, low)},
        values={**usual.values, Dimension.GROUP_SIZE: (1,)},
    )
    goals = Goals(alone)
    assert len(goals.close) < 0.4 * len(goals.all)
    cases = cases_for(alone)
    assert {goal for case in cases for goal in goals.reached_closely(case)} <= goals.close
    assert Coverage.of(case.point() for case in cases).gaps(alone.demand()) == ()


def test_what_passed_leaves_no_gap_in_the_domains(domains: Domains) -> None:
    coverage = Coverage.of(case.point() for case in cases_for(domains))
    assert coverage.gaps(domains.demand()) == ()


def test_the_time_is_kept_and_what_is_left_out_is_no_longer_covered(domains: Domains) -> None:
    some = cases_for(domains, seconds=1.0)
    assert 0 < len(some) < len(cases_for(domains))
    assert sum(case.seconds for case in some) <= 1.0
    assert Coverage.of(case.point() for case in some).gaps(domains.demand())


def test_cases_share_specs_where_a_backend_compiles_them() -> None:
    samples = Samples(head_dims=(16, 64, 128), group_sizes=(1, 2, 4, 8), page_sizes=(16, 1, 32))
    free = domains_of(subject_of(SpecKind.SOFTMAX), samples)
    compiled = replace(free, compile_seconds=4.0)

    def specs(cases: tuple[Case, ...]) -> int:
        dimensions = (Dimension.HEAD_DIM, Dimension.GROUP_SIZE, Dimension.CACHE_DTYPE, Dimension.FEATURES)
        return len({tuple(case.values[each] for each in dimensions) for case in cases})

    assert specs(cases_for(compiled)) < 0.75 * specs(cases_for(free))


def test_the_cases_of_a_demand_cover_it_and_reach_beyond_the_usual() -> None:
    demand = Demand(
        {
            Dimension.ROWS: Span(1, 4),
            Dimension.NEW_TOKENS: Span(1, 1500),
            Dimension.CONTEXT: Span(0, 9000),
            Dimension.STEP_TOKENS: Span(1, 1500),
            Dimension.LAYERS: Span(7, 7),
            Dimension.KEY_HEADS: Span(3, 3),
            Dimension.POOL_SLOTS: Span(20000, 20000),
        },
        {
            Dimension.HEAD_DIM: frozenset({48}),
            Dimension.GROUP_SIZE: frozenset({5}),
            Dimension.PAGE_SIZE: frozenset({24}),
            Dimension.FEATURES: frozenset({"plain", "lse"}),
            Dimension.COMPANY: frozenset(each.value for each in Company),
        },
    )
    asked = domains_of_demand(demand, subject_of(SpecKind.SOFTMAX), Samples())
    cases = cases_for(asked)
    coverage = Coverage.of(case.point() for case in cases)
    assert coverage.gaps(demand) == ()
    assert coverage.spans[Dimension.CONTEXT].high == 9000
    assert coverage.values[Dimension.PAGE_SIZE] == {24}


def test_a_row_without_features_has_no_window() -> None:
    subject = subject_of(SpecKind.SOFTMAX)
    bare = replace(subject, capability=replace(subject.capability, features=frozenset[Feature]()))
    found = domains_of(bare, FEW)
    assert Dimension.WINDOW not in found.scales
    assert found.values[Dimension.FEATURES] == ("plain",)
    assert Coverage.of(case.point() for case in cases_for(found)).gaps(found.demand()) == ()


def test_borders_are_where_kernels_switch() -> None:
    assert borders(Span(0, 20), 6) == (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 18, 19, 20)
    assert borders(Span(3, 5)) == (3, 4, 5)


def test_a_row_of_one_dtype_and_one_size_can_be_covered() -> None:
    subject = subject_of(SpecKind.LATENT)
    narrow = replace(
        subject,
        capability=replace(
            subject.capability,
            head_dims=frozenset({32}),
            group_sizes=frozenset({3}),
            page_sizes=frozenset({256}),
            cache_dtypes=frozenset({torch.float32}),
        ),
    )
    found = domains_of(narrow, Samples())
    gaps = Coverage.of(case.point() for case in cases_for(found)).gaps(found.demand())
    # Two hundred rows of such pages do not fit the smallest pool.
    assert [gap for gap in gaps if Dimension.POOL_SLOTS not in gap.dimensions] == []


def failing_from(dimension: Dimension, number: int) -> tuple[Case, Domains]:
    """A case of the domains that has as much of a scale."""
    found = domains_of(subject_of(SpecKind.SOFTMAX), FEW)
    return next(case for case in cases_for(found) if case.number(dimension) >= number), found


@pytest.mark.parametrize(
    ("dimension", "number"), [(Dimension.LAYERS, 5), (Dimension.CONTEXT, 700), (Dimension.ROWS, 33)]
)
def test_a_failing_case_is_shrunk_to_its_border(dimension: Dimension, number: int) -> None:
    case, found = failing_from(dimension, number)
    shrunk = shrink(case, found, lambda each: each.number(dimension) >= number)
    assert shrunk.case.number(dimension) == number
    assert str(shrunk) == f"fails from {number} {dimension.value} on ({number - 1} passes); everything else plain"


def test_a_case_that_fails_by_two_dimensions_names_both() -> None:
    case, found = failing_from(Dimension.LAYERS, 5)
    case = case.changed(Dimension.PAGE_SIZE, 1)
    shrunk = shrink(
        case, found, lambda each: each.number(Dimension.LAYERS) >= 5 and each.number(Dimension.PAGE_SIZE) == 1
    )
    assert set(shrunk.matters) == {Dimension.LAYERS, Dimension.PAGE_SIZE}
    assert "with page size 1" in str(shrunk)


def test_a_case_that_fails_whatever_it_is_says_so() -> None:
    case, found = failing_from(Dimension.LAYERS, 5)
    assert str(shrink(case, found, lambda _: True)) == "fails with everything plain"


def test_shrinking_ends_where_nothing_smaller_fails() -> None:
    case, found = failing_from(Dimension.LAYERS, 5)
    shrunk = shrink(case, found, lambda each: each.values == case.values)
    assert shrunk.case.values == case.values


def test_a_shrunk_case_can_be_tried() -> None:
    case, found = failing_from(Dimension.CONTEXT, 700)
    shrunk = shrink(case, found, lambda each: each.number(Dimension.CONTEXT) >= 700)
    try_case(Trial(subject_of(SpecKind.SOFTMAX), Effort.FULL, FEW), shrunk.case)
