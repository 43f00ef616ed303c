"""Processes that try checks side by side, all rows' checks mixed, and the shares of the long ones.

    SideBySide ── a brief, then one errand at a time ─▶ worker       and so for each worker,
               ◀─ a result for each, or a refusal ────               over a connection of its own

Owns the processes: who tries what, and what becomes of an errand whose process died. Each is a fresh interpreter, never
a fork, which no CUDA context survives. Does not know how a check is tried.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from subprocess import DEVNULL, Popen, TimeoutExpired

from sightline.core.errors import ConfigError
from sightline.testing.conformance.errands import Brief, Errand, ErrandResult, packed, unpacked
from sightline.testing.conformance.kit import CheckResult, RowReport, Verdict, checks_of, joined, settled
from sightline.testing.conformance.line import Line, wait_for_any
from sightline.testing.conformance.rows import RowToTry
from sightline.testing.conformance.trial import CaseShare, Check
from sightline.testing.conformance.trying import PreparedRow, Trier, Watch

_COMMAND = (sys.executable, "-P", "-m", "sightline.testing.conformance.worker")
_STANDARD_ERROR = 2
_LOOK_SECONDS = 1.0
"""How often processes are looked at that say nothing: one may be gone while others hold its connection open."""
_END_SECONDS = 10.0
"""What a process has to end in, once its connection has."""


@dataclass(frozen=True)
class _Job:
    """An errand, and what this process knows of it."""

    errand: Errand
    row: RowToTry
    check: Check
    shares: tuple[Errand, ...]
    """All of the check, in order, this errand among them."""


class SideBySide(Trier):
    """Begins with the first row that is asked for, and tries the checks of all rows meanwhile.

    A check is tried before those that it builds on are done, and its result put right when they are.
    """

    def __init__(
        self, brief: Brief, rows: Sequence[PreparedRow], checks: Sequence[Check], num_workers: int, watch: Watch
    ) -> None:
        self._brief = packed(brief)
        self._effort = brief.effort
        self._checks = tuple(checks)
        self._num_workers = num_workers
        self._watch = watch
        self._rows_not_begun = [prepared.row for prepared in rows]
        self._left = deque(_in_order(rows, self._checks))
        self._results: dict[Errand, CheckResult] = {}
        self._workers: list[_Worker] = []

    def report(self, prepared: PreparedRow) -> RowReport:
        subject = prepared.row.subject
        results: dict[str, CheckResult] = {}
        for check in checks_of(subject, self._checks):
            shares = _errands(prepared, check)
            while (tried := self._joined(shares)) is None:
                self._deal()
                self._collect()
            results[check.name] = settled(check, tried, results.values())
        return RowReport(subject.name, subject.capability, self._effort, prepared.samples, tuple(results.values()))

    def close(self) -> None:
        for worker in tuple(self._workers):
            self._dismiss(worker)

    def _deal(self) -> None:
        """Gives every process something to do, as far as there is something."""
        while self._left:
            job = self._left[0]
            room = 1 if job.check.alone else self._num_workers
            busy = [worker for worker in self._workers if worker.job is not None]
            idle = [worker for worker in self._workers if worker.job is None and worker.is_there]
            if len(busy) >= room:
                return
            # An idle process holds memory of the device too.
            for worker in idle[room:]:
                self._dismiss(worker)
            worker = idle[0] if idle else self._hire()
            self._say_begun(job.row)
            worker.begin(self._left.popleft())

    def _say_begun(self, row: RowToTry) -> None:
        if row in self._rows_not_begun:
            self._rows_not_begun.remove(row)
            self._watch.on_row(row)

    def _collect(self) -> None:
        """Waits until something has come of one errand at least, or a while."""
        wait_for_any([worker.line for worker in self._workers if worker.job is not None], _LOOK_SECONDS)
        for worker in tuple(self._workers):
            job = worker.job
            result = worker.collect()
            if job is None or result is None:
                continue
            self._results[job.errand] = result
            whole = self._joined(job.shares)
            if whole is not None:
                self._watch.on_result(job.row, whole)
            # After an illegal access nothing on the device works in that process: no other check shall fail for it.
            if result.verdict is Verdict.FAILED:
                self._dismiss(worker)

    def _joined(self, shares: Sequence[Errand]) -> CheckResult | None:
        """What came of a check; None before all of it has been tried."""
        if any(share not in self._results for share in shares):
            return None
        return joined([self._results[share] for share in shares])

    def _hire(self) -> _Worker:
        worker = _Worker(self._brief)
        self._workers.append(worker)
        return worker

    def _dismiss(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()


class _Worker:
    """One process, with at most one job."""

    def __init__(self, brief: bytes) -> None:
        self.job: _Job | None = None
        self._begun = 0.0
        self.line, theirs = Line.pair()
        with closing(theirs):
            self._process = Popen(
                (*_COMMAND, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                stdin=DEVNULL,
                # Standard output belongs to the report.
                stdout=_STANDARD_ERROR,
                # Ctrl-C reaches this process alone, which ends the others, and with each what it started.
                process_group=0,
            )
        self._send(brief)

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def begin(self, job: _Job) -> None:
        self.job, self._begun = job, time.perf_counter()
        self._send(packed(job.errand))

    def collect(self) -> CheckResult | None:
        """What came of the job, which is then done; None where nothing has. Raises `ConfigError` for a refusal."""
        if self.job is None:
            return None
        # Asked first: what it sent before it ended is there by then.
        is_there = self.is_there
        try:
            if not wait_for_any([self.line], 0.0):
                if is_there:
                    return None
                # Gone, though what it forked may hold its end open.
                raise EOFError
            answer = unpacked(self.line.receive(), ErrandResult)
        except (EOFError, OSError):
            answer = ErrandResult(self._lost(self.job), None)
        self.job = None
        if answer.refusal is not None:
            raise ConfigError(answer.refusal)
        return answer.result

    def end(self) -> None:
        self.line.close()
        # Also of a process that is gone: its group lives while anything does that it started.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, message: bytes) -> None:
        # Where nobody is left to read it, `collect` tells.
        with suppress(OSError):
            self.line.send(message)

    def _lost(self, job: _Job) -> CheckResult:
        with suppress(TimeoutExpired):
            self._process.wait(_END_SECONDS)
        # One that closed its connection and goes on has no exit code to tell yet.
        self._process.kill()
        self._process.wait()
        detail = f"expected the check to end, got the end of its process: {_told(self._process.returncode)}"
        seconds = time.perf_counter() - self._begun
        return CheckResult(job.check.name, Verdict.FAILED, detail, "", "", 0, seconds)


def _told(code: int) -> str:
    """How a process ended."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"


def _in_order(rows: Sequence[PreparedRow], checks: Sequence[Check]) -> list[_Job]:
    """All checks of all rows, as they are dealt out."""
    by_name = {check.name: check for check in checks}
    jobs = [
        _Job(errand, prepared.row, check, shares)
        for prepared in rows
        for check in checks_of(prepared.row.subject, checks)
        for shares in [_errands(prepared, check)]
        for errand in shares
    ]
    # Row after row, so that a run that is cut off has come to the end of some. In a row those first that build on most
    # others, which take longest: begun last, one would go on when there is nothing left for the others.
    places = {id(prepared.row): place for place, prepared in enumerate(rows)}
    return sorted(jobs, key=lambda job: (job.check.alone, places[id(job.row)], -len(_ground(job.check, by_name))))


def _ground(check: Check, by_name: Mapping[str, Check]) -> set[str]:
    """Every check that it builds on, and that those do."""
    found: set[str] = set()
    ahead = list(check.after)
    while ahead:
        name = ahead.pop()
        if name in by_name and name not in found:
            found.add(name)
            ahead += by_name[name].after
    return found


def _errands(prepared: PreparedRow, check: Check) -> tuple[Errand, ...]:
    """One for each share."""
    row, samples, identity = prepared.row, prepared.samples, prepared.identity
    shares = [CaseShare(number, check.num_shares) for number in range(check.num_shares)]
    return tuple(Errand(row.candidate.name, row.label, check.name, share, samples, identity) for share in shares)
