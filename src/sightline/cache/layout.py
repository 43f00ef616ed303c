"""Orders of pages and of state slots, for tests and benchmarks."""

from __future__ import annotations

import random
from enum import Enum

from sightline.cache.pools import Pool
from sightline.cache.store import CacheStore


class Layout(Enum):
    """The order of a row's pages in the pool."""

    IN_ORDER = "in order"
    """Adjacent, row after row."""
    SHUFFLED = "shuffled"
    """In random order, with rows interleaved."""
    DESCENDING = "descending"
    """Adjacent, last page first."""


def arrange_free_pages(store: CacheStore, layout: Layout, seed: int = 7, passed_over: int = 0) -> None:
    """Makes every pool hand out its free pages, and every table of states its slots, in that order; the first
    `passed_over` in order come last."""
    order = random.Random(seed)
    for allocator in (*[pool.allocator for pool in store.pools], *store.state_allocators):
        pages = sorted(allocator.allocate(allocator.num_free))
        if layout is Layout.SHUFFLED:
            order.shuffle(pages)
        elif layout is Layout.DESCENDING:
            pages.reverse()
        else:
            pages = pages[passed_over:] + pages[:passed_over]
        allocator.release(pages)


def walk_slots(pool: Pool, table_row: int, length: int) -> list[int]:
    """The slots of a row's first entries, by walking its pages."""
    pages, size = pool.table.owned(table_row), pool.page_size
    last = [(entry + 1) * pool.tokens_per_entry - 1 for entry in range(length)]
    return [pages[t // size] * pool.entries_per_page + t % size // pool.tokens_per_entry for t in last]
