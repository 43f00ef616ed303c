"""Tries checks in several processes in parallel. Checks of all rows are mixed, and long checks are divided.

    side_by_side ── a Brief, then one Errand at a time ──▶ worker      one pipe for each worker
                 ◀── a CheckResult, or a ConfigError ─────

Owns the processes: which one tries what, and what becomes of an errand whose process died. Each process is a fresh
interpreter, never a fork, because a CUDA context does not survive a fork. Does not know how a check is tried.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from subprocess import DEVNULL, Popen, TimeoutExpired

from sightline.core.errors import ConfigError
from sightline.testing.conformance.kit import CheckResult, RowReport, Verdict, checks_of, joined, settled
from sightline.testing.conformance.rows import PreparedRow, RowToTry, Watch
from sightline.testing.conformance.trial import CaseShare, Check
from sightline.testing.conformance.worker import Brief, Errand

_COMMAND = (sys.executable, "-P", "-c", "from sightline.testing.conformance.worker import main; main()")
_STANDARD_ERROR = 2
_LOOK_SECONDS = 1.0
"""How often silent processes are checked: one may have died while a process that it forked keeps its pipe open."""
_END_SECONDS = 10.0
"""Time for a process to exit after it closed its pipe."""


def side_by_side(
    brief: Brief, rows: Sequence[PreparedRow], checks: Sequence[Check], num_workers: int, watch: Watch
) -> Generator[RowReport, None, None]:
    """Yields the report of each row, in order. Checks of later rows run meanwhile.

    A check does not wait for those that it builds on; its result is corrected when they are done. Closing the generator
    kills the processes.
    """
    crew = _Crew(brief, rows, checks, num_workers, watch)
    try:
        for prepared in rows:
            yield crew.report(prepared)
    finally:
        crew.close()


@dataclass(frozen=True)
class _Job:
    """An errand, and what this process knows about it."""

    errand: Errand
    row: RowToTry
    check: Check
    shares: tuple[Errand, ...]
    """All errands of the check, in order, including this one."""


class _Crew:
    """The workers of one run, the jobs that are left, and the results so far."""

    def __init__(
        self, brief: Brief, rows: Sequence[PreparedRow], checks: Sequence[Check], num_workers: int, watch: Watch
    ) -> None:
        self._brief = brief.pickled()
        self._effort = brief.effort
        self._checks = checks
        self._num_workers = num_workers
        self._watch = watch
        self._rows_not_begun = [prepared.row for prepared in rows]
        self._left = deque(_in_order(rows, checks))
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
        """Gives each process a job while there are jobs left."""
        while self._left:
            job = self._left[0]
            room = 1 if job.check.alone else self._num_workers
            busy = [worker for worker in self._workers if worker.job is not None]
            idle = [worker for worker in self._workers if worker.job is None and worker.is_running]
            if len(busy) >= room:
                return
            # An idle process holds device memory too.
            for worker in idle[room:]:
                self._dismiss(worker)
            if not idle:
                idle = [_Worker(self._brief)]
                self._workers += idle
            if job.row in self._rows_not_begun:
                self._rows_not_begun.remove(job.row)
                self._watch.on_row(job.row)
            idle[0].begin(self._left.popleft())

    def _collect(self) -> None:
        """Waits for a result, but no longer than `_LOOK_SECONDS`, and takes every result that has arrived."""
        wait([worker.connection for worker in self._workers if worker.job is not None], _LOOK_SECONDS)
        for worker in tuple(self._workers):
            job = worker.job
            result = worker.collect()
            if job is None or result is None:
                continue
            self._results[job.errand] = result
            whole = self._joined(job.shares)
            if whole is not None:
                self._watch.on_result(job.row, whole)
            # An illegal access leaves the process's CUDA context broken, which must not fail another check.
            if result.verdict is Verdict.FAILED:
                self._dismiss(worker)

    def _joined(self, shares: Sequence[Errand]) -> CheckResult | None:
        """The result of a whole check, or None while a share of it is missing."""
        if any(share not in self._results for share in shares):
            return None
        return joined([self._results[share] for share in shares])

    def _dismiss(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()


class _Worker:
    """One process, with at most one job."""

    def __init__(self, brief: bytes) -> None:
        self.job: _Job | None = None
        self._begun = 0.0
        self.connection, theirs = Pipe()
        with theirs:
            self._process = Popen(
                (*_COMMAND, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                stdin=DEVNULL,
                # Standard output belongs to the report.
                stdout=_STANDARD_ERROR,
                # Ctrl-C then reaches this process alone, which kills each worker with whatever the worker started.
                process_group=0,
            )
        # If nobody is left to read it, `collect` finds out.
        with suppress(OSError):
            self.connection.send_bytes(brief)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def begin(self, job: _Job) -> None:
        self.job, self._begun = job, time.perf_counter()
        with suppress(OSError):
            self.connection.send(job.errand)

    def collect(self) -> CheckResult | None:
        """Returns the job's result and ends the job, or None if there is no result. Raises a worker's `ConfigError`."""
        if self.job is None:
            return None
        # Before `poll`: whatever a process sent before it ended can then be received.
        is_running = self.is_running
        answer: CheckResult | ConfigError
        try:
            if not self.connection.poll():
                if is_running:
                    return None
                # It is gone, though a process that it forked may keep its end of the pipe open.
                raise EOFError
            answer = self.connection.recv()
        except (EOFError, OSError):
            answer = self._lost(self.job)
        self.job = None
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    def end(self) -> None:
        self.connection.close()
        # Even if the process itself is gone: whatever it started is in its group.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _lost(self, job: _Job) -> CheckResult:
        with suppress(TimeoutExpired):
            self._process.wait(_END_SECONDS)
        # A process that closed its pipe and goes on has no exit code yet.
        self._process.kill()
        code = self._process.wait()
        told = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        detail = f"expected the check to end, got the end of its process: {told}"
        return CheckResult(job.check.name, Verdict.FAILED, detail, "", "", 0, time.perf_counter() - self._begun)


def _in_order(rows: Sequence[PreparedRow], checks: Sequence[Check]) -> list[_Job]:
    """All jobs of a run, in the order in which they are dealt.

    Row by row, so that an interrupted run has finished some rows. Within a row, the checks that build on most others
    come first: they take longest, and one that begins last would keep the other processes waiting.
    """
    ground: dict[str, set[str]] = {}
    for check in checks:
        ground[check.name] = {each for name in check.after if name in ground for each in (name, *ground[name])}
    jobs = [
        (check.alone, place, -len(ground[check.name]), _Job(errand, prepared.row, check, shares))
        for place, prepared in enumerate(rows)
        for check in checks_of(prepared.row.subject, checks)
        for shares in [_errands(prepared, check)]
        for errand in shares
    ]
    return [job for *_, job in sorted(jobs, key=lambda each: each[:3])]


def _errands(prepared: PreparedRow, check: Check) -> tuple[Errand, ...]:
    """One errand for each share of a check."""
    row, samples, identity = prepared.row, prepared.samples, prepared.identity
    shares = [CaseShare(number, check.num_shares) for number in range(check.num_shares)]
    return tuple(Errand(row.candidate.name, row.label, check.name, share, samples, identity) for share in shares)
