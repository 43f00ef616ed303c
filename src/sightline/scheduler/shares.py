"""Usage per caller, so that callers share the engine evenly however many requests each sends.

Counts tokens: prompt tokens that must be computed, and generated ones. The caller with the least usage is next. A
caller that returns starts no lower than the least of those present, so absence earns no credit.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    """Tokens per caller."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._present: Counter[str] = Counter()
        self._floor = 0
        """Initial usage of an absent caller: the least usage among those present, when last computed."""
        self._num_joined = 0
        """Callers that have joined since."""

    def of(self, caller: str) -> int:
        return self._tokens.get(caller, self._floor)

    def join(self, caller: str) -> None:
        """Adds a sequence of the caller."""
        self._present[caller] += 1
        if self._present[caller] > 1:
            return
        self._num_joined += 1
        # Computing the floor takes time linear in the number of callers, so it is done only occasionally.
        if 8 * self._num_joined >= len(self._present):
            self._num_joined = 0
            others = (self.of(other) for other in self._present if other != caller)
            self._floor = max(self._floor, min(others, default=0))
        self._tokens[caller] = max(self.of(caller), self._floor)
        if len(self._tokens) > 2 * len(self._present) + 64:
            self._forget()

    def leave(self, caller: str) -> None:
        """Removes a sequence of the caller."""
        self._present[caller] -= 1
        if not self._present[caller]:
            del self._present[caller]
        if not self._present:
            # Usage while it was the only caller cost no other caller anything.
            self._floor = max(self._floor, self.of(caller))

    def charge(self, caller: str, num_tokens: int) -> None:
        self._tokens[caller] = self._tokens.get(caller, self._floor) + num_tokens

    def _forget(self) -> None:
        """Drops absent callers that would return with the least usage anyway."""
        for caller in [caller for caller, tokens in self._tokens.items() if tokens <= self._floor]:
            if caller not in self._present:
                del self._tokens[caller]
