"""Records run at once, or kept on a tape and run again as one program.

    launch(record) ── eager ──▶ a program of one record
                   └─ inside `recording()` ──▶ Tape ──▶ Program, which `run` repeats

A program repeats the recorded calls at the recorded addresses. Does not know steps, nor what threads are made of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.profiler import record_function

from sightline.kernels.cpu.record import ENTRY_POINT, Record


class Threads(Protocol):
    """Runs records, as `team.Team` does."""

    @property
    def num_threads(self) -> int: ...

    def run(self, entries: NDArray[np.int64]) -> None:
        """Runs the records whose kernel and argument addresses are the rows of `entries` [num_records, 2], in order."""


class CallingThread:
    """Runs records in the calling thread alone."""

    @property
    def num_threads(self) -> int:
        return 1

    def run(self, entries: NDArray[np.int64]) -> None:
        for kernel, arguments in entries.tolist():
            ENTRY_POINT(kernel)(arguments, 0, 1)


class Program:
    """Records in order. Keeps alive what they read and write."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = tuple(records)
        self.entries = np.array(
            [(record.kernel, record.arguments.ctypes.data) for record in self.records], dtype=np.int64
        ).reshape(-1, 2)
        """[num_records, 2]: the address of each kernel and of its arguments."""


class Tape:
    """Records that were launched but not run."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def program(self) -> Program:
        return Program(self.records)


class _Recording(threading.local):
    """The tape of a thread: what other threads launch meanwhile is theirs, and runs."""

    tape: Tape | None = None


class CpuLauncher:
    """Runs records, or keeps them."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._recording = _Recording()

    @property
    def num_threads(self) -> int:
        return self._threads.num_threads

    def launch(self, record: Record) -> None:
        tape = self._recording.tape
        if tape is not None:
            tape.records.append(record)
        elif _is_profiled():
            self._run_named(record)
        else:
            self._run_one(record)

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Keeps on a tape what this thread launches in the block, and runs none of it."""
        if self._recording.tape is not None:
            raise RuntimeError("expected one recording at a time in a thread, got a second one inside the first")
        tape = self._recording.tape = Tape()
        try:
            yield tape
        finally:
            self._recording.tape = None

    def run(self, program: Program) -> None:
        """Runs a program from its first record to its last. One after the other while torch's profiler is on."""
        if not _is_profiled():
            self._threads.run(program.entries)
            return
        for record in program.records:
            self._run_named(record)

    def _run_one(self, record: Record) -> None:
        self._threads.run(np.array([[record.kernel, record.arguments.ctypes.data]], dtype=np.int64))

    def _run_named(self, record: Record) -> None:
        """Runs a record under its name, for torch's profiler."""
        with record_function(record.name):
            self._run_one(record)


def _is_profiled() -> bool:
    is_enabled: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return is_enabled


def inline_launcher() -> CpuLauncher:
    """A launcher without threads of its own."""
    return CpuLauncher(CallingThread())
