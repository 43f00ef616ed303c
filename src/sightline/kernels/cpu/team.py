"""Threads that run the records of a program together, and sleep when there is none.

    run ──publishes──▶ every thread: record 0 │ record 1 │ … │ record n-1
                                              └ barrier: all finish a record before any begins the next

The calling thread is thread 0. The others spin for some microseconds after a program, because the next one often
follows at once, and then wait on a condition variable. All of it is compiled: no thread needs Python's lock between the
first record and the last. Does not know what records compute.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from sightline.kernels.cpu.compiled import compiled
from sightline.kernels.cpu.instructions import (
    SPINS_PER_MICROSECOND,
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    load64,
    pause,
    store64,
)
from sightline.kernels.cpu.record import ENTRY_POINT

_GENERATION, _ARRIVED, _SLEEPERS, _STOPPED = 0, 16 * 8, 32 * 8, 33 * 8
_ENTRIES, _LENGTH, _BASE, _NUM_THREADS = 48 * 8, 49 * 8, 50 * 8, 51 * 8
_MUTEX, _CONDITION = 64 * 8, 80 * 8
"""Offsets of the fields of a team's state, in bytes. Fields that all threads write often have their own cache lines."""
_NUM_WORDS = 96
_BARRIER_SPINS = 100 * SPINS_PER_MICROSECOND
"""Turns in which a thread waits for the others before it offers its core to them."""
_IDLE_SPINS = 50 * SPINS_PER_MICROSECOND
"""Turns in which a thread waits for the next program before it sleeps."""

_mutex_init = types.ExternalFunction("pthread_mutex_init", types.int32(types.int64, types.int64))
_mutex_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
_mutex_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
_condition_init = types.ExternalFunction("pthread_cond_init", types.int32(types.int64, types.int64))
_condition_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_condition_broadcast = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.int64))
_yield_core = types.ExternalFunction("sched_yield", types.int32())


def make_begin():
    """Fills the memory of a team. Arguments: state, the number of its threads."""

    def begin(state, num_threads, unused):
        _mutex_init(state + _MUTEX, 0)
        _condition_init(state + _CONDITION, 0)
        store64(state + _NUM_THREADS, 0, num_threads)

    return begin


@numba.njit
def _wait_until(address, target):
    """Waits until the counter at an address reaches the target."""
    turns = 0
    while atomic_load(address) < target:
        turns += 1
        if turns < _BARRIER_SPINS:
            pause()
        else:
            _yield_core()


@numba.njit
def _walk(state, thread, num_threads):
    """Runs the published program as one of the threads. Only thread 0 waits for the end of the last record."""
    entries, length = load64(state + _ENTRIES, 0), load64(state + _LENGTH, 0)
    target = load64(state + _BASE, 0)
    for index in range(length):
        call_kernel(load64(entries, 2 * index), load64(entries, 2 * index + 1), thread, num_threads)
        target += num_threads
        atomic_add(state + _ARRIVED, 1)
        if index < length - 1 or thread == 0:
            _wait_until(state + _ARRIVED, target)


@numba.njit
def _wake(state):
    """Publishes what was written before. A thread that is about to sleep looks once more behind its own mark."""
    atomic_add(state + _GENERATION, 1)
    if atomic_load(state + _SLEEPERS) > 0:
        _mutex_lock(state + _MUTEX)
        _condition_broadcast(state + _CONDITION)
        _mutex_unlock(state + _MUTEX)


def make_run():
    """Runs a program, as thread 0 of the team. Arguments: state, entries, their number."""

    def run(state, entries, length):
        num_threads = load64(state + _NUM_THREADS, 0)
        store64(state + _ENTRIES, 0, entries)
        store64(state + _LENGTH, 0, length)
        # Every thread arrives once at every record, so the counter is never reset: a late thread may still read it.
        store64(state + _BASE, 0, atomic_load(state + _ARRIVED))
        if num_threads > 1:
            _wake(state)
        _walk(state, 0, num_threads)

    return run


def make_stop():
    """Tells all threads to end. Argument: state."""

    def stop(state, unused, neither):
        atomic_store(state + _STOPPED, 1)
        _wake(state)

    return stop


def make_work():
    """Runs every published program until the team is stopped. Arguments: state, thread, num_threads."""

    def work(state, thread, num_threads):
        _work(state, thread, num_threads)

    return work


@numba.njit
def _work(state, thread, num_threads):
    seen = 0
    while True:
        turns = 0
        while atomic_load(state + _GENERATION) == seen and turns < _IDLE_SPINS:
            pause()
            turns += 1
        if atomic_load(state + _GENERATION) == seen:
            _mutex_lock(state + _MUTEX)
            atomic_add(state + _SLEEPERS, 1)
            while atomic_load(state + _GENERATION) == seen:
                _condition_wait(state + _CONDITION, state + _MUTEX)
            atomic_add(state + _SLEEPERS, -1)
            _mutex_unlock(state + _MUTEX)
        # Nothing is published before every thread has arrived at the end of the program before.
        seen += 1
        if atomic_load(state + _STOPPED) != 0:
            return
        _walk(state, thread, num_threads)


class Team:
    """The threads of a process that run programs, one program at a time."""

    def __init__(self, num_threads: int) -> None:
        """The calling thread counts as one of `num_threads`."""
        if num_threads < 1:
            raise ValueError(f"expected at least 1 thread, got {num_threads}")
        self.num_threads = num_threads
        self._run = ENTRY_POINT(compiled(make_run).address)
        self._crew = _Crew(num_threads)
        self._closing = weakref.finalize(self, _Crew.close, self._crew)

    def run(self, entries: NDArray[np.int64]) -> None:
        """Runs the records whose kernel and argument addresses are the rows of `entries` [num_records, 2], in order.

        The caller keeps what the addresses lead to. A second caller waits for its turn.
        """
        if not len(entries):
            return
        if self._crew.process != os.getpid() and self._closing.detach():
            # A fork copies the memory but not the threads, and the lock as it was, perhaps taken.
            self._crew = _Crew(self.num_threads)
            self._closing = weakref.finalize(self, _Crew.close, self._crew)
        with self._crew.lock:
            if not self._closing.alive:
                raise RuntimeError("expected a team that was not closed, got one that was; make another")
            self._run(self._crew.state, entries.ctypes.data, len(entries))

    def close(self) -> None:
        """Ends the threads. The team must not be used afterwards."""
        with self._crew.lock:
            self._closing()


class _Crew:
    """A team's threads in one process, and the memory through which they agree."""

    def __init__(self, num_threads: int) -> None:
        self.process = os.getpid()
        self.lock = threading.Lock()
        """Held by whoever runs a program."""
        self._memory = np.zeros(_NUM_WORDS + 16, dtype=np.int64)
        self.state = -(-self._memory.ctypes.data // 128) * 128
        ENTRY_POINT(compiled(make_begin).address)(self.state, num_threads, 0)
        self._stop = ENTRY_POINT(compiled(make_stop).address)
        work = ENTRY_POINT(compiled(make_work).address)
        self.threads = tuple(
            threading.Thread(
                target=work, args=(self.state, thread, num_threads), name=f"sightline-kernels-{thread}", daemon=True
            )
            for thread in range(1, num_threads)
        )
        for each in self.threads:
            each.start()

    def close(self) -> None:
        """Wakes the threads to end. In a fork of their process there are none."""
        if self.process == os.getpid():
            self._stop(self.state, 0, 0)
            join_all(self.threads)


def join_all(threads: Sequence[threading.Thread]) -> None:
    """Waits for every thread to end."""
    for each in threads:
        each.join()
