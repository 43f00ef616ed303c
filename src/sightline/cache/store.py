"""The store: the caches of every network of an engine, and the rows that sequences hold in them.

Owns the life cycle of a sequence's row: opened, filled, grown, closed. Does not know what attention does with an entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from sightline.cache.lengths import RowLengths
from sightline.cache.pages import PageAllocator
from sightline.cache.pools import Bundle, BundlePages, CacheLimits, GroupCache, Pool
from sightline.cache.spec import GroupCacheSpec, PoolSpec
from sightline.cache.states import StateCheckpoint, StatePool, StateTable
from sightline.cache.watcher import UNWATCHED, CacheWatcher
from sightline.core.config import PADDING_PAGES
from sightline.core.errors import BatchError, OutOfPages
from sightline.core.pool_rows import PoolPages


class NetworkCache:
    """The groups of one network. A step of the network writes all of them, so its rows have one length for all."""

    def __init__(self, groups: Sequence[GroupCache], lengths: RowLengths) -> None:
        self.groups = tuple(groups)
        self.pools = tuple(pool for group in groups for pool in group.pools.values())
        self.lengths = lengths
        """How much of each row may be read."""
        states = lengths.states
        is_recurrent = states is not None and any(group.states in states.pools for group in groups)
        self.states = states if is_recurrent else None
        """The recurrent states of its rows; None if no group has any."""
        self.sources: tuple[PoolPages, ...] = self.pools if self.states is None else (*self.pools, self.states)
        """Everything that a batch of the network reads and writes."""
        self.is_followed = True
        """True if entries are shared only once this network has them too."""

    @property
    def num_slot_columns(self) -> int:
        """Lists of slots that a batch of the network has: those to write in each source, those to read of states."""
        return len(self.sources) + (self.states is not None)

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
                if moves and pool.tokens_per_entry > 1:
                    raise BatchError("kept candidates", None, f"the first ones in pool {pool.key}", tuple(places))
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
        watcher: CacheWatcher = UNWATCHED,
    ) -> None:
        """`specs` are the groups of the model; `drafting` has those of each network that drafts for it. `watcher` hears
        of copies in the pools of the model."""
        self.limits = limits
        self.device = device

        def make_pool(spec: GroupCacheSpec, pool: PoolSpec, watcher: CacheWatcher) -> Pool:
            allocator, key = make_allocator(limits.num_pages), f"{spec.group}.{pool.name}"
            return Pool(key, pool, limits, device, allocator, poison=poison, on_host=spec.on_host, watcher=watcher)

        # A network that embeds has none: its steps keep nothing.
        num_states = limits.max_rows * limits.states_per_row + limits.max_checkpoints
        num_slots = PADDING_PAGES + num_states if num_states else 0

        def make_group(spec: GroupCacheSpec, watcher: CacheWatcher) -> GroupCache:
            pools = {pool.name: make_pool(spec, pool, watcher) for pool in spec.pools}
            return GroupCache(spec.group, pools, StatePool(spec.states, num_slots, device))

        def make_network(specs: Sequence[GroupCacheSpec], watcher: CacheWatcher = UNWATCHED) -> NetworkCache:
            groups = [make_group(spec, watcher) for spec in specs]
            recurrent = [group.states for group in groups if group.states.is_used]
            if not recurrent:
                return NetworkCache(groups, RowLengths(limits.max_rows))
            table = StateTable(
                limits.max_rows, make_allocator(num_slots), limits.max_checkpoints, recurrent, poison=poison
            )
            return NetworkCache(groups, RowLengths(limits.max_rows, table))

        self.networks = (make_network(specs, watcher), *map(make_network, drafting))
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
    def num_bytes(self) -> int:
        """Size of all pools and states on the device."""
        pools = [pool.num_bytes for pool in self.pools if not pool.is_on_host]
        return sum(pools) + sum(states.num_bytes for states in self._states())

    @property
    def host_bytes(self) -> int:
        """Size of the pools in host memory."""
        return sum(pool.num_bytes for pool in self.pools if pool.is_on_host)

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
        for states in self._states():
            states.open(row)
        return row

    @property
    def state_allocators(self) -> tuple[PageAllocator, ...]:
        """The free lists of state slots, one for each network that has any."""
        return tuple(states.allocator for states in self._states())

    def _states(self) -> list[StateTable]:
        return [network.states for network in self.networks if network.states is not None]

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
        for states in self._states():
            states.put(row, num_tokens)

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
        """Page count of a row in each pool; as many as a row may have if there is no pool."""
        whole = self.pages_for(self.limits.max_seq_len)
        return min([pool.table.num_owned(row) for pool in self.pools], default=whole)

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

    def restore(self, row: int, checkpoint: StateCheckpoint) -> None:
        """Lets a row go on from a state that others hold too, which must be the one behind its entries."""
        if self.main.states is None:
            raise ValueError("expected a store with recurrent states to restore one, got one without")
        if not self.is_open(row) or self.lengths.launched(row) != checkpoint.position:
            raise ValueError(
                f"expected an open row of {checkpoint.position} tokens to restore the state behind them, got row {row} "
                f"with {self.lengths.launched(row)}"
            )
        self.main.states.restore(row, checkpoint)

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

    def hold_pages(self, row: int, first: int, stop: int) -> tuple[BundlePages, ...]:
        """Adds an owner to a row's pages `first` to `stop`, behind its entries, while something else fills them."""
        if (
            not self.is_open(row)
            or self.row_pages(row) < stop
            or self.lengths.launched(row) > first * self.limits.page_size
        ):
            raise ValueError(f"expected an open row with pages {first} to {stop} behind its entries, got row {row}")
        pages = tuple([self.pages_at(row, index) for index in range(first, stop)])
        for pool, held in zip(self.pools, zip(*pages, strict=True), strict=True):
            if any(pool.allocator.owners(page) != 1 for page in held):
                raise ValueError(f"expected pages of row {row}'s own to fill, got shared ones among {held}")
            pool.allocator.share(held)
        return pages

    def drop_pages(self, pages: Sequence[BundlePages]) -> None:
        """Removes the owner that `hold_pages` added."""
        for pool, held in zip(self.pools, zip(*pages, strict=True), strict=True):
            pool.release(held)

    def returned(self, row: int, num_tokens: int, state: int | None) -> bool:
        """Declares that the pages that were filled hold a row's entries up to `num_tokens`, and `state` the state
        behind them. Returns False, and changes nothing, if the row does not hold that state any more."""
        states = self.main.states
        if states is not None and (state is None or not states.received(row, num_tokens, state)):
            return False
        self._fill(row, num_tokens)
        return True

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
