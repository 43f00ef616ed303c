"""The type checker is part of the contract: a forward without a plan does not type-check."""

from __future__ import annotations

from pathlib import Path

import mypy.api

CASES = Path(__file__).parent / "typing_cases"
ROOT = CASES.parent.parent


def test_the_checker_refuses_exactly_the_marked_lines() -> None:
    case = CASES / "forward_takes_only_a_planned_batch.py"
    expected = {number for number, line in enumerate(case.read_text().splitlines(), start=1) if "# refused" in line}
    report, problems, _ = mypy.api.run(["--config-file", str(ROOT / "pyproject.toml"), str(case)])
    assert not problems
    found = {int(line.split(":")[1]) for line in report.splitlines() if case.name in line and ": error:" in line}
    assert len(expected) == 9
    assert found == expected, report
