"""The ledger: everything that differs from what was asked, and notes about harmless facts.

A `Degradation` is a fallback, an override, an ignored field or a disabled feature; `--strict` refuses it. A `Note` is a
fact that was shown not to affect the result; `--strict` accepts it. Owns both lists and the strict rule. Does not know
who prints them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sightline.core.errors import ConfigError


@dataclass(frozen=True)
class Degradation:
    """One difference from what the user or the model asked for."""

    subject: str
    """What was asked for, as the user knows it: a flag, a config field, a feature."""
    outcome: str
    """What happens instead, and why."""
    remedy: str
    """What would avoid it."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.outcome} ({self.remedy})"


@dataclass(frozen=True)
class Note:
    """One fact worth knowing that does not affect the result."""

    subject: str
    """What it is about: a config field, some tensors of a checkpoint."""
    fact: str
    """The fact, and why it changes nothing."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.fact}"


class Ledger:
    """Collects degradations and notes. Under `strict` the first degradation is an error."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._entries: list[Degradation | Note] = []

    def degrade(self, subject: str, outcome: str, remedy: str) -> None:
        """Adds a degradation once; raises `ConfigError` under `strict`."""
        entry = Degradation(subject, outcome, remedy)
        if self._strict:
            raise ConfigError(f"refused under --strict: {entry}")
        self._add(entry)

    def note(self, subject: str, fact: str) -> None:
        """Adds a note once."""
        self._add(Note(subject, fact))

    @property
    def degradations(self) -> tuple[Degradation, ...]:
        return tuple(entry for entry in self._entries if isinstance(entry, Degradation))

    @property
    def notes(self) -> tuple[Note, ...]:
        return tuple(entry for entry in self._entries if isinstance(entry, Note))

    def __iter__(self) -> Iterator[Degradation | Note]:
        """Both kinds, in the order in which they were added."""
        return iter(self._entries)

    def _add(self, entry: Degradation | Note) -> None:
        if entry not in self._entries:
            self._entries.append(entry)
