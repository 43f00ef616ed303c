"""Counts available pages while a decision changes which sequences run and what is shared.

A page stands for one page of every pool. Knows numbers of owners and locks. Does not know the store or the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class HeldPage(NamedTuple):
    """A page of a row."""

    page: int
    num_owners: int
    """Rows that hold it, and the prefix cache if it is cached."""


class LockedPage(NamedTuple):
    """A page of the prefix cache that a running sequence locks."""

    page: int
    num_owners: int
    num_locks: int


class Holding(NamedTuple):
    """What a running sequence gives up when it is retracted."""

    pages: tuple[HeldPage, ...]
    path: tuple[LockedPage, ...]


@dataclass(frozen=True)
class Tally:
    """The number of pages that are free or evictable, and what it depends on."""

    num_pages: int
    idle: frozenset[int] = frozenset()
    """Evictable pages among those that may be shared."""
    kept: frozenset[int] = frozenset()
    """Cached pages that admitted sequences share: each path from its first page on."""
    given_up: Mapping[int, int] = field(default_factory=dict)
    """Pages of retracted sequences, and how many of these held each."""
    unlocked: Mapping[int, int] = field(default_factory=dict)
    """Cached pages, and how many locks retracted sequences give up."""

    def cost(self, path: Sequence[int]) -> int:
        """Pages that are no longer evictable once the path is shared."""
        return sum(page in self.idle for page in self.newly_kept(path))

    def newly_kept(self, path: Sequence[int]) -> Iterator[int]:
        """Yields pages from the last to the first that is kept already: all before that one are kept too."""
        for page in reversed(path):
            if page in self.kept:
                return
            yield page

    def shared(self, path: Sequence[int]) -> Tally:
        """The tally once an admitted sequence shares the path."""
        kept = self.kept.union(self.newly_kept(path))
        return replace(self, num_pages=self.num_pages - self.cost(path), kept=kept)

    def retracted(self, holding: Holding) -> Tally:
        """The tally once a running sequence is retracted: pages that nothing else holds are free or evictable."""
        given_up, unlocked = dict(self.given_up), dict(self.unlocked)
        num_free, idle = 0, []
        for page, num_owners in holding.pages:
            given_up[page] = given_up.get(page, 0) + 1
            num_free += num_owners == given_up[page]
        for page, num_owners, num_locks in holding.path:
            unlocked[page] = unlocked.get(page, 0) + 1
            is_idle = num_locks == unlocked[page] and num_owners == given_up.get(page, 0) + 1
            if is_idle and page not in self.kept:
                idle.append(page)
        return Tally(self.num_pages + num_free + len(idle), self.idle.union(idle), self.kept, given_up, unlocked)
