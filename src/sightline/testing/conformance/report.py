"""Conformance runs: which rows are tried and which are not, what came of each, and what is proven by it.

Owns the way from backends' names to a report. Does not know the checks, and prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
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
from sightline.testing.conformance.crew import SideBySide
from sightline.testing.conformance.errands import Brief
from sightline.testing.conformance.kit import CheckResult, RowReport, Verdict
from sightline.testing.conformance.proving import coverage, passed_checks
from sightline.testing.conformance.rows import RowToTry, SkippedRow, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Check, Effort
from sightline.testing.conformance.trying import InTurn, PreparedRow, Trier, Watch


@dataclass(frozen=True)
class TriedRow:
    """What came of one capability row, and what it means."""

    backend: str
    label: str
    report: RowReport
    proof: Proof | None
    """What was recorded: only of a full run that passed."""
    voided: bool
    """An earlier proof of the same was removed, because this run failed."""
    not_listed: tuple[str, ...]
    """Values that were asked for and that the row does not declare."""

    @property
    def num_steps(self) -> int:
        return sum(result.num_steps for result in self.report.results)

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.report.results)

    def of(self, verdict: Verdict) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.report.results if result.verdict is verdict)


Outcome: TypeAlias = TriedRow | SkippedRow | Unloadable


@dataclass(frozen=True)
class ConformanceReport:
    """What came of a run, row by row."""

    device: Device
    effort: Effort
    is_whole: bool
    """No check was left out: a part of them proves nothing."""
    proves: dict[str, str]
    """What each check proves, by name."""
    outcomes: tuple[Outcome, ...]
    named: tuple[str, ...]
    """Backends that were asked for; none where all that are installed were."""

    @property
    def failed(self) -> bool:
        return any(
            isinstance(outcome, Unloadable) or (isinstance(outcome, TriedRow) and not outcome.report.passed)
            for outcome in self.outcomes
        )

    @property
    def tried(self) -> tuple[TriedRow, ...]:
        """Rows that had a check to try."""
        rows = [outcome for outcome in self.outcomes if isinstance(outcome, TriedRow)]
        return tuple(row for row in rows if row.report.results)

    @property
    def untried(self) -> tuple[str, ...]:
        """Backends, then checks, that were asked for by name and that no row was tried of: that is no success."""
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
        """In terms of JSON."""
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
                    "checks": [
                        _result_data(result) | {"proves": self.proves[result.check]} for result in report.results
                    ],
                    "covered": Coverage.of(report.points).to_data(),
                    "proof": None if proof is None else proof.to_data(),
                    "voided": outcome.voided,
                }


def _result_data(result: CheckResult) -> dict[str, Any]:
    """In terms of JSON; the points of all checks are told together, as coverage."""
    data = asdict(replace(result, points=())) | {"verdict": result.verdict.value}
    del data["points"]
    return data


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
    """Every check of every row of the backends of these names, or of all that are installed, on one device.

    A full run that passes is recorded as a proof in `book`, the user's own by default; one that fails voids the proof
    that there was. A quick run, and one of `only` some checks, proves nothing; `checks` stand for the whole kit.
    Above one, so many `jobs` are processes that try checks side by side, and the report is the same, but for which of
    several failing cases of a check is told; `candidates` and `checks` must then be made of what other processes can
    import.
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
    # Before anything is tried: a proof is of the sources that were there when the run began.
    rows = [_prepared(row, samples, proofs) if isinstance(row, RowToTry) else row for row in list_rows(chosen, target)]
    trier: Trier = InTurn(effort, tried, watch)
    if jobs > 1:
        ready = [row for row in rows if isinstance(row, PreparedRow)]
        trier = SideBySide(Brief.of(target, effort, candidates, checks), ready, tried, jobs, watch)
    outcomes: list[Outcome] = []
    with closing(trier):
        for row in rows:
            if isinstance(row, PreparedRow):
                outcomes.append(_concluded(row, trier.report(row), proofs, _reports(row, outcomes)))
            else:
                outcomes.append(row)
    proves = {check.name: check.proves for check in tried}
    return ConformanceReport(target, effort, not only, proves, tuple(outcomes), tuple(dict.fromkeys(backends)))


def _chosen(checks: Sequence[Check], only: Sequence[str]) -> tuple[Check, ...]:
    known = [check.name for check in checks]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ConfigError(f"expected checks out of {', '.join(known)}, got {', '.join(unknown)}")
    return tuple(check for check in checks if not only or check.name in only)


def more_samples(
    head_dims: Sequence[int] = (), group_sizes: Sequence[int] = (), page_sizes: Sequence[int] = ()
) -> Samples:
    """The usual samples, and then these."""
    return Samples().and_more(head_dims, group_sizes, page_sizes)


def _prepared(row: RowToTry, samples: Samples, book: ProofBook | None) -> PreparedRow:
    """`book` is where a proof would go, None where there can be none."""
    subject = row.subject
    not_listed = samples.not_listed(subject.capability)
    samples = samples.for_problem(subject.problem)
    if book is None:
        return PreparedRow(row, samples, not_listed, None)
    identity = book.identify(row.candidate, subject.capability, subject.device)
    return PreparedRow(row, samples, not_listed, identity)


def _reports(prepared: PreparedRow, outcomes: Sequence[Outcome]) -> tuple[RowReport, ...]:
    """What came of the same row for other kinds of attention."""
    return tuple(
        outcome.report
        for outcome in outcomes
        if isinstance(outcome, TriedRow) and outcome.report.capability is prepared.row.subject.capability
    )


def _concluded(
    prepared: PreparedRow, report: RowReport, book: ProofBook | None, others: Sequence[RowReport]
) -> TriedRow:
    """Keeps or voids what a run proves; `others` are the row's for other kinds."""
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
