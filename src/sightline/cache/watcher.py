"""Who is told of changes to entries that no step makes: copies of entries in the pools of the model."""

from __future__ import annotations

from collections.abc import Sequence


class CacheWatcher:
    """Hears of every copy before it is made. This one listens to nothing."""

    def copies_page(self, pool: str, source: int, target: int, num_tokens: int) -> None:
        """The first entries of a page are copied to another."""

    def moves_entries(self, pool: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Entries are copied from slots to other slots."""


UNWATCHED = CacheWatcher()
