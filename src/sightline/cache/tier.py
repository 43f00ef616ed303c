"""The tier below the pools: which pages are on their way to a block store or back, and who holds them meanwhile.

    leaving     pages of evicted nodes: the tier owns them until the store has them, then they are free
    returning   pages of a row that waits for them: the row and the tier own them until the store has filled them

So no page that a transfer reads or writes is handed out, whatever happens to a sequence meanwhile. Owns the transfers
and their counts. Does not know the prefix tree, nor when a row may run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sightline.cache.blocks import (
    BlockHash,
    BlockIdentity,
    BlockPlace,
    BlockStore,
    StoreUsage,
    TransferFailed,
    TransferTicket,
    hash_after,
    layout_of,
)
from sightline.cache.pools import Bundle, BundlePages
from sightline.cache.states import StateCheckpoint
from sightline.cache.store import CacheStore


class Leaving(NamedTuple):
    """A block whose node leaves the prefix tree."""

    name: BlockHash
    bundle: Bundle
    checkpoint: StateCheckpoint | None


@dataclass(frozen=True, eq=False)
class Returning:
    """Blocks that are being copied into a row."""

    ticket: TransferTicket
    row: int
    pages: tuple[BundlePages, ...]
    num_tokens: int
    """Tokens of the row once they are there."""
    state: int | None
    """The slot that gets the state behind these tokens; None if the model has none."""


@dataclass
class TierCounts:
    """Blocks that were moved, since the counts began."""

    offloaded: int = 0
    """Blocks handed to the store, also those that it had already."""
    returned: int = 0
    failed_offloads: int = 0
    """Blocks that the store did not take, so that they are lost."""
    failed_returns: int = 0
    """Blocks that did not come back, so that their tokens were computed again."""


class LowerTier:
    """A block store below the pools of a store."""

    def __init__(self, store: CacheStore, blocks: BlockStore, model: str, adapter: str = "") -> None:
        """`model` identifies the weights. Raises `ConfigError` if the blocks have another layout."""
        layout = layout_of(store)
        layout.require(blocks.layout())
        self._store = store
        self._blocks = blocks
        self._identity = BlockIdentity(model, layout.digest, adapter)
        self._page_size = store.limits.page_size
        self._leaving: dict[TransferTicket, tuple[Leaving, ...]] = {}
        self._returning: dict[TransferTicket, Returning] = {}
        self._ended: dict[TransferTicket, tuple[Returning, TransferFailed | None]] = {}
        """Blocks that have come back, or failed to, since the last `poll`, as the store first reported them."""
        self.counts = TierCounts()

    def usage(self) -> StoreUsage:
        """Returns how full the store is."""
        return self._blocks.usage()

    def metrics(self) -> dict[str, Any]:
        """Returns the fields of `EngineMetrics` that the tier fills, by name."""
        usage, counts = self.usage(), self.counts
        return {
            "host_cache_blocks": usage.num_blocks,
            "host_cache_usage_perc": usage.num_blocks / max(1, usage.max_blocks),
            "host_cache_bytes": usage.num_bytes,
            "host_cache_offloads": counts.offloaded,
            "host_cache_returns": counts.returned,
            "host_cache_failures": counts.failed_offloads + counts.failed_returns,
        }

    @property
    def num_leaving(self) -> int:
        """Pages that come free when their transfer ends."""
        return sum(map(len, self._leaving.values()))

    @property
    def has_leaving_state(self) -> bool:
        """True if a state is on its way to the store."""
        return any(block.checkpoint is not None for blocks in self._leaving.values() for block in blocks)

    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended."""
        return len(self._leaving) + len(self._returning)

    def holds(self) -> Iterator[BundlePages]:
        """The pages that the tier owns."""
        for blocks in self._leaving.values():
            yield from [block.bundle.pages for block in blocks]
        for returning in self._returning.values():
            yield from returning.pages

    def held_states(self) -> Iterator[int]:
        """The slots of states that the tier owns."""
        for blocks in self._leaving.values():
            yield from [block.checkpoint.slot for block in blocks if block.checkpoint is not None]
        yield from [each.state for each in self._returning.values() if each.state is not None]

    def beginning(self, namespace: str) -> BlockHash:
        """Returns the hash that stands before the first block of a namespace."""
        return self._identity.beginning(namespace)

    def put(self, leaving: Sequence[Leaving]) -> None:
        """Begins to keep blocks. Their pages, and states, stay until the transfer ends."""
        if not leaving:
            return
        states = self._store.main.states
        for block in leaving:
            self._store.share(block.bundle, self)
            if states is not None and block.checkpoint is not None:
                states.share(block.checkpoint)
        places = [
            BlockPlace(block.bundle.pages, None if block.checkpoint is None else block.checkpoint.slot)
            for block in leaving
        ]
        try:
            ticket = self._blocks.put([block.name for block in leaving], places)
        except BaseException:
            self._free(leaving)
            raise
        self._require_new(ticket)
        self._leaving[ticket] = tuple(leaving)
        self.counts.offloaded += len(leaving)

    def find(self, after: BlockHash, pages: Iterable[bytes]) -> tuple[BlockHash, ...]:
        """The blocks of pages of tokens behind the block `after` that the store has."""
        names: list[BlockHash] = []

        def named() -> Iterator[BlockHash]:
            name = after
            for tokens in pages:
                name = hash_after(name, tokens)
                names.append(name)
                yield name

        return self._leading(names, self._blocks.lookup(named()))

    def still_held(self, names: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """The leading blocks of `names` that the store still has."""
        return self._leading(names, self._blocks.lookup(names))

    def fetch(self, row: int, first: int, names: Sequence[BlockHash]) -> Returning:
        """Begins to copy blocks into a row's pages from the page `first` on, which must be the row's alone."""
        stop = first + len(names)
        num_tokens = stop * self._page_size
        states = self._store.main.states
        slot = None if states is None else states.receive(row, num_tokens)
        pages: tuple[BundlePages, ...] = ()
        try:
            pages = self._store.hold_pages(row, first, stop)
            places = [BlockPlace(each) for each in pages[:-1]] + [BlockPlace(pages[-1], slot)]
            ticket = self._blocks.fetch(names, places)
        except BaseException:
            self._drop(row, num_tokens, pages, slot)
            raise
        self._require_new(ticket)
        returning = self._returning[ticket] = Returning(ticket, row, pages, num_tokens, slot)
        return returning

    def settle(self) -> None:
        """Frees what has left. What has come back waits for `poll`. A ticket that is reported again, or that nobody
        has, changes nothing: its pages may be others' by then."""
        for ticket, end in self._blocks.poll():
            why = end if isinstance(end, TransferFailed) else None
            if ticket in self._leaving:
                blocks = self._leaving.pop(ticket)
                self.counts.failed_offloads += 0 if why is None else len(blocks)
                self._free(blocks)
            elif ticket in self._returning:
                self._ended.setdefault(ticket, (self._returning[ticket], why))

    def poll(self) -> list[tuple[Returning, TransferFailed | None]]:
        """Frees what has left. Returns the blocks that have come back, or failed to; each is to be `let_go`."""
        self.settle()
        ended, self._ended = self._ended, {}
        return list(ended.values())

    @staticmethod
    def _leading(names: Sequence[BlockHash], count: int) -> tuple[BlockHash, ...]:
        """The first `count` names. Raises `ValueError` if a store says that it has fewer than none."""
        if count < 0:
            raise ValueError(f"expected lookup of a block store to count the blocks that it has, got {count}")
        return tuple(names[:count])

    def _require_new(self, ticket: TransferTicket) -> None:
        """Raises `ValueError` if another transfer has the ticket. The pages of the new one then stay held: nobody could
        tell when the store is done with them."""
        if ticket in self._leaving or ticket in self._returning:
            raise ValueError(
                f"expected a ticket of its own for each transfer of a block store, got {ticket} for a second one; "
                "number them"
            )

    def let_go(self, returning: Returning) -> None:
        """Gives up the tier's share of a row's pages, whether the blocks came back or not. Idempotent."""
        if self._returning.pop(returning.ticket, None) is None:
            return
        self._drop(returning.row, returning.num_tokens, returning.pages, returning.state)

    def _drop(self, row: int, num_tokens: int, pages: tuple[BundlePages, ...], state: int | None) -> None:
        """Gives up what a fetch into the row holds."""
        if pages:
            self._store.drop_pages(pages)
        if self._store.main.states is not None and state is not None:
            self._store.main.states.let_go(row, num_tokens, state)

    def close(self) -> None:
        """Ends every transfer and gives the pages back."""
        self._blocks.close()
        self._ended.clear()
        while self._leaving:
            _, blocks = self._leaving.popitem()
            self._free(blocks)
        for returning in tuple(self._returning.values()):
            self.let_go(returning)

    def _free(self, blocks: Sequence[Leaving]) -> None:
        states = self._store.main.states
        for block in blocks:
            self._store.release(block.bundle, self)
            if states is not None and block.checkpoint is not None:
                states.release(block.checkpoint)
