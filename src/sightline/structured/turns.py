"""Threads that compile, in turns: one caller's work, however slow, leaves threads for the work of others.

    submit ─▶ a queue for each caller ─ the caller with the least running ─▶ thread ─▶ Compilation.result
                  └ dropped if nobody waits any more

A compilation cannot be interrupted. One that runs beyond its time keeps its thread, and another takes its place. A
caller for whom nothing runs waits for no other caller's work. Both hold while there are threads; each caller can have a
part of them only. Does not know grammars.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class TurnLimits:
    """How many compilations run at once."""

    num_in_time: int = 2
    """Compilations within their time, beside the first one of each caller."""
    num_of_caller: int = 3
    """Compilations of one caller, also those beyond their time."""
    num_threads: int = 8
    """All compilations."""


class Compilation(Generic[T]):
    """Work that waits for a thread, runs or is done."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.result: Future[T] = Future()
        self.due_at: dict[str, float] = {}
        """When each caller stops waiting, in `time.monotonic`."""
        self.started_at: float | None = None

    @property
    def is_dropped(self) -> bool:
        """True if it will never run, because nobody waited for it when its turn came."""
        return self.result.cancelled()

    def run(self) -> None:
        try:
            result = self.work()
        except BaseException as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(result)


@dataclass
class _Caller(Generic[T]):
    waiting: deque[Compilation[T]] = field(default_factory=deque)
    running: set[Compilation[T]] = field(default_factory=set)
    last_turn: int = 0
    """Which turn of all it had last."""


class CompileTurns(Generic[T]):
    """Runs compilations for callers. Thread-safe."""

    def __init__(self, seconds: float, limits: TurnLimits = TurnLimits()) -> None:  # noqa: B008
        """A compilation may run for `seconds` before another takes its place."""
        self._seconds = seconds
        self._limits = limits
        self._changed = threading.Condition()
        self._callers: dict[str, _Caller[T]] = {}
        self._threads: list[threading.Thread] = []
        self._turns = count(1)
        self._is_closed = False

    def submit(self, compilation: Compilation[T], caller: str) -> None:
        """Queues a compilation for a caller, or lets it wait on. It may be queued for several, and runs once."""
        with self._changed:
            now = time.monotonic()
            if compilation.result.done():
                return
            if compilation.started_at is not None:
                compilation.due_at.setdefault(caller, compilation.started_at + self._seconds)
            elif caller in compilation.due_at:
                if compilation.due_at[caller] <= now:
                    compilation.due_at[caller] = now + self._seconds
            elif not self._is_closed:
                compilation.due_at[caller] = now + self._seconds
                self._callers.setdefault(caller, _Caller()).waiting.append(compilation)
                self._start_thread()
                self._changed.notify()

    def close(self) -> None:
        """Ends the threads, after what they compile. What waits is dropped."""
        with self._changed:
            self._is_closed = True
            for caller in self._callers.values():
                for each in caller.waiting:
                    if each.started_at is None:
                        each.result.cancel()
                caller.waiting.clear()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        wanted = sum(len(each.waiting) + len(each.running) for each in self._callers.values())
        if len(self._threads) < min(wanted, self._limits.num_threads):
            # A daemon: what runs on beyond its time must not hold up the end of the process.
            name = f"sightline-grammars-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            name, compilation = turn
            compilation.run()
            with self._changed:
                self._callers[name].running.discard(compilation)
                self._forget_idle()
                self._changed.notify_all()
            # What a grammar keeps must not wait here for the next one.
            del turn, compilation

    def _next(self) -> tuple[str, Compilation[T]] | None:
        """Waits for a turn; None once closed."""
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                self._drop(now)
                if (turn := self._turn(now)) is not None:
                    return turn
                self._changed.wait(self._seconds_until_overdue(now))
            return None

    def _turn(self, now: float) -> tuple[str, Compilation[T]] | None:
        """Starts the next compilation, if one may run."""
        limits = self._limits
        running = [each for caller in self._callers.values() for each in caller.running]
        is_free = sum(self._is_in_time(each, now) for each in running) < limits.num_in_time
        able = {
            name: caller
            for name, caller in self._callers.items()
            if caller.waiting and len(caller.running) < (limits.num_of_caller if is_free else 1)
        }
        if not able:
            return None
        name = min(able, key=lambda each: (len(able[each].running), able[each].last_turn))
        compilation = able[name].waiting.popleft()
        for each in compilation.due_at:
            if each != name and each in self._callers and compilation in self._callers[each].waiting:
                self._callers[each].waiting.remove(compilation)
        compilation.started_at, able[name].last_turn = now, next(self._turns)
        able[name].running.add(compilation)
        return name, compilation

    def _is_in_time(self, compilation: Compilation[T], now: float) -> bool:
        return compilation.started_at is not None and now < compilation.started_at + self._seconds

    def _drop(self, now: float) -> None:
        """Drops what nobody waits for any more."""
        for caller in self._callers.values():
            while caller.waiting and max(caller.waiting[0].due_at.values()) <= now:
                dropped = caller.waiting.popleft()
                dropped.result.cancel()
        self._forget_idle()

    def _forget_idle(self) -> None:
        for name in [name for name, caller in self._callers.items() if not caller.waiting and not caller.running]:
            del self._callers[name]

    def _seconds_until_overdue(self, now: float) -> float | None:
        """How long until a thread may take the place of another; None if nothing waits."""
        if not any(caller.waiting for caller in self._callers.values()):
            return None
        starts = [each.started_at for caller in self._callers.values() for each in caller.running]
        ends = [start + self._seconds for start in starts if start is not None and start + self._seconds > now]
        return max(0.001, min(ends) - now) if ends else None
