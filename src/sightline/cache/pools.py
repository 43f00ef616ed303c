"""Pools of cache entries: pages for the tokens of rows. An entry stands for one token or several.

Owns the tensors. Does not know what attention does with an entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sightline.cache.memory import allocate
from sightline.cache.pages import PageAllocator
from sightline.cache.spec import PoolSpec
from sightline.cache.states import StatePool
from sightline.cache.table import PageTable
from sightline.cache.watcher import UNWATCHED, CacheWatcher
from sightline.core.batch import PADDING_SLOT
from sightline.core.errors import BatchError
from sightline.core.lengths import moved

_MANY_ROWS = 32
"""The number of rows from which numpy finds their slots faster than a loop."""

BundlePages: TypeAlias = tuple[int, ...]
"""One page of each pool of a store, in its order, for the same tokens."""


class Bundle(NamedTuple):
    """Pages whose entries are committed and may be read by others. Only `CacheStore.committed_bundle` makes one.

    The generations guard against use after free: once the pages are freed or rewritten, the bundle is refused.
    """

    pages: BundlePages
    generations: tuple[int, ...]
    place: int
    """Which page of its row it is: entries depend on their positions."""


@dataclass(frozen=True)
class CacheLimits:
    """Sizes that every pool shares."""

    num_pages: int
    page_size: int
    max_rows: int
    max_seq_len: int
    states_per_row: int = 0
    """States that a row may need at once, if some group is recurrent: what it reads, and what steps write."""
    max_checkpoints: int = 0
    """States that are kept for others beside those."""


class Pool:
    """Pages of entries for one group, with their own free list and page table."""

    def __init__(
        self,
        key: str,
        spec: PoolSpec,
        limits: CacheLimits,
        device: torch.device,
        allocator: PageAllocator,
        *,
        poison: bool,
        on_host: bool = False,
        watcher: CacheWatcher = UNWATCHED,
    ) -> None:
        """`on_host` keeps the entries in host memory. The page table is on the device either way. `watcher` hears of
        copies."""
        self._watcher = watcher
        self.key = key
        self.is_on_host = on_host
        self.spec = spec
        self.page_size = limits.page_size
        self.allocator = allocator
        self.table = PageTable(limits.max_rows, -(-limits.max_seq_len // limits.page_size), device)
        self._poison = poison
        self.tokens_per_entry = spec.tokens_per_entry
        self.entries_per_page = spec.entries_per_page(limits.page_size)
        num_slots = limits.num_pages * self.entries_per_page
        self._planes = {
            plane.name: allocate((spec.num_layers, num_slots, *plane.shape), plane.dtype, device, on_host=on_host)
            for plane in spec.planes
        }
        self._scales = {plane.name: plane.scales or (1.0,) * spec.num_layers for plane in spec.planes}
        self._scales_device = {
            name: torch.tensor(scales, dtype=torch.float32, device=device) for name, scales in self._scales.items()
        }

    def plane(self, name: str) -> Tensor:
        """[num_layers, num_slots, ...]: one tensor of the entries."""
        return self._planes[name]

    def scales(self, name: str) -> tuple[float, ...]:
        """Per layer: the stored number times this is the entry. 1 for every dtype that needs no scale."""
        return self._scales[name]

    def scales_device(self, name: str) -> Tensor:
        """[num_layers] float32: `scales` on the device, for kernels."""
        return self._scales_device[name]

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in self._planes.values())

    @property
    def table_id(self) -> int:
        return self.table.table_id

    @property
    def num_table_rows(self) -> int:
        """Rows that sequences can hold."""
        return self.table.num_rows

    def versions(self, rows: Sequence[int]) -> tuple[int, ...]:
        """The version of each page-table row: it changes when pages change owner."""
        return self.table.versions(rows)

    def grow(self, row: int, num_pages: int) -> None:
        """Gives a row pages until it has `num_pages`."""
        missing = num_pages - self.table.num_owned(row)
        if missing > 0:
            pages = self.allocator.allocate(missing)
            self._poison_pages(pages)
            self.table.append(row, pages)

    def clear(self, row: int) -> None:
        """Releases a row's pages."""
        self.release(self.table.clear(row))

    def adopt(self, row: int, pages: Sequence[int]) -> None:
        """Adds pages, with their contents, that others own too to a row."""
        self.allocator.share(pages)
        self.table.append(row, pages)

    def release(self, pages: Sequence[int]) -> None:
        """Removes an owner from pages."""
        self._poison_pages(self.allocator.release(pages))

    @property
    def entry_pages(self) -> Tensor:
        """[num_table_rows + 1, n] int64: for each table row, the pages that hold entries. A view of the page table.

        Entry e of a row is in page e // entries_per_page of its own, at place e % entries_per_page. If an entry stands
        for more tokens than a page has, only every so many pages hold one.
        """
        pages_per_entry = max(1, self.tokens_per_entry // self.page_size)
        return self.table.pages[:, pages_per_entry - 1 :: pages_per_entry]

    def entry_slots(self, rows: Tensor, entries: Tensor) -> Tensor:
        """The slots of entries, on the device: `rows` and `entries` have the same shape. For entries that exist."""
        size = self.entries_per_page
        page = self.entry_pages[rows, entries.div(size, rounding_mode="floor")]
        return page * size + entries.remainder(size)

    def slots_to_write(
        self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int], candidates: Sequence[int] = ()
    ) -> Sequence[int]:
        """The slots that `counts` tokens of each row write from token `firsts` on, row after row: the slot of a token's
        entry, whether it is a candidate or not, or the padding slot for a token that completes no entry.

        Raises `BatchError` unless the entries' pages are there, and their row's alone.
        """
        del candidates
        is_decode = len(rows) >= _MANY_ROWS and counts.count(1) == len(counts)
        slots = self._slots_at_once(rows, firsts) if is_decode else None
        return self._slots_by_row(rows, firsts, counts) if slots is None else slots

    def slots_to_read(self, rows: Sequence[int], contexts: Sequence[int]) -> None:
        """None: rows read their entries through the page table."""
        del rows, contexts

    def slots_of(self, rows: Tensor, entries: Tensor) -> Tensor:
        """The slot that a token of each row writes, on the device; the padding slot if it completes no entry."""
        if self.tokens_per_entry == 1:
            return self.table.slots(rows, entries, self.page_size)
        pages = self.table.pages[rows, entries.div(self.page_size, rounding_mode="floor")]
        places = entries.remainder(self.page_size).div(self.tokens_per_entry, rounding_mode="floor")
        completes = (entries + 1).remainder(self.tokens_per_entry) == 0
        return torch.where(completes, pages * self.entries_per_page + places, PADDING_SLOT)

    def _slots_at_once(self, rows: Sequence[int], firsts: Sequence[int]) -> list[int] | None:
        """The slot of one entry of each row; None if some entry has no page that is its row's alone.

        For many rows this takes half the time of looking at each.
        """
        entries = np.fromiter(firsts, np.int64, len(firsts))
        places = entries // self.page_size
        try:
            pages = self.table.on_host[np.fromiter(rows, np.int64, len(rows)), places]
        except IndexError:
            # Beyond the longest row.
            return None
        # Where a row has no page, the table has the padding page, which nobody owns.
        if np.count_nonzero(self.allocator.owner_counts[pages] != 1):
            return None
        slots = entries + (pages - places) * self.page_size
        if self.tokens_per_entry > 1:
            inside = entries % self.page_size // self.tokens_per_entry
            completes = (entries + 1) % self.tokens_per_entry == 0
            slots = np.where(completes, pages * self.entries_per_page + inside, PADDING_SLOT)
        found: list[int] = slots.tolist()
        return found

    def _slots_by_row(self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int]) -> list[int]:
        size, owners = self.page_size, self.allocator.owners
        slots: list[int] = []
        for index, (row, first, count) in enumerate(zip(rows, firsts, counts, strict=True)):
            pages, place, stop = self.table.pages_of(row), first, first + count
            if len(pages) * size < stop:
                raise BatchError(
                    "pages", index, f"enough for {stop} tokens in row {row} of pool {self.key}", len(pages)
                )
            while place < stop:
                page, offset = pages[place // size], place % size
                if owners(page) != 1:
                    raise BatchError(
                        "pages",
                        index,
                        f"row {row}'s alone where it writes",
                        f"page {page} of pool {self.key} with {owners(page)} owners",
                        "copy it first",
                    )
                length = min(size - offset, stop - place)
                slots += self._slots_in_page(page, place, length)
                place += length
        return slots

    def _slots_in_page(self, page: int, first: int, count: int) -> Sequence[int]:
        """The slots that tokens from `first` on write, which are all in one page."""
        offset, ratio = first % self.page_size, self.tokens_per_entry
        if ratio == 1:
            start = page * self.page_size + offset
            return range(start, start + count)
        start = page * self.entries_per_page
        return [
            PADDING_SLOT if (first + place + 1) % ratio else start + (offset + place) // ratio for place in range(count)
        ]

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the entries that the first tokens of one page complete to another."""
        self._watcher.copies_page(self.key, source, target, num_tokens)
        size = self.entries_per_page
        first, to, count = source * size, target * size, num_tokens * size // self.page_size
        for plane in self._planes.values():
            plane[:, to : to + count] = plane[:, first : first + count]

    def move_entries(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies entries from slots to other slots, in stream order. A slot may be both: sources are read first."""
        if not sources:
            return
        self._watcher.moves_entries(self.key, sources, targets)
        there, here = moved([sources, targets], self.table.pages.device)
        for plane in self._planes.values():
            # As bytes, because not every device supports indexed writes of 8-bit floats.
            entries = plane.view(torch.uint8)
            entries.index_copy_(1, here, entries.index_select(1, there))

    def _poison_pages(self, pages: tuple[int, ...]) -> None:
        """Fills pages with NaN if poisoning is on, to expose reads before a write or after a free."""
        if not self._poison or not pages:
            return
        for plane in self._planes.values():
            nan = torch.full((1,), torch.nan, dtype=plane.dtype, device=plane.device)
            # As bytes, because not every device supports indexed writes of 8-bit floats.
            paged = plane.view(plane.shape[0], -1, self.entries_per_page, *plane.shape[2:]).view(torch.uint8)
            paged[:, list(pages)] = nan.expand(plane.shape[-1]).contiguous().view(torch.uint8)


@dataclass(frozen=True)
class GroupCache:
    """What one layer group caches."""

    group: str
    pools: Mapping[str, Pool]
    """Entries per token."""
    states: StatePool
    """States per sequence, if the group is recurrent."""

    @property
    def is_on_host(self) -> bool:
        """True if the entries are in host memory."""
        return any(pool.is_on_host for pool in self.pools.values())
