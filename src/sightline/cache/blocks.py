"""Blocks: what one page of tokens left in every pool, as something that can be kept elsewhere and brought back.

    tier        kept in                      identity
    card        pages of the pools           a node of the prefix tree
    other       a `BlockStore`               a `BlockHash`, the same wherever the block is kept

A block holds the entries of one page of tokens in every pool of every network, and in a model with recurrent layers
the state behind that page, if one was kept. `BlockStore` is the interface of whatever keeps blocks: host memory, a
folder, another machine. Transfers are asynchronous: pages that one names belong to it until `poll` reports its end.

Owns the interface, and how blocks are named. Does not know where blocks are kept, nor what an entry means.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, NewType, Protocol, TypeAlias

from sightline.cache.pools import BundlePages
from sightline.cache.spec import PlaneSpec
from sightline.cache.store import CacheStore
from sightline.core.errors import ConfigError

BlockHash = NewType("BlockHash", bytes)
"""Names a block: covers all tokens up to its end, the model, the adapter, the tenant and the layout."""


@dataclass(frozen=True)
class BlockPlane:
    """One tensor of a block, such as the keys of one pool."""

    source: str
    """The pool's key, or the group whose states they are."""
    name: str
    num_layers: int
    shape: tuple[int, ...]
    """Per layer: a page of entries, or one state."""
    dtype: str
    itemsize: int
    scales: tuple[float, ...] | None

    @property
    def num_bytes(self) -> int:
        return self.num_layers * math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class BlockLayout:
    """What a block holds, in order. Two stores can exchange blocks only if their layouts are equal."""

    page_size: int
    entries: tuple[BlockPlane, ...]
    states: tuple[BlockPlane, ...]
    """The recurrent state behind the page; empty if the model has none."""

    @property
    def entry_bytes(self) -> int:
        """Size of a block without a state."""
        return sum(plane.num_bytes for plane in self.entries)

    @property
    def state_bytes(self) -> int:
        return sum(plane.num_bytes for plane in self.states)

    @property
    def digest(self) -> str:
        """The same text for equal layouts only."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def require(self, other: BlockLayout) -> None:
        """Raises `ConfigError` if another layout is not this one."""
        if other != self:
            raise ConfigError(
                f"expected blocks of {self.entry_bytes:,} bytes in {len(self.entries)} planes of {self.page_size} "
                f"tokens, with states of {self.state_bytes:,} bytes (layout {self.digest[:12]}), got "
                f"{other.entry_bytes:,} in {len(other.entries)} of {other.page_size}, with states of "
                f"{other.state_bytes:,} (layout {other.digest[:12]}); use the same model, dtypes and page size on both "
                "sides"
            )


def layout_of(store: CacheStore) -> BlockLayout:
    """The layout of the blocks of a store."""

    def plane(source: str, spec: PlaneSpec, num_layers: int, *page: int) -> BlockPlane:
        dtype = str(spec.dtype).removeprefix("torch.")
        return BlockPlane(source, spec.name, num_layers, (*page, *spec.shape), dtype, spec.dtype.itemsize, spec.scales)

    size = store.limits.page_size
    groups = [group for group in store.groups if group.states.is_used]
    return BlockLayout(
        size,
        tuple(
            plane(pool.key, spec, pool.spec.num_layers, pool.entries_per_page)
            for pool in store.pools
            for spec in pool.spec.planes
        ),
        tuple(
            plane(each.group, spec, each.states.spec.num_layers) for each in groups for spec in each.states.spec.planes
        ),
    )


@dataclass(frozen=True)
class BlockIdentity:
    """What the names of an engine's blocks depend on, beside tokens and tenant."""

    model: str
    layout: str
    """The digest of the blocks' layout."""
    adapter: str = ""

    def beginning(self, namespace: str) -> BlockHash:
        """Returns the hash that stands before the first block of a tenant's texts."""
        facts = [self.model, self.adapter, namespace, self.layout]
        return BlockHash(hashlib.sha256(json.dumps(facts).encode()).digest())


def hash_after(before: BlockHash, tokens: bytes) -> BlockHash:
    """The name of the block of one whole page of tokens behind the block `before`."""
    return BlockHash(hashlib.sha256(before + tokens).digest())


class BlockPlace(NamedTuple):
    """Where the parts of a block are in the pools."""

    pages: BundlePages
    state: int | None = None
    """The slot of the state behind the page; None if there is none."""


class TransferTicket(NamedTuple):
    """A transfer. Numbers are unique within a store."""

    number: int


@dataclass(frozen=True)
class TransferDone:
    """A transfer that ended well."""


@dataclass(frozen=True)
class TransferFailed:
    """A transfer that failed. What it was to write may hold anything."""

    why: str


TransferEnd: TypeAlias = TransferDone | TransferFailed


class StoreUsage(NamedTuple):
    """How full a block store is."""

    num_blocks: int
    max_blocks: int
    num_bytes: int
    """Memory that it takes, whether blocks are in it or not."""


class BlockStore(Protocol):
    """Keeps blocks beyond the pools. One thread at a time calls it.

    A page that a transfer names is neither freed nor written by others until `poll` has reported the ticket. A ticket
    that is reported as done counts for everything that is launched on the device afterwards: its copies may still be
    on their way if they come first in stream order. Every ticket is reported once, in any order, unless the store is
    closed before.
    """

    def layout(self) -> BlockLayout:
        """Returns the layout of its blocks, which is compared at start."""

    def usage(self) -> StoreUsage:
        """Returns how full it is. Any thread may call it."""

    def lookup(self, hashes: Iterable[BlockHash]) -> int:
        """The number of leading blocks that it has and that a sequence can go on from: if the layout has states, up to
        the last one with a state. Reads no more hashes than it needs, and changes nothing."""

    def fetch(self, hashes: Sequence[BlockHash], into: Sequence[BlockPlace]) -> TransferTicket:
        """Begins to copy blocks into pages. Only places with a slot get a state."""

    def put(self, hashes: Sequence[BlockHash], places: Sequence[BlockPlace]) -> TransferTicket:
        """Begins to copy blocks out of pages. Those that it has already may be left out."""

    def poll(self) -> Iterable[tuple[TransferTicket, TransferEnd]]:
        """The transfers that have ended since the last call. Does not wait."""

    def close(self) -> None:
        """Ends every transfer: once it returns, no page is read or written any more. Idempotent."""
