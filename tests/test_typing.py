"""The type checker is part of the contract: a forward without a plan does not type-check, nor does a setting that there
is not."""

from __future__ import annotations

from pathlib import Path

import mypy.api
import pytest

CASES = Path(__file__).parent / "typing_cases"
ROOT = CASES.parent.parent


@pytest.mark.parametrize(
    ("name", "count"), [("forward_takes_only_a_planned_batch.py", 9), ("llm_takes_settings_by_keyword.py", 7)]
)
def test_the_checker_refuses_exactly_the_marked_lines(name: str, count: int) -> None:
    case = CASES / name
    expected = {number for number, line in enumerate(case.read_text().splitlines(), start=1) if "# refused" in line}
    report, problems, _ = mypy.api.run(["--config-file", str(ROOT / "pyproject.toml"), str(case)])
    assert not problems
    found = {int(line.split(":")[1]) for line in report.splitlines() if case.name in line and ": error:" in line}
    assert len(expected) == count
    assert found == expected, report
