"""What a run proves: the cases that passed, for every kind of attention that the row declares.

Knows reports and proofs. Does not know how a row is tried, nor where proofs are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from sightline.attention.coverage import Coverage
from sightline.attention.proof import Proof
from sightline.testing.conformance.kit import RowReport, Verdict


def passed_checks(reports: Sequence[RowReport]) -> tuple[str, ...]:
    """Of all kinds of attention of a row; none where any check failed."""
    if not all(report.passed for report in reports):
        return ()
    results = [result for report in reports for result in report.results]
    return tuple(dict.fromkeys(result.check for result in results if result.verdict is Verdict.PASSED))


def coverage(reports: Sequence[RowReport], earlier: Proof | None) -> Coverage:
    """What was tried, together with what an earlier proof of exactly the same covers."""
    tried = Coverage.of(point for report in reports for point in report.points)
    return tried if earlier is None else earlier.coverage.joined(tried)
