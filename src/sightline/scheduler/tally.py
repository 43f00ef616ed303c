"""Counts available pages while a decision changes which sequences run and what is shared.

Reads the store and the prefix cache and changes neither: a decision is tried on a tally first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sightline.cache.pools import BundlePages, CacheStore
from sightline.cache.prefix import PrefixCache, PrefixMatch, PrefixNode
from sightline.scheduler.sequence import SequenceState


class Tally:
    """Pages that are free or evictable."""

    def __init__(self, store: CacheStore, prefixes: PrefixCache | None) -> None:
        self._store = store
        self.num_pages = store.num_free_pages + (0 if prefixes is None else prefixes.num_evictable)
        self._kept: set[PrefixNode] = set()
        """Nodes that an admitted sequence shares, with their ancestors."""
        self._held: Counter[BundlePages] = Counter()
        """Bundles of retracted sequences, and how many of these hold each."""
        self._unlocked: Counter[PrefixNode] = Counter()
        """Locks that retracted sequences give up."""
        self._gained: set[PrefixNode] = set()
        """Nodes that become evictable by that."""

    def copy(self) -> Tally:
        """A copy for trying something out."""
        other = Tally(self._store, None)
        other.num_pages = self.num_pages
        other._kept, other._gained = set(self._kept), set(self._gained)
        other._held, other._unlocked = Counter(self._held), Counter(self._unlocked)
        return other

    def cost(self, match: PrefixMatch | None) -> int:
        """Pages that are no longer evictable once the match is shared."""
        return sum(node.num_locks == 0 or node in self._gained for node in self._newly_kept(match))

    def share(self, match: PrefixMatch | None) -> None:
        """Counts an admitted sequence that shares the match."""
        self.num_pages -= self.cost(match)
        self._kept.update(self._newly_kept(match))

    def retract(self, sequence: SequenceState) -> None:
        """Counts the pages of a running sequence as given up: those that nothing else holds become free or
        evictable."""
        assert sequence.table_row is not None, "a running sequence has a row"
        for index in range(sequence.num_pages):
            pages = self._store.pages_at(sequence.table_row, index)
            self._held[pages] += 1
            self.num_pages += self._store.owners(pages) == self._held[pages]
        for node in _path(sequence.prefix):
            self._unlocked[node] += 1
            is_idle, pages = node.num_locks == self._unlocked[node], node.bundle.pages
            if is_idle and node not in self._kept and self._store.owners(pages) == self._held[pages] + 1:
                self._gained.add(node)
                self.num_pages += 1

    def _newly_kept(self, match: PrefixMatch | None) -> Iterator[PrefixNode]:
        """Nodes up to the first one already kept, whose ancestors are kept too."""
        for node in _path(None if match is None else match.node):
            if node in self._kept:
                return
            yield node


def _path(node: PrefixNode | None) -> Iterator[PrefixNode]:
    """A node and its ancestors that own a page."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent
