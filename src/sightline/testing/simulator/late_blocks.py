"""A host tier whose transfers end late, in any order, or fail.

A transfer reads and writes pages only when it ends, and pages that it will write hold NaN until then. So a page that is
handed out, read or written too early shows. Does not know who asks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from sightline.cache.blocks import (
    BlockHash,
    BlockLayout,
    BlockPlace,
    StoreUsage,
    TransferDone,
    TransferEnd,
    TransferFailed,
    TransferTicket,
    layout_of,
)
from sightline.cache.host import HostBlocks
from sightline.cache.store import CacheStore
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.scenario import HostScene


@dataclass(frozen=True)
class _Transfer:
    begin: Callable[[], TransferTicket]
    """Does the work and returns the ticket of the store below."""
    is_fetch: bool
    num_blocks: int


class LateBlocks:
    """Host memory behind a link that is slow and fails at times."""

    def __init__(self, store: CacheStore, scene: HostScene, counts: EventCounts) -> None:
        layout = layout_of(store)
        has_states = bool(layout.states)
        room = 2 * max(layout.entry_bytes, layout.state_bytes) if has_states else layout.entry_bytes
        self._inner = HostBlocks(store, room * scene.num_blocks)
        self._store = store
        self._scene = scene
        self._counts = counts
        self._random = random.Random(scene.seed)
        self._tickets = itertools.count(1)
        self._pending: dict[TransferTicket, _Transfer] = {}

    def layout(self) -> BlockLayout:
        return self._inner.layout()

    def usage(self) -> StoreUsage:
        return self._inner.usage()

    def lookup(self, hashes: Iterable[BlockHash]) -> int:
        return self._inner.lookup(hashes)

    def fetch(self, hashes: Sequence[BlockHash], into: Sequence[BlockPlace]) -> TransferTicket:
        self._spoil(into)
        return self._begin(lambda: self._inner.fetch(hashes, into), len(hashes), is_fetch=True)

    def put(self, hashes: Sequence[BlockHash], places: Sequence[BlockPlace]) -> TransferTicket:
        return self._begin(lambda: self._inner.put(hashes, places), len(hashes), is_fetch=False)

    def poll(self) -> Iterable[tuple[TransferTicket, TransferEnd]]:
        draw, ended = self._random, list[tuple[TransferTicket, TransferEnd]]()
        pending = list(self._pending)
        draw.shuffle(pending)
        for ticket in pending:
            if draw.random() < self._scene.lateness:
                self._counts.late_transfers += 1
                continue
            ended.append((ticket, self._end(self._pending.pop(ticket))))
        return ended

    def close(self) -> None:
        self._pending.clear()
        self._inner.close()

    def _begin(self, begin: Callable[[], TransferTicket], num_blocks: int, *, is_fetch: bool) -> TransferTicket:
        ticket = TransferTicket(next(self._tickets))
        self._pending[ticket] = _Transfer(begin, is_fetch, num_blocks)
        return ticket

    def _end(self, transfer: _Transfer) -> TransferEnd:
        if self._random.random() < self._scene.failures:
            self._counts.failed_transfers += 1
            return TransferFailed("the simulated link failed")
        ticket = transfer.begin()
        [end] = [each for other, each in self._inner.poll() if other == ticket]
        if end == TransferDone():
            if transfer.is_fetch:
                self._counts.returned_blocks += transfer.num_blocks
            else:
                self._counts.offloaded_blocks += transfer.num_blocks
        return end

    def _spoil(self, places: Sequence[BlockPlace]) -> None:
        """Fills pages and states that will be written with NaN."""
        states = self._store.main.states
        for place in places:
            for pool, page in zip(self._store.pools, place.pages, strict=True):
                entries = slice(page * pool.entries_per_page, (page + 1) * pool.entries_per_page)
                for plane in pool.spec.planes:
                    pool.plane(plane.name)[:, entries] = torch.nan
            if place.state is not None and states is not None:
                for each in states.pools:
                    each.fill([place.state], torch.nan)
