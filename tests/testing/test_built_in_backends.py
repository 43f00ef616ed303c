"""Sightline's own backends pass the whole kit, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sightline.attention.backends import registry
from sightline.core.device import detect_device
from sightline.testing.kit import try_row
from sightline.testing.report import RowToTry, list_rows
from sightline.testing.trial import Effort

ROWS = [row for row in list_rows(registry.BUILT_IN, detect_device("cpu")) if isinstance(row, RowToTry)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.candidate.name}-{row.label}")
def test_every_declared_capability_is_proven(row: RowToTry) -> None:
    report = try_row(row.subject)
    assert {result.check: f"{result.detail} {result.case}" for result in report.failed} == {}
    assert sum(result.num_steps for result in report.results) > 500


@pytest.mark.parametrize("page_sizes", [{1}, {2}, {256}, {1, 16}], ids=str)
def test_a_row_of_few_page_sizes_can_be_proven_too(page_sizes: set[int]) -> None:
    row = ROWS[0].subject
    narrow = replace(row, capability=replace(row.capability, page_sizes=frozenset(page_sizes)))
    assert {result.check: result.detail for result in try_row(narrow, Effort.QUICK).failed} == {}
