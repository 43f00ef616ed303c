"""How much every caller has had, so that callers share the engine evenly however many requests each sends.

A caller's share counts tokens: those of its prompts that must be computed, and those that it is given. Whoever has had
the least is next. A caller that comes back starts no lower than the least of those that are here: time away saves up
nothing.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    """Tokens by caller."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._present: Counter[str] = Counter()
        self._floor = 0
        """Where a caller starts that is not here: the least that those here have had, when it was last asked for."""
        self._num_joined = 0
        """Callers that have come since."""

    def of(self, caller: str) -> int:
        return self._tokens.get(caller, self._floor)

    def join(self, caller: str) -> None:
        """One more sequence of the caller is here."""
        self._present[caller] += 1
        if self._present[caller] > 1:
            return
        self._num_joined += 1
        # Asking everybody costs as much as there are: now and then is enough.
        if 8 * self._num_joined >= len(self._present):
            self._num_joined = 0
            others = (self.of(other) for other in self._present if other != caller)
            self._floor = max(self._floor, min(others, default=0))
        self._tokens[caller] = max(self.of(caller), self._floor)
        if len(self._tokens) > 2 * len(self._present) + 64:
            self._forget()

    def leave(self, caller: str) -> None:
        """One sequence of the caller is gone."""
        self._present[caller] -= 1
        if not self._present[caller]:
            del self._present[caller]
        if not self._present:
            # What it had while it was alone was nobody's loss.
            self._floor = max(self._floor, self.of(caller))

    def charge(self, caller: str, num_tokens: int) -> None:
        self._tokens[caller] = self._tokens.get(caller, self._floor) + num_tokens

    def _forget(self) -> None:
        """Drops callers that are away and would come back with the least share anyway."""
        for caller in [caller for caller, tokens in self._tokens.items() if tokens <= self._floor]:
            if caller not in self._present:
                del self._tokens[caller]
