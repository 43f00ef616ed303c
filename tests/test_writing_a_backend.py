"""The page on writing a backend is about a package that is there, word for word, and that package is proven."""

from __future__ import annotations

from pathlib import Path

import pytest

import sightline.attention
from sightline.attention.backends import registry
from sightline.attention.selection import Candidate
from sightline.core.device import detect_device
from sightline.testing.conformance.kit import try_row
from sightline.testing.conformance.rows import RowToTry, list_rows
from sightline.testing.conformance.trial import Effort

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/writing_a_backend.md").read_text()
PACKAGE = ROOT / "tests/packages/rowwise"
MODULE = PACKAGE / "src/sightline_rowwise/__init__.py"


@pytest.mark.parametrize("file", [PACKAGE / "pyproject.toml", MODULE], ids=lambda file: file.name)
def test_the_page_shows_the_packages_files_as_they_are(file: Path) -> None:
    language = {".toml": "toml", ".py": "python"}[file.suffix]
    assert f"```{language}\n{file.read_text()}```" in PAGE


def test_it_takes_less_than_a_hundred_lines() -> None:
    assert len(MODULE.read_text().splitlines()) < 100


@pytest.fixture
def rowwise() -> Candidate:
    return registry.find("rowwise", registry.installed())


def test_an_installed_package_is_found_and_serves_only_by_name(rowwise: Candidate) -> None:
    assert rowwise.distribution == "sightline-rowwise"
    assert not rowwise.by_default


@pytest.mark.prove
@pytest.mark.parametrize(
    "effort", [Effort.QUICK, pytest.param(Effort.FULL, marks=pytest.mark.slow)], ids=lambda effort: effort.value
)
def test_the_package_is_proven(rowwise: Candidate, effort: Effort) -> None:
    [row] = list_rows([rowwise], detect_device("cpu"))
    assert isinstance(row, RowToTry)
    assert {result.check: result.detail for result in try_row(row.subject, effort).failed} == {}


def test_everything_that_the_contract_exports_is_there() -> None:
    for name in sightline.attention.__all__:
        assert vars(sightline.attention)[name] is not None
