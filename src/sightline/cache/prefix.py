"""The prefix cache: which pages hold the entries of which tokens, so that sequences with a common prefix share them.

    namespace ── root ──[page of tokens]── node ──[page of tokens]── node

An edge is one whole page of tokens, found by hash and compared exactly; a tail shorter than a page is not cached. A
node owns one page of every pool, a bundle. It does not look at what the pools hold, so any kind of cache can take part.
A lock keeps a node and its ancestors; leaves without locks are evicted, least recently used first.

In a model with recurrent layers some nodes own a checkpoint too, the state behind their page. A sequence can go on only
from there, so a prefix ends at the last checkpoint on its way. A checkpoint goes with its node, or before it, when room
is needed for another.

Owns the tree. Does not know sequences, rows or when to evict.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sightline.cache.blocks import BlockHash, hash_after
from sightline.cache.pools import Bundle
from sightline.cache.states import StateCheckpoint
from sightline.cache.store import CacheStore
from sightline.cache.tier import Leaving, LowerTier


def _key(tokens: Sequence[int]) -> bytes:
    """The token ids, 4 bytes each."""
    return array("I", tokens).tobytes()


def _page_keys(tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """The key of each whole page of tokens."""
    data = _key(tokens)
    width = page_size * array("I").itemsize
    return (data[start : start + width] for start in range(0, len(tokens) // page_size * width, width))


@dataclass(eq=False, slots=True)
class PrefixNode:
    """The entries of one page of tokens that follows the pages of all ancestors."""

    parent: PrefixNode | None
    """None for a root, which represents no tokens and owns no page."""
    key: bytes
    bundle: Bundle
    namespace: str
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    checkpoint: StateCheckpoint | None = None
    """The recurrent state behind its page, if one is kept."""
    num_locks: int = 0
    """Locks on this node and its descendants; it cannot be evicted while this is above 0."""
    last_used: int = 0
    name: BlockHash | None = None
    """The block of its page in the tier below; None if there is no such tier."""

    @property
    def num_pages(self) -> int:
        """Number of pages up to this node, its own included."""
        return 0 if self.parent is None else self.bundle.place + 1


@dataclass(frozen=True)
class PrefixMatch:
    """The longest cached prefix of some tokens."""

    node: PrefixNode | None
    """The last node of the prefix; None if the namespace is empty."""
    bundles: tuple[Bundle, ...]
    """One per page, in order."""
    num_seen: int
    """Cached pages of the tokens, also those behind the last checkpoint, which cannot be used."""

    @property
    def checkpoint(self) -> StateCheckpoint | None:
        """The recurrent state to go on from; None if there is none, or the model has none."""
        return None if self.node is None else self.node.checkpoint


class PrefixCache:
    """A tree of pages over one store."""

    def __init__(self, store: CacheStore, tier: LowerTier | None = None) -> None:
        """`tier` keeps what is evicted; without one, it is lost."""
        self._store = store
        self.tier = tier
        self._page_size = store.limits.page_size
        self._roots: dict[str, PrefixNode] = {}
        self._clock = itertools.count(1)
        self._idle: list[tuple[int, int, PrefixNode]] = []
        """Heap of unlocked leaves by time of last use; stale items are skipped."""
        self._tickets = itertools.count()
        self.num_pages = 0
        """Number of bundles in the tree."""
        self._num_locked = 0
        self._states = store.main.states
        self._with_checkpoint: dict[PrefixNode, None] = {}
        """Nodes with a checkpoint, the one unused for longest first."""

    @property
    def num_checkpoints(self) -> int:
        return len(self._with_checkpoint)

    @property
    def num_evictable(self) -> int:
        """Number of bundles that eviction can remove."""
        return self.num_pages - self._num_locked

    def find(self, namespace: str, tokens: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of whole pages in the namespace. Takes no lock, so it may be evicted afterwards."""
        node = end = self._roots.get(namespace)
        bundles: list[Bundle] = []
        if node is not None:
            for key in _page_keys(tokens, self._page_size):
                child = node.children.get(key)
                if child is None:
                    break
                node = child
                bundles.append(node.bundle)
                if self._states is None or node.checkpoint is not None:
                    end = node
        num_pages = 0 if end is None else end.num_pages
        return PrefixMatch(end, tuple(bundles[:num_pages]), len(bundles))

    def find_below(self, namespace: str, match: PrefixMatch, tokens: Sequence[int]) -> tuple[BlockHash, ...]:
        """The blocks of the pages behind a match that the tier below has and that a sequence can go on from."""
        if self.tier is None:
            return ()
        after = self.tier.beginning(namespace) if match.node is None else match.node.name
        assert after is not None, "with a tier, every node has a name"
        return self.tier.find(after, itertools.islice(_page_keys(tokens, self._page_size), len(match.bundles), None))

    def lock(self, namespace: str, match: PrefixMatch) -> PrefixNode:
        """Locks the match and its ancestors until the returned node is unlocked."""
        node = self._root(namespace) if match.node is None else match.node
        if node.parent is not None and node.parent.children.get(node.key) is not node:
            raise ValueError("expected a prefix that is in the cache, got one that was evicted since; find it again")
        now = next(self._clock)
        node.last_used = now
        if node in self._with_checkpoint:
            self._with_checkpoint[node] = self._with_checkpoint.pop(node)
        step: PrefixNode | None = node
        while step is not None:
            step.num_locks += 1
            if step.num_locks == 1 and step.parent is not None:
                self._num_locked += 1
            step = step.parent
        return node

    def extend(self, node: PrefixNode, tokens: Sequence[int], bundle: Bundle) -> PrefixNode:
        """Adds one whole page of tokens after a locked node and moves the lock to it.

        If the tree already holds these tokens, the bundle remains the caller's alone.
        """
        assert len(tokens) == self._page_size, "a node is a whole page"
        if bundle.place != node.num_pages:
            raise ValueError(f"expected page {node.num_pages} of a row behind as many others, got {bundle.place}")
        key = _key(tokens)
        child = node.children.get(key)
        if child is None:
            self._store.share(bundle, self)
            name = None if node.name is None else hash_after(node.name, key)
            child = node.children[key] = PrefixNode(node, key, bundle, node.namespace, name=name)
            self.num_pages += 1
        # Ancestors keep their lock counts: the lock stays in their subtrees.
        child.num_locks += 1
        if child.num_locks == 1:
            self._num_locked += 1
        child.last_used = next(self._clock)
        return child

    def attach(self, node: PrefixNode, checkpoint: StateCheckpoint) -> bool:
        """Keeps the recurrent state behind a node's page. Returns False, and leaves it to the caller, if there is one.

        Raises `ValueError` if it is the state behind another number of tokens.
        """
        if checkpoint.position != node.num_pages * self._page_size:
            raise ValueError(
                f"expected the state behind {node.num_pages * self._page_size} tokens, where the page ends, got one "
                f"behind {checkpoint.position}"
            )
        if self._states is None or node.checkpoint is not None:
            return False
        self._states.share(checkpoint)
        node.checkpoint = checkpoint
        self._with_checkpoint[node] = None
        return True

    def detach(self, node: PrefixNode) -> None:
        """Gives up the recurrent state behind a node's page. Idempotent."""
        if self._states is not None and node.checkpoint is not None:
            del self._with_checkpoint[node]
            self._states.release(node.checkpoint)
            node.checkpoint = None

    def drop_checkpoint(self) -> bool:
        """Gives up the recurrent state that was unused for longest; False if there is none.

        It goes to the tier below with its page. If another state is still on its way there, it is lost instead, so that
        at most one slot waits for a transfer.
        """
        node = next(iter(self._with_checkpoint), None)
        if node is None:
            return False
        if self.tier is not None and node.name is not None and not self.tier.has_leaving_state:
            self.tier.put([Leaving(node.name, node.bundle, node.checkpoint)])
            self.tier.settle()
        self.detach(node)
        return True

    def unlock(self, node: PrefixNode) -> None:
        """Releases the caller's lock on a node. Unlocked descendants become evictable."""
        now = next(self._clock)
        node.last_used = now
        step: PrefixNode | None = node
        while step is not None:
            step.num_locks -= 1
            assert step.num_locks >= 0, "a lock is taken away once"
            if step.num_locks == 0 and step.parent is not None:
                self._num_locked -= 1
            step = step.parent
        self._offer(node)

    def evict(self, count: int) -> int:
        """Removes up to `count` bundles, leaves first, least recently used first; returns how many.

        If there is a tier below, it gets them first. Their pages come free when it has them.
        """
        return self._evict(count, self.tier)

    def clear(self) -> int:
        """Removes every unlocked bundle, and keeps none of them in the tier below; returns how many."""
        return self._evict(self.num_pages, None)

    def close(self) -> None:
        """Removes every unlocked bundle, and ends the transfers of the tier below."""
        self.clear()
        if self.tier is not None:
            self.tier.close()

    def _evict(self, count: int, tier: LowerTier | None) -> int:
        evicted: list[PrefixNode] = []
        while len(evicted) < count and self._idle:
            last_used, _, node = heapq.heappop(self._idle)
            if node.last_used != last_used or not self._can_go(node):
                continue
            self._take_out(node)
            evicted.append(node)
        try:
            if tier is not None:
                named = [(node.name, node) for node in evicted]
                tier.put([Leaving(name, node.bundle, node.checkpoint) for name, node in named if name is not None])
        finally:
            for node in evicted:
                self.detach(node)
                self._store.release(node.bundle, self)
        return len(evicted)

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node that owns a page, parents first."""
        left = list(self._roots.values())
        while left:
            node = left.pop()
            if node.parent is not None:
                yield node
            left.extend(node.children.values())

    def _root(self, namespace: str) -> PrefixNode:
        if namespace not in self._roots:
            name = None if self.tier is None else self.tier.beginning(namespace)
            self._roots[namespace] = PrefixNode(None, b"", Bundle((), (), 0), namespace, name=name)
        return self._roots[namespace]

    def _can_go(self, node: PrefixNode) -> bool:
        attached = node.parent is not None and node.parent.children.get(node.key) is node
        return attached and not node.children and node.num_locks == 0

    def _offer(self, node: PrefixNode) -> None:
        """Makes a node available for eviction if possible; removes an empty root at once."""
        if node.parent is None:
            if not node.children and node.num_locks == 0:
                self._roots.pop(node.namespace, None)
        elif self._can_go(node):
            heapq.heappush(self._idle, (node.last_used, next(self._tickets), node))
            # A node that is used repeatedly leaves a stale item each time.
            if len(self._idle) > 2 * self.num_pages + 64:
                self._idle = [
                    entry for entry in self._idle if entry[0] == entry[2].last_used and self._can_go(entry[2])
                ]
                heapq.heapify(self._idle)

    def _take_out(self, node: PrefixNode) -> None:
        """Takes a leaf out of the tree; its page and its checkpoint are the caller's to release."""
        parent = node.parent
        assert parent is not None, "a root owns no page"
        del parent.children[node.key]
        self.num_pages -= 1
        self._offer(parent)
