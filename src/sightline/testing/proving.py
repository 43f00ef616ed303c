"""What a run proves: the values that were tried, for every kind of attention that the row declares.

Knows reports and rows. Does not know how a row is tried, nor where proofs are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sightline.attention.capability import Capability
from sightline.attention.proof import Coverage, Proof, dtype_name
from sightline.testing.kit import RowReport, Verdict
from sightline.testing.samples import Samples
from sightline.testing.trial import cache_dtypes, compute_dtypes


def with_proven(samples: Samples, proof: Proof | None) -> Samples:
    """What was proven stays so, together with what is new: a proof is of values that have met."""
    if proof is None:
        return samples
    covered = proof.coverage
    return samples.and_more(covered.head_dims, covered.group_sizes, covered.page_sizes)


def passed_checks(reports: Sequence[RowReport]) -> tuple[str, ...]:
    """Of all kinds of attention of a row; none where any check failed."""
    if not all(report.passed for report in reports):
        return ()
    results = [result for report in reports for result in report.results]
    return tuple(dict.fromkeys(result.check for result in results if result.verdict is Verdict.PASSED))


def coverage(row: Capability, reports: Sequence[RowReport]) -> Coverage:
    """What was tried for every kind of attention of the row."""

    def tried(column: Callable[[Samples, Capability], tuple[int, ...]]) -> tuple[int, ...]:
        last, *others = (column(report.samples, row) for report in reversed(reports))
        return tuple(value for value in last if all(value in other for other in others))

    return Coverage(
        tried(Samples.of_head_dims),
        tried(Samples.of_group_sizes),
        tried(Samples.of_page_sizes),
        tuple(map(dtype_name, compute_dtypes(row))),
        tuple(map(dtype_name, cache_dtypes(row))),
    )
