"""Responses that are kept in memory, so that a later request can go on from one or ask for it again.

Bounded in number and in bytes. Callers share both limits: where one is exceeded, the caller that holds the most of it
loses its response that was used longest ago, so one with no more than an equal share loses nothing to others. Does not
know what a response is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

OVERHEAD_BYTES = 1 << 10
"""Memory of an entry beside its contents."""


@dataclass(frozen=True)
class StoredResponse:
    """What is kept of a response."""

    body: bytes
    """As it is sent."""
    conversation: bytes
    """The turns up to its end, for the desk that reads the next request."""

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.body) + len(self.conversation)


class ResponseStore:
    """The responses of all callers, by caller and id."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """0 of either: nothing is kept."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        """By caller; each caller's in order of use."""
        self._bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def keep(self, caller: str, name: str, response: StoredResponse) -> None:
        """Keeps a response. Others, or this one if it alone is too large, may be lost to make room."""
        self._kept.setdefault(caller, OrderedDict())[name] = response
        self._bytes[caller] = self._bytes.get(caller, 0) + response.num_bytes
        while len(self) > self._max_responses:
            self._drop_oldest(self._largest(lambda each: len(self._kept[each])))
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(self._largest(lambda each: self._bytes[each]))

    def find(self, caller: str, name: str) -> StoredResponse | None:
        """A caller's response, which counts as used; None if it has none of that name."""
        held = self._kept.get(caller)
        if held is None or name not in held:
            return None
        held.move_to_end(name)
        return held[name]

    def delete(self, caller: str, name: str) -> bool:
        """Forgets a response. Returns False if the caller has none of that name."""
        if name not in self._kept.get(caller, {}):
            return False
        self._bytes[caller] -= self._kept[caller].pop(name).num_bytes
        if not self._kept[caller]:
            del self._kept[caller], self._bytes[caller]
        return True

    def _largest(self, size: Callable[[str], int]) -> str:
        return max(self._kept, key=size)

    def _drop_oldest(self, caller: str) -> None:
        self.delete(caller, next(iter(self._kept[caller])))
