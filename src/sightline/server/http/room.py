"""A bounded amount of something, shared among callers.

With several callers, each may take as much as it leaves free: one caller alone can fill half of the room, and the next
one still finds some.
"""

from __future__ import annotations

from collections import Counter


class Room:
    """A capacity, and how much of it each caller holds."""

    def __init__(self, capacity: int, *, shared: bool) -> None:
        """`shared` says that there are several callers."""
        self._capacity = capacity
        self._shared = shared
        self._held: Counter[str] = Counter()

    @property
    def most(self) -> int:
        """The most that one caller may ever hold."""
        return (self._capacity + 1) // 2 if self._shared else self._capacity

    @property
    def num_held(self) -> int:
        return self._held.total()

    def left_for(self, caller: str) -> int:
        """How much more a caller may take at present."""
        free = self._capacity - self.num_held
        return max(0, (free - self._held[caller] + 1) // 2) if self._shared else free

    def take(self, caller: str, count: int) -> None:
        self._held[caller] += count

    def give_back(self, caller: str, count: int) -> None:
        self._held[caller] -= count
        if not self._held[caller]:
            del self._held[caller]
