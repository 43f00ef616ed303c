"""Conformance runs: which rows are tried and which are not, what came of each, and what is proven by it.

Owns the way from backends' names to a report. Does not know the checks, and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from sightline.attention.backends import registry
from sightline.attention.capability import Capability, device_refusals
from sightline.attention.proof import Proof, ProofBook, declared, dtype_name, utc_now
from sightline.attention.selection import Candidate
from sightline.attention.spec import SpecKind
from sightline.core.device import Device, detect_device
from sightline.core.environment import proof_folder
from sightline.core.errors import ConfigError
from sightline.testing.bench import Subject
from sightline.testing.checks import CHECKS
from sightline.testing.kit import CheckResult, RowReport, Verdict, try_row
from sightline.testing.proving import coverage, passed_checks, with_proven
from sightline.testing.samples import Samples
from sightline.testing.trial import Check, Effort, cache_dtypes, compute_dtypes


@dataclass(frozen=True)
class RowToTry:
    """A capability row that can be tried here, for one kind of attention."""

    candidate: Candidate
    label: str
    """Tells the row from the backend's others: its dtypes, and the kind where it has several."""
    subject: Subject
    is_whole: bool = True
    """No other kind of the row is tried after this one: what is proven is all of a row."""


@dataclass(frozen=True)
class SkippedRow:
    """A capability row that cannot be tried here: neither proven nor refuted."""

    backend: str
    label: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Unloadable:
    """A backend that cannot even be imported, which is a failure."""

    backend: str
    reason: str


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

    @property
    def failed(self) -> bool:
        return any(
            isinstance(outcome, Unloadable) or (isinstance(outcome, TriedRow) and not outcome.report.passed)
            for outcome in self.outcomes
        )

    @property
    def tried(self) -> bool:
        """True where anything could be."""
        return any(isinstance(outcome, TriedRow) for outcome in self.outcomes)

    def to_data(self) -> dict[str, Any]:
        """In terms of JSON."""
        device = {"kind": self.device.kind.value, "name": self.device.name}
        return {
            "device": device | {"compute_capability": self.device.compute_capability},
            "effort": self.effort.value,
            "failed": self.failed,
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
                        asdict(result) | {"verdict": result.verdict.value, "proves": self.proves[result.check]}
                        for result in report.results
                    ],
                    "proof": None if proof is None else asdict(proof),
                    "voided": outcome.voided,
                }


@dataclass(frozen=True)
class Watch:
    """Who is told while a run is on its way."""

    on_row: Callable[[RowToTry], None] = lambda _row: None
    on_result: Callable[[RowToTry, CheckResult], None] = lambda _row, _result: None


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
) -> ConformanceReport:
    """Every check of every row of the backends of these names, or of all that are installed, on one device.

    A full run that passes is recorded as a proof in `book`, the user's own by default; one that fails voids the proof
    that there was. A quick run, and one of `only` some checks, proves nothing; `checks` stand for the whole kit.
    """
    there = registry.installed() if candidates is None else candidates
    chosen = [registry.find(name, there) for name in dict.fromkeys(backends)] or there
    target = detect_device(device)
    book = book or ProofBook(proof_folder())
    if effort is Effort.FULL and not only:
        book.prepare()
    samples, watch = samples or Samples(), watch or Watch()
    tried = _chosen(CHECKS if checks is None else checks, only)
    outcomes: list[Outcome] = []
    for row in list_rows(chosen, target):
        if isinstance(row, RowToTry):
            watch.on_row(row)
            outcomes.append(_try(row, effort, samples, tried, None if only else book, watch, _reports(row, outcomes)))
        else:
            outcomes.append(row)
    proves = {check.name: check.proves for check in tried}
    return ConformanceReport(target, effort, not only, proves, tuple(outcomes))


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


def list_rows(candidates: Sequence[Candidate], device: Device) -> tuple[RowToTry | SkippedRow | Unloadable, ...]:
    """Every row of every backend, each with why it cannot be tried on the device if it cannot."""
    listed: list[RowToTry | SkippedRow | Unloadable] = []
    for candidate in candidates:
        try:
            listed += _rows_of(candidate, device)
        except ConfigError as error:
            listed.append(Unloadable(candidate.name, str(error)))
    return tuple(listed)


def _rows_of(candidate: Candidate, device: Device) -> list[RowToTry | SkippedRow | Unloadable]:
    """A backend none of whose rows can be tried here is not loaded."""
    rows = candidate.rows()
    if not rows:
        return [SkippedRow(candidate.name, "no row", ("declares no capability",))]
    listed: list[RowToTry | SkippedRow | Unloadable] = []
    for label, capability in zip(row_labels(rows), rows, strict=True):
        reasons = not_here(capability, device)
        if reasons:
            listed.append(SkippedRow(candidate.name, label, reasons))
        else:
            listed += _each_kind(candidate, label, Subject(candidate.name, candidate.load(), capability, device))
    return listed


def _each_kind(candidate: Candidate, label: str, subject: Subject) -> list[RowToTry]:
    """A row is tried once for each kind of attention that it declares."""
    kinds = [kind for kind in SpecKind if kind in subject.capability.spec_kinds]
    return [
        RowToTry(
            candidate,
            label if len(kinds) == 1 else f"{label} {kind.value}",
            replace(subject, named_kind=kind),
            is_whole=kind is kinds[-1],
        )
        for kind in kinds
    ]


def row_labels(rows: Sequence[Capability]) -> tuple[str, ...]:
    """A short name for each row of a backend: its dtypes, and a number where others have the same."""
    names = ["+".join(sorted(map(dtype_name, row.dtypes), key=_by_width)) or "no dtype" for row in rows]
    return tuple(
        name if names.count(name) == 1 else f"{name}#{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    )


def not_here(capability: Capability, device: Device) -> tuple[str, ...]:
    """Why a row cannot be tried on a device, whatever is asked of it."""
    if not capability.spec_kinds:
        return ("declares no kind of attention",)
    if not compute_dtypes(capability) or not cache_dtypes(capability):
        return ("the kit has no oracle for its dtypes",)
    return device_refusals(capability, device)


def _reports(row: RowToTry, outcomes: Sequence[Outcome]) -> tuple[RowReport, ...]:
    """What came of the same row for other kinds of attention."""
    return tuple(
        outcome.report
        for outcome in outcomes
        if isinstance(outcome, TriedRow) and outcome.report.capability is row.subject.capability
    )


def _try(
    row: RowToTry,
    effort: Effort,
    samples: Samples,
    checks: Sequence[Check],
    book: ProofBook | None,
    watch: Watch,
    others: Sequence[RowReport],
) -> TriedRow:
    """`book` is where a proof goes, None where there can be none; `others` are the row's for other kinds."""
    subject = row.subject
    not_listed = samples.not_listed(subject.capability)
    samples = samples.for_problem(subject.problem)
    if book is None or effort is not Effort.FULL:
        report = try_row(subject, effort, samples, checks, lambda result: watch.on_result(row, result))
        return TriedRow(row.candidate.name, row.label, report, None, False, not_listed)
    # Identified before it is tried: a proof is of the sources that were there when the run began.
    identity = book.identify(row.candidate, subject.capability, subject.device)
    wider = with_proven(samples, book.find(row.candidate, subject.capability, subject.device))
    report = try_row(subject, effort, wider, checks, lambda result: watch.on_result(row, result))
    proof, voided = None, False
    passed = passed_checks((*others, report))
    if not report.passed:
        voided = book.void(identity)
    elif passed and row.is_whole:
        proof = Proof(identity, coverage(subject.capability, (*others, report)), passed, utc_now())
        book.record(proof)
    return TriedRow(row.candidate.name, row.label, report, proof, voided, not_listed)


def _by_width(dtype: str) -> tuple[int, str]:
    return (-int("".join(filter(str.isdigit, dtype)) or 0), dtype)
