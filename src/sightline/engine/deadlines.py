"""When requests must have ended. Knows ids and times only."""

from __future__ import annotations

import heapq
from collections.abc import Collection


class Deadlines:
    """The deadlines of requests, the next one first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request_id: str, live: Collection[str]) -> None:
        """Adds a deadline. Those of requests that are not in `live` are dropped once they are the majority."""
        if len(self._heap) > 2 * len(live) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline, request_id))

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the next one; None if there is none."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def due(self, now: float) -> str | None:
        """The request whose deadline has passed first; it stays until `drop_first`. None if there is none."""
        return self._heap[0][1] if self._heap and self._heap[0][0] <= now else None

    def drop_first(self) -> None:
        heapq.heappop(self._heap)
