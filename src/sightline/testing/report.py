"""Conformance runs: which rows are tried and which are not, what came of each, and what is proven by it.

Owns the way from backends' names to a report. Does not know the checks, and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from sightline.attention.backends import registry
from sightline.attention.capability import ANY, Capability, Wildcard, device_refusals
from sightline.attention.contract import AttentionBackend, SoftmaxInputs
from sightline.attention.proof import Coverage, Proof, ProofBook, declared, dtype_name, utc_now
from sightline.attention.selection import Candidate
from sightline.core.device import Device, detect_device
from sightline.core.environment import proof_folder
from sightline.core.errors import ConfigError
from sightline.testing.bench import Subject
from sightline.testing.checks import CHECKS
from sightline.testing.kit import CheckResult, RowReport, Verdict, try_row
from sightline.testing.trial import Check, Effort, Samples, cache_dtypes, compute_dtypes


@dataclass(frozen=True)
class RowToTry:
    """A capability row that can be tried here."""

    candidate: Candidate
    label: str
    """Tells the row from the backend's others: its dtypes."""
    subject: Subject


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
            outcomes.append(_try(row, effort, samples, tried, None if only else book, watch))
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
    return _more(Samples(), head_dims, group_sizes, page_sizes)


def _more(samples: Samples, head_dims: Sequence[int], group_sizes: Sequence[int], page_sizes: Sequence[int]) -> Samples:
    return Samples(
        _joined(samples.head_dims, head_dims),
        _joined(samples.group_sizes, group_sizes),
        _joined(samples.page_sizes, page_sizes),
    )


def list_rows(candidates: Sequence[Candidate], device: Device) -> tuple[RowToTry | SkippedRow | Unloadable, ...]:
    """Every row of every backend, each with why it cannot be tried on the device if it cannot."""
    listed: list[RowToTry | SkippedRow | Unloadable] = []
    for candidate in candidates:
        backend = load_backend(candidate)
        if isinstance(backend, Unloadable):
            listed.append(backend)
            continue
        if not backend.capabilities:
            listed.append(SkippedRow(candidate.name, "no row", ("declares no capability",)))
        for label, capability in zip(row_labels(backend.capabilities), backend.capabilities, strict=True):
            reasons = not_here(capability, device)
            subject = Subject(candidate.name, backend, capability, device)
            listed.append(
                SkippedRow(candidate.name, label, reasons) if reasons else RowToTry(candidate, label, subject)
            )
    return tuple(listed)


def load_backend(candidate: Candidate) -> type[AttentionBackend[SoftmaxInputs]] | Unloadable:
    """The backend's class, or why there is none."""
    try:
        return candidate.load()
    except ConfigError as error:
        return Unloadable(candidate.name, str(error))


def row_labels(rows: Sequence[Capability]) -> tuple[str, ...]:
    """A short name for each row of a backend: its dtypes, and a number where others have the same."""
    names = ["+".join(sorted(map(dtype_name, row.dtypes), key=_by_width)) or "no dtype" for row in rows]
    return tuple(
        name if names.count(name) == 1 else f"{name}#{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    )


def not_here(capability: Capability, device: Device) -> tuple[str, ...]:
    """Why a row cannot be tried on a device, whatever is asked of it."""
    if not compute_dtypes(capability) or not cache_dtypes(capability):
        return ("the kit has no oracle for its dtypes",)
    return device_refusals(capability, device)


def _try(
    row: RowToTry, effort: Effort, samples: Samples, checks: Sequence[Check], book: ProofBook | None, watch: Watch
) -> TriedRow:
    """`book` is where a proof goes; None where there can be none."""
    subject = row.subject
    if book is None or effort is not Effort.FULL:
        report = try_row(subject, effort, samples, checks, lambda result: watch.on_result(row, result))
        return TriedRow(row.candidate.name, row.label, report, None, False, _not_listed(subject.capability, samples))
    # Identified before it is tried: a proof is of the sources that were there when the run began.
    identity = book.identify(row.candidate, subject.capability, subject.device)
    earlier = book.find(row.candidate, subject.capability, subject.device)
    # What was proven stays so, together with what is new: a proof is of values that have met.
    wider = samples if earlier is None else _wider(samples, earlier.coverage)
    report = try_row(subject, effort, wider, checks, lambda result: watch.on_result(row, result))
    proof, voided = None, False
    passed = tuple(result.check for result in report.results if result.verdict is Verdict.PASSED)
    if not report.passed:
        voided = book.void(identity)
    elif passed:
        proof = Proof(identity, _coverage(subject.capability, wider), passed, utc_now())
        book.record(proof)
    return TriedRow(row.candidate.name, row.label, report, proof, voided, _not_listed(subject.capability, samples))


def _wider(samples: Samples, covered: Coverage) -> Samples:
    return _more(samples, covered.head_dims, covered.group_sizes, covered.page_sizes)


def _coverage(row: Capability, samples: Samples) -> Coverage:
    return Coverage(
        samples.of_head_dims(row),
        samples.of_group_sizes(row),
        samples.of_page_sizes(row),
        tuple(map(dtype_name, compute_dtypes(row))),
        tuple(map(dtype_name, cache_dtypes(row))),
    )


def _not_listed(row: Capability, samples: Samples) -> tuple[str, ...]:
    usual = Samples()
    columns: tuple[tuple[str, frozenset[int] | Wildcard, tuple[int, ...], tuple[int, ...]], ...] = (
        ("head dimension", row.head_dims, samples.head_dims, usual.head_dims),
        ("group size", row.group_sizes, samples.group_sizes, usual.group_sizes),
        ("page size", row.page_sizes, samples.page_sizes, usual.page_sizes),
    )
    return tuple(
        f"{name} {value}"
        for name, listed, asked, known in columns
        for value in asked
        if listed is not ANY and value not in listed and value not in known
    )


def _joined(usual: tuple[int, ...], more: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*usual, *more)))


def _by_width(dtype: str) -> tuple[int, str]:
    return (-int("".join(filter(str.isdigit, dtype)) or 0), dtype)
