"""The degradation ledger: every fallback, override, ignored field and disabled feature is one entry.

Owns the list and the strict rule. Does not know who prints it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sightline.core.errors import ConfigError


@dataclass(frozen=True)
class Degradation:
    """One thing that is not as the user or the model asked."""

    subject: str
    """What was asked for, as the user knows it: a flag, a config field, a feature."""
    outcome: str
    """What happens instead, and why."""
    remedy: str
    """What would avoid it."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.outcome} ({self.remedy})"


class Ledger:
    """Collects degradations; under `strict` the first one is an error."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._entries: list[Degradation] = []

    def record(self, subject: str, outcome: str, remedy: str) -> None:
        """Adds an entry once; raises `ConfigError` under `strict`."""
        entry = Degradation(subject, outcome, remedy)
        if self._strict:
            raise ConfigError(f"refused under --strict: {entry}")
        if entry not in self._entries:
            self._entries.append(entry)

    def __iter__(self) -> Iterator[Degradation]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
