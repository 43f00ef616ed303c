"""How much may be under way: a bounded number of sequences, and how long whoever finds no place should wait.

Refuses before anything is read or computed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sightline.server.http.errors import busy, invalid, unavailable
from sightline.server.http.room import Room

RATE_SECONDS = 30.0
"""Over which the rate of ends is taken."""
MAX_RETRY_AFTER = 60
UNKNOWN_RETRY_AFTER = 5
"""Where nothing has ended lately to tell a rate by."""
MAX_REMEMBERED_ENDS = 1024


class AdmissionGate:
    """Counts sequences between their admission and their end."""

    def __init__(self, *, shared: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`shared` where there are several callers."""
        self._shared = shared
        self._clock = clock
        self._room = Room(0, shared=shared)
        self._ends: deque[tuple[float, int]] = deque(maxlen=MAX_REMEMBERED_ENDS)
        self.is_draining = False

    @property
    def num_held(self) -> int:
        return self._room.num_held

    def open(self, capacity: int) -> None:
        """From now on so many sequences may be under way."""
        self._room = Room(capacity, shared=self._shared)

    @contextmanager
    def admitted(self, caller: str, count: int) -> Iterator[None]:
        """Holds places for `count` sequences. Raises where there are too few."""
        self._check(caller, count)
        self._room.take(caller, count)
        try:
            yield
        finally:
            self._room.give_back(caller, count)
            self._ends.append((self._clock(), count))

    def check_room(self, caller: str) -> None:
        """Raises where not even one sequence has a place: before its body is read."""
        self._check(caller, 1)

    def _check(self, caller: str, count: int) -> None:
        if self.is_draining:
            raise unavailable("expected a server that goes on, got one that is shutting down; ask another", 5)
        most = self._room.most
        if most == 0:
            raise unavailable("expected a loaded model, got one that is still loading; try again soon", 2)
        if count > most:
            raise invalid(
                f"expected at most {most} sequences in one request, got {count}; send fewer prompts, or lower n",
                code="too_many_sequences",
            )
        left = self._room.left_for(caller)
        if count > left:
            raise busy(
                f"expected room for {count} more sequences, got {left}: {self.num_held} are under way; try again later",
                self.retry_after(count),
            )

    def retry_after(self, count: int) -> int:
        """Seconds in which, at the present rate, so many places come free."""
        now = self._clock()
        while self._ends and self._ends[0][0] < now - RATE_SECONDS:
            self._ends.popleft()
        ended = sum(each for _, each in self._ends)
        if ended == 0:
            return UNKNOWN_RETRY_AFTER
        elapsed = max(1.0, now - self._ends[0][0])
        return max(1, min(MAX_RETRY_AFTER, math.ceil(count * elapsed / ended)))
