"""Conformance runs: chooses the rows and checks, has them tried, records proofs, and reports the result of every row.

Does not know the checks, and prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from sightline.attention.backends import registry
from sightline.attention.coverage import Coverage
from sightline.attention.declared_rows import Unloadable
from sightline.attention.proof import Proof, ProofBook, declared, utc_now
from sightline.attention.selection import Candidate
from sightline.core.device import Device, detect_device
from sightline.core.environment import proof_folder
from sightline.core.errors import ConfigError
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.crew import side_by_side
from sightline.testing.conformance.kit import RowReport, Verdict, try_row
from sightline.testing.conformance.rows import PreparedRow, RowToTry, SkippedRow, Watch, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Check, Effort
from sightline.testing.conformance.worker import Brief


@dataclass(frozen=True)
class TriedRow:
    """The results of one capability row, and what became of its proof."""

    backend: str
    label: str
    report: RowReport
    proof: Proof | None
    """The recorded proof; None unless a full run passed."""
    voided: bool
    """True if this run failed and removed an earlier proof."""
    not_listed: tuple[str, ...]
    """Requested values that the row does not declare."""


Outcome: TypeAlias = TriedRow | SkippedRow | Unloadable


@dataclass(frozen=True)
class ConformanceReport:
    """The result of a run, row by row."""

    device: Device
    effort: Effort
    is_whole: bool
    """False if only some of the checks were requested, which proves nothing."""
    proves: dict[str, str]
    """What each check proves, by the check's name."""
    outcomes: tuple[Outcome, ...]
    named: tuple[str, ...]
    """Backends that were requested by name; empty if all installed ones were tried."""

    @property
    def failed(self) -> bool:
        return any(
            isinstance(outcome, Unloadable) or (isinstance(outcome, TriedRow) and not outcome.report.passed)
            for outcome in self.outcomes
        )

    @property
    def tried(self) -> tuple[TriedRow, ...]:
        """Rows with at least one check."""
        rows = [outcome for outcome in self.outcomes if isinstance(outcome, TriedRow)]
        return tuple(row for row in rows if row.report.results)

    @property
    def untried(self) -> tuple[str, ...]:
        """Backends, then checks, that were requested by name and not tried on any row. A run with any is no success."""
        done = [
            (row.backend, result.check)
            for row in self.tried
            for result in row.report.results
            if result.verdict is not Verdict.EXCUSED
        ]
        backends, checks = {backend for backend, _ in done}, {check for _, check in done}
        named_checks = () if self.is_whole else self.proves
        return (
            *(name for name in self.named if name not in backends),
            *(name for name in named_checks if name not in checks),
        )

    def to_data(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        device = {"kind": self.device.kind.value, "name": self.device.name}
        return {
            "device": device | {"compute_capability": self.device.compute_capability},
            "effort": self.effort.value,
            "failed": self.failed,
            "untried": list(self.untried),
            "rows": [self._outcome_data(outcome) for outcome in self.outcomes],
        }

    def _outcome_data(self, outcome: Outcome) -> dict[str, Any]:
        match outcome:
            case Unloadable(backend, reason):
                return {"backend": backend, "status": "broken", "reasons": [reason]}
            case SkippedRow(backend, label, reasons):
                return {"backend": backend, "row": label, "status": "skipped", "reasons": list(reasons)}
            case TriedRow(backend, label, report, proof):
                return {
                    "backend": backend,
                    "row": label,
                    "status": "passed" if report.passed else "failed",
                    "declared": declared(report.capability),
                    "not_listed": list(outcome.not_listed),
                    "checks": [result.to_data() | {"proves": self.proves[result.check]} for result in report.results],
                    "covered": Coverage.of(report.points).to_data(),
                    "proof": None if proof is None else proof.to_data(),
                    "voided": outcome.voided,
                }


def run_conformance(
    backends: Sequence[str] = (),
    *,
    device: str = "auto",
    effort: Effort = Effort.FULL,
    samples: Samples | None = None,
    checks: Sequence[Check] | None = None,
    only: Sequence[str] = (),
    book: ProofBook | None = None,
    candidates: Sequence[Candidate] | None = None,
    watch: Watch | None = None,
    jobs: int = 1,
) -> ConformanceReport:
    """Tries every check on every row of the named backends, or of all installed ones, on one device.

    A full run that passes is recorded as a proof in `book`, by default the user's own; one that fails removes an
    earlier proof. A quick run, or a run of `only` some checks, proves nothing. `checks` replace the kit's own.

    With `jobs` above 1, that many processes try checks in parallel. The report is the same, except that another of
    several failing cases of a check may be reported. `candidates` and `checks` must then be importable by name.
    """
    if jobs < 1:
        raise ConfigError(f"expected at least 1 job, got {jobs}; 1 tries one check after the other")
    cores = os.cpu_count() or 1
    if jobs > max(cores, 2):
        raise ConfigError(f"expected at most {max(cores, 2)} jobs on {cores} cores, got {jobs}; each keeps one busy")
    there = registry.installed() if candidates is None else candidates
    chosen = [registry.find(name, there) for name in dict.fromkeys(backends)] or there
    target = detect_device(device)
    proofs = None if only or effort is not Effort.FULL else book or ProofBook(proof_folder())
    if proofs is not None:
        proofs.prepare()
    samples, watch = samples or Samples(), watch or Watch()
    tried = _chosen(CHECKS if checks is None else checks, only)
    # Before anything is tried: a proof is of the sources at the beginning of the run.
    rows = [_prepared(row, samples, proofs) if isinstance(row, RowToTry) else row for row in list_rows(chosen, target)]
    ready = [row for row in rows if isinstance(row, PreparedRow)]
    reports = _in_turn(ready, effort, tried, watch)
    if jobs > 1:
        own = None if all(check in CHECKS for check in tried) else tried
        brief = Brief(target, effort, None if candidates is None else tuple(candidates), own)
        reports = side_by_side(brief, ready, tried, jobs, watch)
    outcomes: list[Outcome] = []
    with closing(reports):
        for row in rows:
            if isinstance(row, PreparedRow):
                outcomes.append(_concluded(row, next(reports), proofs, _reports(row, outcomes)))
            else:
                outcomes.append(row)
    proves = {check.name: check.proves for check in tried}
    return ConformanceReport(target, effort, not only, proves, tuple(outcomes), tuple(dict.fromkeys(backends)))


def _in_turn(
    rows: Sequence[PreparedRow], effort: Effort, checks: Sequence[Check], watch: Watch
) -> Generator[RowReport, None, None]:
    """Tries the rows in this process; `side_by_side` is the other way."""
    for prepared in rows:
        row = prepared.row
        watch.on_row(row)
        yield try_row(row.subject, effort, prepared.samples, checks, partial(watch.on_result, row))


def _chosen(checks: Sequence[Check], only: Sequence[str]) -> tuple[Check, ...]:
    known = [check.name for check in checks]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ConfigError(f"expected checks out of {', '.join(known)}, got {', '.join(unknown)}")
    return tuple(check for check in checks if not only or check.name in only)


def _prepared(row: RowToTry, samples: Samples, book: ProofBook | None) -> PreparedRow:
    """`book` is None if the run records no proofs."""
    subject = row.subject
    identity = None if book is None else book.identify(row.candidate, subject.capability, subject.device)
    return PreparedRow(row, samples.for_problem(subject.problem), samples.not_listed(subject.capability), identity)


def _reports(prepared: PreparedRow, outcomes: Sequence[Outcome]) -> tuple[RowReport, ...]:
    """The reports of the same row for other kinds of attention."""
    return tuple(
        outcome.report
        for outcome in outcomes
        if isinstance(outcome, TriedRow) and outcome.report.capability is prepared.row.subject.capability
    )


def _concluded(
    prepared: PreparedRow, report: RowReport, book: ProofBook | None, others: Sequence[RowReport]
) -> TriedRow:
    """Records or removes the proof of a row. `others` are the row's reports for other kinds of attention."""
    row, identity = prepared.row, prepared.identity
    proof, voided = None, False
    if book is not None and identity is not None:
        passed = passed_checks((*others, report))
        if not report.passed:
            voided = book.void(identity)
        elif passed and row.is_whole:
            proof = Proof(identity, coverage((*others, report), book.read(identity)), passed, utc_now())
            book.record(proof)
    return TriedRow(row.candidate.name, row.label, report, proof, voided, prepared.not_listed)


def passed_checks(reports: Sequence[RowReport]) -> tuple[str, ...]:
    """The checks that passed for any kind of attention of a row; empty if any check failed."""
    if not all(report.passed for report in reports):
        return ()
    results = [result for report in reports for result in report.results]
    return tuple(dict.fromkeys(result.check for result in results if result.verdict is Verdict.PASSED))


def coverage(reports: Sequence[RowReport], earlier: Proof | None) -> Coverage:
    """What the reports cover, joined with an earlier proof of the same row and versions."""
    tried = Coverage.of(point for report in reports for point in report.points)
    return tried if earlier is None else earlier.coverage.joined(tried)
