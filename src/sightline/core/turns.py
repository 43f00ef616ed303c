"""Turns: threads share one resource, one at a time in order of arrival, and one of them drives it for all.

    run(work) ──▶ queue ──▶ inside ──▶ over
                    ▲  ▲      │
             driver │  │ready │ give_way
                    │  └─ asleep
                    └─────────┘

One turn is inside. A turn that waits for something gives way. The first to do so becomes the driver: it queues again
and does the next piece of work when its turn comes. The others sleep until the driver finds that they are ready. When
the driver ends, a sleeper becomes the driver. Does not know what the work is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
logger = logging.getLogger("sightline")

CHECK_SECONDS = 1.0
"""How often a waiting thread checks that the turn inside is alive.

A turn that ends wakes the next one. The check covers turns that could not: Ctrl-C interrupted its end, or its thread
was lost in a fork.
"""


def is_gone(thread: threading.Thread) -> bool:
    """True if the thread has ended. The main thread may still run what was registered with `atexit`."""
    return not thread.is_alive() and thread is not threading.main_thread()


class ThreadTurn:
    """One call of one thread."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.gate = threading.Lock()
        """Locked while the thread waits."""
        self.is_ready: Callable[[], bool] | None = None
        """The condition that it sleeps for."""
        self.error: Exception | None = None
        """Raised in the thread when it wakes."""
        self.is_nested = False
        """True if the thread is already inside, in a call further up its stack."""
        self.is_over = False

    @property
    def is_lost(self) -> bool:
        """True if the turn ended without passing on, or its thread has ended."""
        return self.is_over or is_gone(self.thread)

    def wants_in(self) -> bool:
        """True if its condition holds. An error counts too: the thread will raise it again itself."""
        try:
            return self.is_ready is None or self.is_ready()
        except Exception:
            logger.debug("a caller's condition raised, and its thread is woken", exc_info=True)
            return True


class Turns:
    """The turn inside, the queue, and the sleepers.

    Fields are written in an order that keeps them usable wherever Ctrl-C interrupts the main thread. The lock is
    reentrant, because a signal handler or a finaliser may call in here at any moment.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Guards the fields below. Never held while a turn works."""
        self._inside: ThreadTurn | None = None
        self._queue: deque[ThreadTurn] = deque()
        self._asleep: dict[ThreadTurn, None] = {}
        """In the order in which they fell asleep."""
        self._driver: ThreadTurn | None = None
        """A call inside or in the queue, for as long as another one sleeps."""

    def run(self, work: Callable[[ThreadTurn], _T]) -> _T:
        """Calls `work` when it is this thread's turn. Nested calls of the same thread run at once."""
        turn = ThreadTurn()
        try:
            self._enter(turn)
            return work(turn)
        finally:
            # No call before this line: Python handles signals at calls, so the end of a turn is always recorded.
            turn.is_over = True
            self._leave(turn)

    def drive_until(self, turn: ThreadTurn, is_ready: Callable[[], bool], work: Callable[[], None]) -> None:
        """Repeats `work` until `is_ready()`, or sleeps while another thread does. Returns inside.

        `is_ready` may be called by any thread that has the turn. Waiting threads get a turn between two pieces of work.
        An exception from `work` is raised in all sleeping threads too; Ctrl-C only in the interrupted one.
        """
        while not is_ready():
            if self._queue and not turn.is_nested:
                self._give_way(turn, is_ready)
                if is_ready():
                    return
            if not turn.is_nested:
                self._driver = turn
            try:
                work()
            except Exception as error:
                self._wake(lambda _: True, error)
                raise
            self._wake(ThreadTurn.wants_in)

    def _enter(self, turn: ThreadTurn) -> None:
        with self._lock:
            if self._is_let_in(turn):
                return
            turn.gate.acquire(blocking=False)
            self._queue.append(turn)
        self._wait(turn)

    def _give_way(self, turn: ThreadTurn, is_ready: Callable[[], bool]) -> None:
        """Lets others go first. Returns inside: ready, or as the driver."""
        with self._lock:
            turn.is_ready = is_ready
            turn.gate.acquire(blocking=False)
            if self._driver is None or self._driver is turn:
                self._driver = turn
                self._queue.append(turn)
            else:
                self._asleep[turn] = None
            self._pass_on()
        self._wait(turn)
        if turn.error is not None:
            raise turn.error

    def _wait(self, turn: ThreadTurn) -> None:
        while self._inside is not turn and not turn.is_nested:
            if not turn.gate.acquire(timeout=CHECK_SECONDS):
                with self._lock:
                    self._is_let_in(turn)

    def _is_let_in(self, turn: ThreadTurn) -> bool:
        while self._inside is not None and self._inside.is_lost:
            self._pass_on()
        if self._inside is None:
            self._inside = turn
            self._forget(turn)
        elif self._inside.thread is turn.thread:
            turn.is_nested = self._inside is not turn
        return self._inside is turn or turn.is_nested

    def _leave(self, turn: ThreadTurn) -> None:
        with self._lock:
            self._forget(turn)
            if self._driver is turn:
                self._driver = next(iter(self._asleep), None)
                self._queue_up(self._driver)
            if self._inside is turn:
                self._pass_on()

    def _pass_on(self) -> None:
        """Lets the next one in."""
        self._inside = self._queue[0] if self._queue else None
        if self._inside is not None:
            self._forget(self._inside)
            if self._inside.gate.locked():
                self._inside.gate.release()

    def _queue_up(self, turn: ThreadTurn | None) -> None:
        """Moves a sleeper to the end of the queue; does nothing if it is no longer asleep."""
        if turn is not None and turn in self._asleep:
            self._queue.append(turn)
            del self._asleep[turn]

    def _forget(self, turn: ThreadTurn) -> None:
        self._asleep.pop(turn, None)
        if turn in self._queue:
            self._queue.remove(turn)

    def _wake(self, wants_in: Callable[[ThreadTurn], bool], error: Exception | None = None) -> None:
        """Queues the sleepers that want in; `error`, if given, is raised in them."""
        if not self._asleep:
            return
        with self._lock:
            asleep = tuple(self._asleep)
        for turn in [turn for turn in asleep if wants_in(turn)]:
            with self._lock:
                turn.error = error
                self._queue_up(turn)
