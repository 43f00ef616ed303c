"""Pools of cache entries, and the store that holds the pools of every group.

Owns the tensors, and the life cycle of a sequence's row: opened, filled, grown, closed. Does not know what attention
does with an entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sightline.cache.lengths import RowLengths
from sightline.cache.pages import PageAllocator
from sightline.cache.spec import GroupCacheSpec, PoolSpec
from sightline.cache.table import PageTable
from sightline.core.errors import BatchError, OutOfPages
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
    ) -> None:
        self.key = key
        self.spec = spec
        self.page_size = limits.page_size
        self.allocator = allocator
        self.table = PageTable(limits.max_rows, -(-limits.max_seq_len // limits.page_size), device)
        self._poison = poison
        num_slots = limits.num_pages * limits.page_size
        self._planes = {
            plane.name: torch.empty(spec.num_layers, num_slots, *plane.shape, dtype=plane.dtype, device=device)
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

    def slots_to_write(self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int]) -> Sequence[int]:
        """The slots of `counts` entries of each row from `firsts` on, row after row.

        Raises `BatchError` unless the entries' pages are there, and their row's alone.
        """
        is_decode = len(rows) >= _MANY_ROWS and counts.count(1) == len(counts)
        slots = self._slots_at_once(rows, firsts) if is_decode else None
        return self._slots_by_row(rows, firsts, counts) if slots is None else slots

    def slots_of(self, rows: Tensor, entries: Tensor) -> Tensor:
        """The slot of an entry of each row, on the device."""
        return self.table.slots(rows, entries, self.page_size)

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
        slots: list[int] = (entries + (pages - places) * self.page_size).tolist()
        return slots

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
                slots += range(page * size + offset, page * size + offset + length)
                place += length
        return slots

    def copy_page(self, source: int, target: int, num_entries: int) -> None:
        """Copies the first entries of one page to another."""
        first, to = source * self.page_size, target * self.page_size
        for plane in self._planes.values():
            plane[:, to : to + num_entries] = plane[:, first : first + num_entries]

    def move_entries(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies entries from slots to other slots, in stream order. A slot may be both: sources are read first."""
        if not sources:
            return
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
            paged = plane.view(plane.shape[0], -1, self.page_size, *plane.shape[2:]).view(torch.uint8)
            paged[:, list(pages)] = nan.expand(plane.shape[-1]).contiguous().view(torch.uint8)


@dataclass(frozen=True)
class GroupCache:
    """The named pools of one layer group."""

    group: str
    pools: Mapping[str, Pool]


class NetworkCache:
    """The groups of one network. A step of the network writes all of them, so its rows have one length for all."""

    def __init__(self, groups: Sequence[GroupCache], lengths: RowLengths) -> None:
        self.groups = tuple(groups)
        self.pools = tuple(pool for group in groups for pool in group.pools.values())
        self.lengths = lengths
        """How much of each row may be read."""
        self.is_followed = True
        """True if entries are shared only once this network has them too."""

    def retire(self) -> None:
        """Says that the network computes nothing any more, so that the others share their entries without it."""
        self.is_followed = False

    def keep(self, row: int, context_len: int, places: Sequence[int]) -> None:
        """Keeps some of the candidates that a step wrote behind a row's context, and launches them as its next entries.

        `places` counts the kept ones from `context_len` on, in increasing order. Others are never read. Idempotent.
        """
        stop = context_len + len(places)
        if self.lengths.committed(row) >= stop:
            return
        if self.lengths.launched(row) < stop:
            if self.lengths.launched(row) != context_len:
                raise BatchError("launched length", None, f"{context_len}, in front of candidates", stop)
            for pool in self.pools:
                slots = pool.slots_to_write((row,), (context_len,), (max(places) + 1,))
                moves = [(slots[place], slots[index]) for index, place in enumerate(places) if place != index]
                pool.move_entries([source for source, _ in moves], [target for _, target in moves])
            self.lengths.advance(row, stop)

    def lent(self, groups: Collection[str]) -> NetworkCache:
        """Some of its groups, for a network that reads their entries and writes none."""
        return NetworkCache([each for each in self.groups if each.group in groups], self.lengths)


class CacheStore:
    """The caches of all networks of an engine, and the rows that sequences hold in all of them at once.

    The first network is the model itself, the others draft for it. A row has pages of every network for the same
    tokens; how many of its entries there are differs.
    """

    def __init__(
        self,
        specs: Sequence[GroupCacheSpec],
        limits: CacheLimits,
        device: torch.device,
        *,
        drafting: Sequence[Sequence[GroupCacheSpec]] = (),
        poison: bool = False,
        make_allocator: Callable[[int], PageAllocator] = PageAllocator,
    ) -> None:
        """`specs` are the groups of the model; `drafting` has those of each network that drafts for it."""
        self.limits = limits
        self.device = device

        def make_pool(group: str, pool: PoolSpec) -> Pool:
            allocator = make_allocator(limits.num_pages)
            return Pool(f"{group}.{pool.name}", pool, limits, device, allocator, poison=poison)

        def make_group(spec: GroupCacheSpec) -> GroupCache:
            return GroupCache(spec.group, {pool.name: make_pool(spec.group, pool) for pool in spec.pools})

        self.networks = tuple(
            NetworkCache([make_group(spec) for spec in each], RowLengths(limits.max_rows))
            for each in (specs, *drafting)
        )
        self.main = self.networks[0]
        """The model's own cache."""
        self.groups, self.lengths = self.main.groups, self.main.lengths
        self.pools = tuple(pool for network in self.networks for pool in network.pools)
        """The pools of all networks."""
        self._free_rows = list(range(limits.max_rows, 0, -1))
        self._is_open = [False] * (limits.max_rows + 1)
        self._sharers: Counter[tuple[object, Bundle]] = Counter()
        """How often each caller of `share` owns a bundle."""

    def cache(self, group: str) -> GroupCache:
        """The pools of the group of that name."""
        return next(each for network in self.networks for each in network.groups if each.group == group)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_free_pages(self) -> int:
        """Free pages in the fullest pool."""
        return min([pool.allocator.num_free for pool in self.pools])

    @property
    def num_usable_pages(self) -> int:
        return min(pool.allocator.num_usable for pool in self.pools)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a row of `num_tokens` needs in each pool."""
        return -(-num_tokens // self.limits.page_size)

    def open_row(self) -> int:
        """Returns a row that no sequence holds. Raises `OutOfPages` if there is none."""
        if not self._free_rows:
            raise OutOfPages(f"expected a free page-table row, got none of {self.limits.max_rows}")
        row = self._free_rows.pop()
        self._is_open[row] = True
        self._fill(row, 0)
        return row

    def _fill(self, row: int, num_tokens: int) -> None:
        for network in self.networks:
            network.lengths.fill(row, num_tokens)

    def committed(self, row: int) -> int:
        """Entries of a row that are committed in every network that still computes any."""
        return min([network.lengths.committed(row) for network in self.networks if network.is_followed])

    def fill_row(self, row: int, num_tokens: int) -> None:
        """Declares that a row's pages hold exactly its first `num_tokens` entries.

        For entries that no step of this engine wrote: imported ones, or a test's.
        """
        if not self.is_open(row) or not 0 <= num_tokens <= self.row_pages(row) * self.limits.page_size:
            raise ValueError(f"expected an open row with pages for {num_tokens} tokens, got row {row}")
        behind = num_tokens // self.limits.page_size
        for pool in self.pools:
            for page in pool.table.pages_of(row)[behind:]:
                if pool.allocator.owners(page) != 1:
                    raise ValueError(f"expected pages of row {row}'s own behind {num_tokens} tokens, got shared {page}")
        if num_tokens < max([network.lengths.committed(row) for network in self.networks]):
            for pool in self.pools:
                pool.allocator.renew(pool.table.pages_of(row)[behind:])
        self._fill(row, num_tokens)

    def grow_row(self, row: int, num_tokens: int) -> None:
        """Grows a row to `num_tokens` in every pool, or in none."""
        if not self.is_open(row):
            raise ValueError(f"expected a row that is open, got {row}")
        if num_tokens > self.limits.max_seq_len:
            raise ValueError(f"expected at most {self.limits.max_seq_len} tokens in a row, got {num_tokens}")
        pages = self.pages_for(num_tokens)
        for pool in self.pools:
            missing = pages - pool.table.num_owned(row)
            if missing > pool.allocator.num_free:
                raise OutOfPages(f"expected {missing} free pages in pool {pool.key}, got {pool.allocator.num_free}")
        for pool in self.pools:
            pool.grow(row, pages)

    def row_pages(self, row: int) -> int:
        """Page count of a row in each pool."""
        return min([pool.table.num_owned(row) for pool in self.pools])

    def trim_row(self, row: int, num_tokens: int) -> None:
        """Releases the pages that `num_tokens` do not need, and discards their contents."""
        if not self.is_open(row):
            raise ValueError(f"expected a row that is open, got {row}")
        self._require_written(row)
        for pool in self.pools:
            pool.release(pool.table.trim(row, self.pages_for(num_tokens)))
        kept = self.row_pages(row) * self.limits.page_size
        for lengths in [network.lengths for network in self.networks]:
            if kept < lengths.launched(row):
                lengths.fill(row, min(kept, lengths.committed(row)))

    def _require_written(self, row: int) -> None:
        for network in self.networks:
            network.lengths.require_written(row)

    def pages_at(self, row: int, index: int) -> BundlePages:
        """The `index`-th page of a row in each pool."""
        return tuple([pool.table.page(row, index) for pool in self.pools])

    def committed_bundle(self, row: int, index: int) -> Bundle:
        """The `index`-th page of a row in each pool, for others to read; all its entries must be committed."""
        stop = (index + 1) * self.limits.page_size
        if self.committed(row) < stop:
            raise ValueError(
                f"expected {stop} committed entries in row {row} to share its page {index}, got "
                f"{self.committed(row)}; commit them first"
            )
        pages = self.pages_at(row, index)
        return Bundle(pages, self._generations(pages), index)

    def _generations(self, pages: BundlePages) -> tuple[int, ...]:
        return tuple([pool.allocator.generation(page) for pool, page in zip(self.pools, pages, strict=True)])

    def _require_kept(self, bundles: Iterable[Bundle]) -> None:
        """Raises `ValueError` if the pages of a bundle no longer hold its entries."""
        for bundle in bundles:
            if self._generations(bundle.pages) != bundle.generations:
                raise ValueError(
                    f"expected a bundle whose pages still hold its entries, got pages {bundle.pages} of another store, "
                    "or freed or written anew since; find the prefix again"
                )

    def adopt(self, row: int, bundles: Sequence[Bundle]) -> None:
        """Gives a row without pages the shared pages of the bundles, with their entries; each keeps its index."""
        if not self.is_open(row) or self.row_pages(row):
            raise ValueError(f"expected an open row without pages to adopt others, got row {row}")
        indices = [bundle.place for bundle in bundles]
        if indices != list(range(len(bundles))):
            raise ValueError(f"expected the first {len(bundles)} pages of a row, in order, got those at {indices}")
        self._require_kept(bundles)
        for pool, pages in zip(self.pools, zip(*[bundle.pages for bundle in bundles], strict=True), strict=False):
            pool.adopt(row, pages)
        self._fill(row, len(bundles) * self.limits.page_size)

    def share(self, bundle: Bundle, owner: object) -> None:
        """Makes `owner` an owner of a page of each pool, until it releases them."""
        self._require_kept([bundle])
        for pool, page in zip(self.pools, bundle.pages, strict=True):
            pool.allocator.share([page])
        self._sharers[owner, bundle] += 1

    def release(self, bundle: Bundle, owner: object) -> None:
        """Removes an owner from a page of each pool. Raises `ValueError` if it does not own them."""
        self._require_kept([bundle])
        if not self._sharers[owner, bundle]:
            raise ValueError(f"expected an owner of pages {bundle.pages}, got {owner}, which shares none of them")
        self._sharers[owner, bundle] -= 1
        if not self._sharers[owner, bundle]:
            del self._sharers[owner, bundle]
        for pool, page in zip(self.pools, bundle.pages, strict=True):
            pool.release([page])

    def owners(self, pages: BundlePages) -> int:
        """Reference count of a bundle's pages, which is the same in every pool."""
        return self.pools[0].allocator.owners(pages[0])

    def copy_page(self, source: int, target: int, index: int, num_entries: int) -> None:
        """Appends the first entries of one row's `index`-th page to another row.

        The entries must be committed, and the target page must be owned by the target row alone.
        """
        first = index * self.limits.page_size
        if not 0 < num_entries <= self.limits.page_size:
            raise ValueError(f"expected 1 to {self.limits.page_size} entries, what a page holds, got {num_entries}")
        there = (self.lengths.committed(target), self.lengths.launched(target))
        if self.committed(source) < first + num_entries or there != (first, first):
            raise ValueError(
                f"expected {first + num_entries} committed entries in row {source} and {first} in row {target}, got "
                f"{self.committed(source)} and {there[0]}, with {there[1]} launched"
            )
        copies = [(pool, pool.table.page(source, index), pool.table.page(target, index)) for pool in self.pools]
        for pool, _, page in copies:
            if pool.allocator.owners(page) != 1:
                raise ValueError(
                    f"expected page {page} of pool {pool.key} to be row {target}'s alone, got a shared one"
                )
        for pool, original, page in copies:
            pool.copy_page(original, page, num_entries)
        self._fill(target, first + num_entries)

    def is_open(self, row: int) -> bool:
        """True if a sequence holds the row."""
        return 1 <= row <= self.limits.max_rows and self._is_open[row]

    def close_row(self, row: int) -> None:
        """Releases the row and its pages. Raises `BatchError` if a lane other than the first may still write them."""
        if not self.is_open(row):
            raise ValueError(f"expected a row that is open, got {row}")
        self._require_written(row)
        for pool in self.pools:
            pool.clear(row)
        self._fill(row, 0)
        self._is_open[row] = False
        self._free_rows.append(row)
