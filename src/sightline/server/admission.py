"""How much may be under way: a bounded number of sequences, shared among callers.

Refuses before anything is read or computed. Where there are several callers, each may take as much as it leaves
free: one alone fills half, and whoever comes next still finds room.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sightline.server.errors import busy, invalid, unavailable

RATE_SECONDS = 30.0
"""Over which the rate of ends is taken."""
MAX_RETRY_AFTER = 60
MAX_REMEMBERED_ENDS = 1024


class Admission:
    """Counts sequences between their admission and their end."""

    def __init__(self, *, shared: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`shared` where there are several callers."""
        self._shared = shared
        self._clock = clock
        self._capacity = 0
        self._held: Counter[str] = Counter()
        self._ends: deque[tuple[float, int]] = deque(maxlen=MAX_REMEMBERED_ENDS)
        self.is_draining = False
        self.num_refused = 0

    @property
    def num_held(self) -> int:
        return self._held.total()

    def set_capacity(self, capacity: int) -> None:
        """Sequences that may be under way; 0 until it is known."""
        self._capacity = capacity

    @contextmanager
    def admitted(self, caller: str, count: int) -> Iterator[None]:
        """Holds places for `count` sequences. Raises where there are too few."""
        self._check(caller, count)
        self._held[caller] += count
        try:
            yield
        finally:
            self._held[caller] -= count
            if not self._held[caller]:
                del self._held[caller]
            self._ends.append((self._clock(), count))

    def check_open(self) -> None:
        """Raises where nothing new is taken in."""
        if self.is_draining:
            raise unavailable("expected a server that goes on, got one that is shutting down; ask another", 5)
        if self._capacity == 0:
            raise unavailable("expected a loaded model, got one that is still loading; try again soon", 2)

    def check_room(self, caller: str) -> None:
        """Raises where not even one sequence has a place: before its body is read."""
        self._check(caller, 1)

    def _check(self, caller: str, count: int) -> None:
        self.check_open()
        most = self._capacity // 2 if self._shared else self._capacity
        if count > most:
            raise invalid(
                f"expected at most {most} sequences in one request, got {count}; send fewer prompts, or lower n",
                code="too_many_sequences",
            )
        free = self._capacity - self.num_held
        room = free - self._held[caller] if self._shared else free
        if count > room:
            self.num_refused += 1
            raise busy(
                f"expected room for {count} more sequences, got {max(0, room)}: {self.num_held} are under way; "
                "try again later",
                self.retry_after(count),
            )

    def retry_after(self, count: int) -> int:
        """Seconds in which, at the present rate, so many places come free."""
        now = self._clock()
        while self._ends and self._ends[0][0] < now - RATE_SECONDS:
            self._ends.popleft()
        ended = sum(each for _, each in self._ends)
        if ended == 0:
            return 1
        elapsed = max(1.0, now - self._ends[0][0])
        return max(1, min(MAX_RETRY_AFTER, math.ceil(count * elapsed / ended)))
