"""Runs the checks of a row, each after the checks that it builds on.

    built ─▶ cache-write ─▶ write-slots ─▶ first-read ─▶ causal ─▶ context ─▶ … ─▶ ragged ─┬▶ features ─▶ covering
                                                                                           ├▶ pages, lengths
                                                                                           └▶ plans, memory, numerics

If a check fails, those that build on it are blocked, not failed: the failed checks point at the fault.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from sightline.attention.capability import Capability
from sightline.attention.dimensions import Point
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import WHOLE, CaseShare, Check, CheckFailed, CheckProgress, Effort, Trial


class Verdict(Enum):
    """The result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    BLOCKED = "blocked"
    """A check that it builds on failed."""
    EXCUSED = "excused"
    """The row does not declare it, or the device has no room for it."""


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one check, and the reason."""

    check: str
    verdict: Verdict
    detail: str
    """The reason for any verdict but PASSED."""
    case: str
    """What was being tried when the check failed."""
    trace: str
    """The traceback of an unexpected error."""
    num_steps: int
    """Steps that were compared with the oracle."""
    seconds: float
    points: tuple[Point, ...] = ()
    """The cases that passed, as points of `attention.coverage`."""

    def to_data(self) -> dict[str, Any]:
        """Returns the result as JSON data, without the points, which are reported as coverage."""
        data = vars(self) | {"verdict": self.verdict.value}
        del data["points"]
        return data

    def __str__(self) -> str:
        """The verdict in one line. A failure tells its reason at once: the report may never come."""
        reason = f": {' '.join(self.detail.split())}" if self.verdict is Verdict.FAILED else ""
        return f"{self.check}: {self.verdict.value} ({self.seconds:.1f} s){reason}"

    def lines(self, *, verbose: bool) -> Iterator[str]:
        """Yields the detail, what was tried, and if `verbose` the traceback."""
        yield from self.detail.splitlines()
        if self.case:
            yield f"tried: {self.case}"
        if verbose:
            yield from self.trace.splitlines()


@dataclass(frozen=True)
class RowReport:
    """The results of all checks of one capability row."""

    backend: str
    capability: Capability
    effort: Effort
    samples: Samples
    results: tuple[CheckResult, ...]

    def of(self, verdict: Verdict) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if result.verdict is verdict)

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return self.of(Verdict.FAILED)

    @property
    def summary(self) -> str:
        """For example `61 passed, 3 excused (2140 steps, 10.5 s)`."""
        counts = ", ".join(f"{len(found)} {verdict.value}" for verdict in Verdict if (found := self.of(verdict)))
        num_steps, seconds = (sum(vars(result)[name] for result in self.results) for name in ("num_steps", "seconds"))
        return f"{counts or 'no checks'} ({num_steps} steps, {seconds:.1f} s)"

    @property
    def points(self) -> tuple[Point, ...]:
        """The cases of all checks that passed, as points of `attention.coverage`."""
        return tuple(point for result in self.results for point in result.points)

    @property
    def passed(self) -> bool:
        """True if no check failed, and so none is blocked."""
        return not self.failed


def checks_of(subject: Subject, checks: Sequence[Check] = CHECKS) -> tuple[Check, ...]:
    """The checks that apply to the subject's kind of attention."""
    return tuple(check for check in checks if subject.kind in check.kinds)


def try_row(
    subject: Subject,
    effort: Effort = Effort.FULL,
    samples: Samples | None = None,
    checks: Sequence[Check] = CHECKS,
    on_result: Callable[[CheckResult], None] | None = None,
) -> RowReport:
    """Tries every check on one capability row, in order. Records no proof."""
    samples = samples or Samples().for_problem(subject.problem)
    results: dict[str, CheckResult] = {}
    for check in checks_of(subject, checks):
        results[check.name] = result = try_check(check, subject, effort, samples, results.values())
        if on_result is not None:
            on_result(result)
    return RowReport(subject.name, subject.capability, effort, samples, tuple(results.values()))


def try_check(
    check: Check,
    subject: Subject,
    effort: Effort,
    samples: Samples,
    earlier: Iterable[CheckResult] = (),
    share: CaseShare = WHOLE,
) -> CheckResult:
    """Tries one check, or a share of it, unless it is excused or one of the `earlier` results blocks it."""
    excuse = check.excused(subject)
    if excuse is not None:
        return CheckResult(check.name, Verdict.EXCUSED, excuse, "", "", 0, 0.0)
    return _blocked(check, earlier) or _run(check, subject, effort, samples, share)


def joined(shares: Sequence[CheckResult]) -> CheckResult:
    """Joins the results of all shares of a check: the first failure if there is one."""
    worst = next((share for share in shares if share.verdict is Verdict.FAILED), shares[0])
    return replace(
        worst,
        num_steps=sum(share.num_steps for share in shares),
        seconds=sum(share.seconds for share in shares),
        points=tuple(point for share in shares for point in share.points),
    )


def settled(check: Check, tried: CheckResult, earlier: Iterable[CheckResult]) -> CheckResult:
    """Corrects the result of a check that ran before those that it builds on: it is blocked if one of them failed."""
    return tried if tried.verdict is Verdict.EXCUSED else _blocked(check, earlier) or tried


def _blocked(check: Check, earlier: Iterable[CheckResult]) -> CheckResult | None:
    missing = [
        result.check
        for result in earlier
        if result.check in check.after and result.verdict in (Verdict.FAILED, Verdict.BLOCKED)
    ]
    if not missing:
        return None
    return CheckResult(check.name, Verdict.BLOCKED, f"builds on {', '.join(missing)}", "", "", 0, 0.0)


def _run(check: Check, subject: Subject, effort: Effort, samples: Samples, share: CaseShare) -> CheckResult:
    started = time.perf_counter()
    verdict, detail, trace, progress = Verdict.PASSED, "", "", CheckProgress()
    try:
        check.run(Trial(subject, effort, samples, progress=progress, share=share))
    except CheckFailed as failure:
        verdict, detail = Verdict.FAILED, str(failure)
    except Exception as error:  # whatever a backend raises fails the check
        verdict, detail = Verdict.FAILED, f"expected no error, got {_raised(error, subject)}"
        trace = "".join(traceback.format_exception(error))
    case = progress.case if verdict is Verdict.FAILED else ""
    seconds, points = time.perf_counter() - started, tuple(progress.points)
    return CheckResult(check.name, verdict, detail, case, trace, progress.num_steps, seconds, points)


def _raised(error: Exception, subject: Subject) -> str:
    """Describes an error, with the last line of the backend's own file in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == inspect.getfile(subject.backend)]
    place = own[-1] if own else frames[-1]
    return f"{type(error).__name__}: {error} (in {place.name}, {place.filename}:{place.lineno})"
