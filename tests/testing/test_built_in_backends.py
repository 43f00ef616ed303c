"""Sightline's own backends pass the whole kit, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from sightline.attention.backends import registry
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.contract import BackendContext
from sightline.attention.kinds import ENTRY_KINDS, STATE_KINDS, SpecKind
from sightline.attention.latent.phases import Choose, Way, cheapest_way
from sightline.attention.shared.tiles import RowSpan
from sightline.attention.spec import LatentSpec, RecurrentSpec
from sightline.core.batch import MaskKind
from sightline.core.device import detect_device
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import Verdict, checks_of, try_check, try_row
from sightline.testing.conformance.rows import RowToTry, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import CaseShare, Effort

ROWS = [row for row in list_rows(registry.BUILT_IN, detect_device("cpu")) if isinstance(row, RowToTry)]
COMPILED = {"numba", "numba-latent"}
"""Backends that compile kernels for every head dimension, group size and dtype, which takes seconds for each."""
FIRST_OF_EACH_KIND = {
    kind: next(row.subject for row in ROWS if row.subject.kind is kind and row.candidate.name not in COMPILED)
    for kind in SpecKind
}
FEW = Samples(head_dims=(16, 64), group_sizes=(1, 4), page_sizes=(16, 1))
FEW_COMPILED = Samples(head_dims=(16, 80), group_sizes=(1, 5), page_sizes=(16, 3))
"""For the quick effort with compiled kernels: whole vectors and a remainder, single heads and a group that leaves a
remainder. Other sizes compile the same source with other numbers; the full effort has them all."""
NUM_SHARES = 3
"""Tests that divide the full effort for one row among them, because whole it takes more than a minute."""


def efforts() -> list[ParameterSet]:
    """Every row with both efforts. The full one takes a minute a row: `make prove` has the quick one for rows in
    float32, except for the row that `test_one_row_is_proven_with_full_effort` covers and for the oracle, which would be
    compared with itself. Other rows are other dtypes of the same code."""
    proven = FIRST_OF_EACH_KIND[SpecKind.SOFTMAX]
    quick = [
        row
        for row in ROWS
        if row.subject != proven
        and torch.float32 in row.subject.capability.dtypes
        and not row.candidate.name.startswith("reference")
    ]
    return [
        pytest.param(
            row,
            effort,
            id=f"{row.candidate.name}-{row.label}-{effort.value}",
            marks=() if effort is Effort.QUICK and row in quick else pytest.mark.slow,
        )
        for row in ROWS
        for effort in Effort
    ]


@pytest.mark.parametrize(("row", "effort"), efforts())
def test_every_declared_capability_is_proven(row: RowToTry, effort: Effort) -> None:
    few = FEW_COMPILED if row.candidate.name in COMPILED else FEW if row.subject.kind in STATE_KINDS else None
    narrowed = few.for_problem(row.subject.problem) if few is not None and effort is Effort.QUICK else None
    # Random cases have dozens of recurrences, of which each takes ten seconds to compile: torch's pass them.
    left = {"covering"} if row.candidate.name == "numba-recurrent" and effort is Effort.QUICK else set()
    report = try_row(row.subject, effort, narrowed, [check for check in CHECKS if check.name not in left])
    assert {result.check: f"{result.detail} {result.case}" for result in report.failed} == {}
    assert sum(result.num_steps for result in report.results) > (200 if effort is Effort.QUICK else 500)


@pytest.mark.parametrize(
    "share",
    [CaseShare(number, NUM_SHARES) for number in range(NUM_SHARES)],
    ids=lambda share: f"{share.number + 1} of {share.count}",
)
def test_one_row_is_proven_with_full_effort(share: CaseShare) -> None:
    """The first share has the checks that cannot be divided, too."""
    row = FIRST_OF_EACH_KIND[SpecKind.SOFTMAX]
    checks = [check for check in checks_of(row) if check.num_shares > 1 or share.number == 0]
    results = [try_check(check, row, Effort.FULL, Samples(), share=share) for check in checks]
    failed = [result for result in results if result.verdict is Verdict.FAILED]
    assert {result.check: f"{result.detail} {result.case}" for result in failed} == {}
    assert sum(result.num_steps for result in results) > 300


def narrow_pages() -> list[ParameterSet]:
    """Each kind with pages, with few page sizes, and one of them in `make prove`: the kinds share the page table."""
    proven = ((SpecKind.LATENT, {256}),)
    return [
        pytest.param(kind, sizes, id=f"{kind.value}-{sizes}", marks=() if (kind, sizes) in proven else pytest.mark.slow)
        for kind in SpecKind
        if kind in ENTRY_KINDS
        for sizes in ({1}, {256}, {2}, {1, 16})
    ]


@pytest.mark.parametrize(("kind", "page_sizes"), narrow_pages())
def test_a_row_of_few_page_sizes_can_be_proven_too(kind: SpecKind, page_sizes: set[int]) -> None:
    row = FIRST_OF_EACH_KIND[kind]
    narrow = replace(row, capability=replace(row.capability, page_sizes=frozenset(page_sizes)))
    assert {result.check: result.detail for result in try_row(narrow, Effort.QUICK, FEW).failed} == {}


def test_a_latent_row_of_one_geometry_can_be_proven_too() -> None:
    row = FIRST_OF_EACH_KIND[SpecKind.LATENT]
    narrow = replace(row.capability, head_dims=frozenset({576}), group_sizes=frozenset({3}))
    report = try_row(replace(row, capability=narrow), Effort.QUICK, FEW)
    assert {result.check: result.detail for result in report.failed} == {}


def test_a_recurrent_row_of_listed_sizes_is_tried_with_those() -> None:
    row = FIRST_OF_EACH_KIND[SpecKind.RECURRENT]
    dims = frozenset({(64, 32), (128, 32), (128, 128)})
    narrow = replace(row.capability, head_dims=frozenset({64, 128}), expanded_dims=dims, group_sizes=frozenset({2}))
    seen: set[tuple[int, int]] = set()

    class Watched(row.backend):  # type: ignore[name-defined, misc]
        def __init__(self, context: BackendContext[RecurrentSpec]) -> None:
            seen.add(context.spec.expanded_dims)
            super().__init__(context)

    report = try_row(replace(row, capability=narrow, backend=Watched), Effort.QUICK, FEW)
    assert {result.check: result.detail for result in report.failed} == {}
    assert seen == {(64, 32), (128, 32)}


def forced(way: Way, room_bytes: int) -> type[TorchLatentBackend]:
    """The latent backend with one way for every row that may go it, and so much room."""

    def choose(spec: LatentSpec, span: RowSpan, room: int) -> Way:
        del spec, room
        return Way.ABSORBED if span.kind is MaskKind.TREE else way

    return type("Forced", (TorchLatentBackend,), {"choose": staticmethod(choose), "room_bytes": room_bytes})


@pytest.mark.parametrize(
    "backend",
    [forced(Way.ABSORBED, 1 << 20), forced(Way.ONE_SHOT, 128 << 20), forced(Way.CHUNKED, 1 << 13)],
    ids=["absorbed", "one-shot", "chunked"],
)
def test_the_latent_backend_passes_whichever_way_it_takes(backend: type[TorchLatentBackend]) -> None:
    few = FEW.for_problem(FIRST_OF_EACH_KIND[SpecKind.LATENT].problem)
    report = try_row(replace(FIRST_OF_EACH_KIND[SpecKind.LATENT], backend=backend), Effort.QUICK, few)
    assert {result.check: f"{result.detail} {result.case}" for result in report.failed} == {}


def test_the_kit_makes_the_latent_backend_take_each_of_its_ways_by_its_own_choice() -> None:
    taken: set[Way] = set()

    def watch(spec: LatentSpec, span: RowSpan, room: int) -> Way:
        way = cheapest_way(spec, span, room)
        taken.add(way)
        return way

    class Watched(TorchLatentBackend):
        choose: ClassVar[Choose] = staticmethod(watch)

    ways = next(check for check in CHECKS if check.name == "ways")
    subject = replace(FIRST_OF_EACH_KIND[SpecKind.LATENT], backend=Watched)
    assert try_check(ways, subject, Effort.FULL, Samples()).verdict is Verdict.PASSED
    assert taken == set(Way)
