"""docs/regressions.md names tests that exist, and every test file of this folder is named there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs/regressions.md"


def named_tests(page: str) -> list[tuple[str, str]]:
    """Paths and tests, as the page writes them."""
    return re.findall(r"`([\w/.-]+\.py)::(\w+)`", page)


def missing(page: str) -> list[str]:
    """What the page names and the source does not have."""
    return [f"{path}::{test}" for path, test in named_tests(page) if not has_test(PROJECT / path, test)]


def has_test(path: Path, test: str) -> bool:
    if not path.is_file():
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == test for node in ast.parse(path.read_text()).body)


def test_every_test_that_the_page_names_exists() -> None:
    page = PAGE.read_text()
    assert len(named_tests(page)) > 20
    assert len(named_tests(page)) == page.count("::test_"), "each is written as path::test in quotes"
    assert missing(page) == []


@pytest.mark.parametrize(
    "wrong",
    ["tests/nowhere.py::test_it", "tests/test_source.py::test_that_nobody_wrote", "tests/test_source.py::ROOT"],
)
def test_a_test_that_does_not_exist_would_be_found(wrong: str) -> None:
    assert missing(f"| 1 | it broke | `{wrong}` |") == [wrong]


def test_every_entry_has_a_test_or_says_what_it_waits_for() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "what happened" not in line]
    assert len(rows) == 21
    assert [row for row in rows if "::test_" not in row and "waits for" not in row] == []


def test_every_file_of_this_folder_is_on_the_page() -> None:
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert {Path(path).name for path, _ in named_tests(PAGE.read_text())} >= files
