"""The host tier: blocks in host memory, the one that was unused for longest leaves first.

Copies are enqueued on the engine's own stream, in the order of the calls, so a transfer is done as soon as it is
enqueued: what is launched afterwards finds it so. The host never reads the bytes. On a CPU the memory is ordinary.

Owns the memory and which block is where in it. Does not know tokens or sequences.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
from sightline.cache.copies import as_bytes, gather, host_memory, scatter
from sightline.cache.store import CacheStore
from sightline.core.errors import ConfigError
from sightline.core.lengths import moved

_SLAB_BYTES = 1 << 30
"""Host memory is allocated in pieces of at most this size, because pinned memory is rounded up to a power of 2."""
_STAGING_BYTES = 32 << 20
"""Blocks are copied in batches of at most this size, and at least one block."""
_STATE_SHARE = 2
"""In a model with recurrent layers, states take 1 / _STATE_SHARE of the memory."""


class HostRows:
    """Rows of bytes in host memory, handed out one by one."""

    def __init__(self, num_rows: int, row_bytes: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self._per_slab = max(1, min(num_rows, _SLAB_BYTES // max(1, row_bytes)))
        self._slabs = [
            host_memory(min(self._per_slab, num_rows - first) * row_bytes, device).view(-1, row_bytes)
            for first in range(0, num_rows, self._per_slab)
        ]
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def row(self, index: int) -> Tensor:
        """[row_bytes] uint8."""
        return self._slabs[index // self._per_slab][index % self._per_slab]

    def take(self) -> int | None:
        """A free row; None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, index: int) -> None:
        self._free.append(index)


@dataclass(slots=True)
class _HostBlock:
    """Where a block is in host memory."""

    entries: int
    state: int | None


class HostBlocks:
    """Blocks of one store in host memory."""

    def __init__(self, store: CacheStore, num_bytes: int) -> None:
        """Takes `num_bytes` of host memory, or a little less. Raises `ConfigError` if not even one block fits."""
        layout = self._layout = layout_of(store)
        self._device = store.device
        states = store.main.states
        num_states = 0 if states is None else num_bytes // _STATE_SHARE // layout.state_bytes
        num_blocks = max(0, num_bytes - num_states * layout.state_bytes) // layout.entry_bytes if layout.entries else 0
        if not num_blocks or (states is not None and not num_states):
            raise ConfigError(
                f"expected a host cache for at least one block of {layout.entry_bytes:,} bytes"
                + (f" and, in as much memory again, one state of {layout.state_bytes:,}" if states is not None else "")
                + f", got {num_bytes:,} bytes; raise host_cache_gib, or leave it out"
            )
        num_states = min(num_states, num_blocks)
        self._entries = HostRows(num_blocks, layout.entry_bytes, store.device)
        self._states = HostRows(num_states, layout.state_bytes, store.device)
        self._entry_planes = [
            [as_bytes(pool.plane(plane.name), store.limits.num_pages) for plane in pool.spec.planes]
            for pool in store.pools
        ]
        self._state_planes = [
            as_bytes(pool.plane(plane.name), pool.num_slots)
            for pool in (() if states is None else states.pools)
            for plane in pool.spec.planes
        ]
        self._batch = max(1, min(num_blocks, _STAGING_BYTES // layout.entry_bytes))
        self._staging = torch.empty(self._batch, layout.entry_bytes, dtype=torch.uint8, device=store.device)
        self._state_staging = torch.empty(1, layout.state_bytes, dtype=torch.uint8, device=store.device)
        self._held: OrderedDict[BlockHash, _HostBlock] = OrderedDict()
        """The one unused for longest first."""
        self._with_state: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks with a state, in the same order."""
        self._tickets = itertools.count(1)
        self._ended: list[tuple[TransferTicket, TransferEnd]] = []
        self._is_closed = False

    def usage(self) -> StoreUsage:
        num_bytes = self._entries.num_bytes + self._states.num_bytes
        return StoreUsage(len(self._held), self._entries.num_rows, num_bytes)

    @property
    def num_states(self) -> int:
        """Blocks that have a state too."""
        return len(self._with_state)

    @property
    def max_states(self) -> int:
        return self._states.num_rows

    def layout(self) -> BlockLayout:
        return self._layout

    def hashes(self) -> tuple[BlockHash, ...]:
        """All blocks, the one unused for longest first."""
        return tuple(self._held)

    def lookup(self, hashes: Iterable[BlockHash]) -> int:
        usable = 0
        for number, each in enumerate(hashes, start=1):
            found = self._held.get(each)
            if found is None:
                break
            if not self._layout.states or found.state is not None:
                usable = number
        return usable

    def fetch(self, hashes: Sequence[BlockHash], into: Sequence[BlockPlace]) -> TransferTicket:
        ticket = TransferTicket(next(self._tickets))
        found = [self._held.get(each) for each in hashes]
        lacks_state = [
            place.state is not None and (block is None or block.state is None)
            for block, place in zip(found, into, strict=True)
        ]
        blocks = [block for block in found if block is not None]
        if self._is_closed or len(blocks) < len(hashes) or any(lacks_state):
            self._ended.append((ticket, TransferFailed(f"{len(hashes) - len(blocks)} blocks or a state are not held")))
            return ticket
        # The last blocks of a text leave before those that they follow.
        for each in reversed(hashes):
            self._touch(each)
        for first in range(0, len(blocks), self._batch):
            self._fetch(blocks[first : first + self._batch], into[first : first + self._batch])
        self._ended.append((ticket, TransferDone()))
        return ticket

    def put(self, hashes: Sequence[BlockHash], places: Sequence[BlockPlace]) -> TransferTicket:
        ticket = TransferTicket(next(self._tickets))
        if self._is_closed:
            self._ended.append((ticket, TransferFailed("the host tier is closed")))
            return ticket
        wanted = list(zip(hashes, places, strict=True))
        for first in range(0, len(wanted), self._batch):
            self._put([each for each in wanted[first : first + self._batch] if not self._has(*each)])
        self._ended.append((ticket, TransferDone()))
        return ticket

    def poll(self) -> Iterable[tuple[TransferTicket, TransferEnd]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Forgets every block. Copies that were enqueued are over before it returns."""
        self._is_closed = True
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        for each in tuple(self._held):
            self._drop(each)

    def _has(self, block: BlockHash, place: BlockPlace) -> bool:
        """True if nothing of a block has to be copied. Then it counts as used."""
        held = self._held.get(block)
        is_whole = held is not None and (place.state is None or held.state is not None)
        if is_whole:
            self._touch(block)
        return is_whole

    def _put(self, wanted: Sequence[tuple[BlockHash, BlockPlace]]) -> None:
        if not wanted:
            return
        rows = self._gathered([place for _, place in wanted])
        for source, (each, place) in zip(rows, wanted, strict=True):
            block = self._made_room(each, with_state=place.state is not None)
            self._entries.row(block.entries).copy_(source, non_blocking=True)
            if place.state is not None and block.state is not None:
                [slot] = moved([[place.state]], self._device)
                gather(self._state_planes, slot, self._state_staging)
                self._states.row(block.state).copy_(self._state_staging[0], non_blocking=True)

    def _fetch(self, blocks: Sequence[_HostBlock], into: Sequence[BlockPlace]) -> None:
        rows = self._staging[: len(blocks)]
        for target, block in zip(rows, blocks, strict=True):
            target.copy_(self._entries.row(block.entries), non_blocking=True)
        for planes, pages in zip(self._entry_planes, self._pages(into), strict=True):
            rows = scatter(planes, pages, rows)
        for block, place in zip(blocks, into, strict=True):
            if place.state is not None and block.state is not None:
                [slot] = moved([[place.state]], self._device)
                self._state_staging[0].copy_(self._states.row(block.state), non_blocking=True)
                scatter(self._state_planes, slot, self._state_staging)

    def _gathered(self, places: Sequence[BlockPlace]) -> Tensor:
        """[n, entry_bytes]: the entries of pages, in memory that the next batch overwrites."""
        rows = left = self._staging[: len(places)]
        for planes, pages in zip(self._entry_planes, self._pages(places), strict=True):
            left = gather(planes, pages, left)
        return rows

    def _pages(self, places: Sequence[BlockPlace]) -> Sequence[Tensor]:
        """Moves the page numbers of the places to the device, one tensor for each pool."""
        return moved([list(pages) for pages in zip(*[place.pages for place in places], strict=True)], self._device)

    def _made_room(self, each: BlockHash, *, with_state: bool) -> _HostBlock:
        """Finds memory for a block; drops the blocks that were unused for longest if there is no room."""
        block = self._held.get(each)
        if block is None:
            row = self._entries.take()
            while row is None:
                self._drop(next(iter(self._held)))
                row = self._entries.take()
            block = self._held[each] = _HostBlock(row, None)
        if with_state and block.state is None:
            block.state = self._states.take()
            while block.state is None:
                self._drop_state(next(iter(self._with_state)))
                block.state = self._states.take()
            self._with_state[each] = None
        self._touch(each)
        return block

    def _touch(self, block: BlockHash) -> None:
        self._held.move_to_end(block)
        if block in self._with_state:
            self._with_state.move_to_end(block)

    def _drop(self, each: BlockHash) -> None:
        if each in self._with_state:
            self._drop_state(each)
        self._entries.give_back(self._held.pop(each).entries)

    def _drop_state(self, each: BlockHash) -> None:
        """Gives up the state of a block; its entries stay."""
        block = self._held[each]
        if block.state is not None:
            self._states.give_back(block.state)
            block.state = None
        self._with_state.pop(each)
