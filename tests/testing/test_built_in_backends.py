"""Sightline's own backends pass the whole kit, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from _pytest.mark.structures import ParameterSet

from sightline.attention.backends import registry
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.latent.phases import Choose, Way, cheapest_way
from sightline.attention.shared.tiles import RowSpan
from sightline.attention.spec import LatentSpec, SpecKind
from sightline.core.batch import MaskKind
from sightline.core.device import detect_device
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import Verdict, try_check, try_row
from sightline.testing.conformance.rows import RowToTry, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Effort

ROWS = [row for row in list_rows(registry.BUILT_IN, detect_device("cpu")) if isinstance(row, RowToTry)]
FIRST_OF_EACH_KIND = {kind: next(row.subject for row in ROWS if row.subject.kind is kind) for kind in SpecKind}


def efforts() -> list[ParameterSet]:
    """The whole kit takes a minute: one row of each kind of attention gets it in every run, the others where tests may
    be slow."""
    return [
        pytest.param(
            row,
            effort,
            id=f"{row.candidate.name}-{row.label}-{effort.value}",
            marks=(pytest.mark.slow, pytest.mark.timeout(900)) if effort is slow else (),
        )
        for row in ROWS
        for slow in [Effort.QUICK if row.subject in FIRST_OF_EACH_KIND.values() else Effort.FULL]
        for effort in Effort
    ]


@pytest.mark.parametrize(("row", "effort"), efforts())
def test_every_declared_capability_is_proven(row: RowToTry, effort: Effort) -> None:
    report = try_row(row.subject, effort)
    assert {result.check: f"{result.detail} {result.case}" for result in report.failed} == {}
    assert sum(result.num_steps for result in report.results) > (200 if effort is Effort.QUICK else 500)


@pytest.mark.parametrize(
    "page_sizes",
    [{1}, {256}, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ({2}, {1, 16}))],
    ids=str,
)
@pytest.mark.parametrize("kind", SpecKind, ids=lambda kind: kind.value)
def test_a_row_of_few_page_sizes_can_be_proven_too(kind: SpecKind, page_sizes: set[int]) -> None:
    row = FIRST_OF_EACH_KIND[kind]
    narrow = replace(row, capability=replace(row.capability, page_sizes=frozenset(page_sizes)))
    assert {result.check: result.detail for result in try_row(narrow, Effort.QUICK).failed} == {}


def test_a_latent_row_of_one_geometry_can_be_proven_too() -> None:
    row = FIRST_OF_EACH_KIND[SpecKind.LATENT]
    narrow = replace(row.capability, head_dims=frozenset({576}), group_sizes=frozenset({3}))
    report = try_row(replace(row, capability=narrow), Effort.QUICK)
    assert {result.check: result.detail for result in report.failed} == {}


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
    report = try_row(replace(FIRST_OF_EACH_KIND[SpecKind.LATENT], backend=backend), Effort.QUICK)
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
