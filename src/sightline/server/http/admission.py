"""Admission control: a bounded number of sequences under way, and `Retry-After` for requests that find no place.

Refuses before anything is read or computed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sightline.server.http.errors import busy, invalid
from sightline.server.http.room import Room

RATE_SECONDS = 30.0
"""The window over which the rate of finished sequences is measured."""
MAX_RETRY_AFTER = 60
UNKNOWN_RETRY_AFTER = 5
"""Seconds to wait if nothing has finished within the window."""
MAX_REMEMBERED_ENDS = 1024


class AdmissionGate:
    """Counts sequences from their admission to their end."""

    def __init__(self, capacity: int, *, shared: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`capacity` is the number of sequences; `shared` says that there are several callers."""
        self._clock = clock
        self._room = Room(capacity, shared=shared)
        self._ends: deque[tuple[float, int]] = deque(maxlen=MAX_REMEMBERED_ENDS)

    @property
    def num_held(self) -> int:
        return self._room.num_held

    @contextmanager
    def admitted(self, caller: str, count: int = 1) -> Iterator[Places]:
        """Holds places for `count` sequences, and can take more. Raises `ApiError` if there are too few."""
        places = Places(self._room, caller, self.retry_after)
        places.grow(count)
        try:
            yield places
        finally:
            self._room.give_back(caller, places.count)
            self._ends.append((self._clock(), places.count))

    def check_room(self, caller: str) -> None:
        """Raises `ApiError` if there is no place for even one sequence; called before a body is read."""
        Places(self._room, caller, self.retry_after).check(1)

    def retry_after(self, count: int) -> int:
        """Seconds until `count` places come free at the present rate."""
        now = self._clock()
        while self._ends and self._ends[0][0] < now - RATE_SECONDS:
            self._ends.popleft()
        ended = sum(each for _, each in self._ends)
        if ended == 0:
            return UNKNOWN_RETRY_AFTER
        elapsed = max(1.0, now - self._ends[0][0])
        return max(1, min(MAX_RETRY_AFTER, math.ceil(count * elapsed / ended)))


class Places:
    """The places of one request."""

    def __init__(self, room: Room, caller: str, retry_after: Callable[[int], int]) -> None:
        self._room = room
        self._caller = caller
        self._retry_after = retry_after
        self.count = 0

    def grow(self, count: int) -> None:
        """Holds places for `count` sequences in all. Raises `ApiError`, and holds no more, if there are too few."""
        self.check(count)
        more = max(0, count - self.count)
        self._room.take(self._caller, more)
        self.count += more

    def check(self, count: int) -> None:
        most = self._room.most
        if count > most:
            raise invalid(
                f"expected at most {most} sequences in one request, got {count}; send fewer prompts, or lower n",
                code="too_many_sequences",
            )
        more, left = count - self.count, self._room.left_for(self._caller)
        if more > left:
            under_way = self._room.num_held - self.count
            raise busy(
                f"expected room for {count} more sequences, got {left + self.count}: {under_way} are under way; "
                "try again later",
                self._retry_after(more),
            )
