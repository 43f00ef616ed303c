"""The prefix cache: which pages hold the entries of which tokens, so that sequences with a common prefix share them.

    namespace ── root ──[page of tokens]── node ──[page of tokens]── node

An edge is one whole page of tokens, found by hash and compared exactly; a tail shorter than a page is not cached. A
node owns one page of every pool, a bundle. It does not look at what the pools hold, so any kind of cache can take part.
A lock keeps a node and its ancestors; leaves without locks are evicted, least recently used first.

Owns the tree. Does not know sequences, rows or when to evict.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sightline.cache.pools import Bundle, CacheStore


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
    num_locks: int = 0
    """Locks on this node and its descendants; it cannot be evicted while this is above 0."""
    last_used: int = 0

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


class PrefixCache:
    """A tree of pages over one store."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store
        self._page_size = store.limits.page_size
        self._roots: dict[str, PrefixNode] = {}
        self._clock = itertools.count(1)
        self._idle: list[tuple[int, int, PrefixNode]] = []
        """Heap of unlocked leaves by time of last use; stale items are skipped."""
        self._tickets = itertools.count()
        self.num_pages = 0
        """Number of bundles in the tree."""
        self._num_locked = 0

    @property
    def num_evictable(self) -> int:
        """Number of bundles that eviction can remove."""
        return self.num_pages - self._num_locked

    def find(self, namespace: str, tokens: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of whole pages in the namespace. Takes no lock, so it may be evicted afterwards."""
        node = self._roots.get(namespace)
        bundles: list[Bundle] = []
        if node is not None:
            for key in _page_keys(tokens, self._page_size):
                child = node.children.get(key)
                if child is None:
                    break
                node = child
                bundles.append(node.bundle)
        return PrefixMatch(node, tuple(bundles))

    def lock(self, namespace: str, match: PrefixMatch) -> PrefixNode:
        """Locks the match and its ancestors until the returned node is unlocked."""
        node = self._root(namespace) if match.node is None else match.node
        if node.parent is not None and node.parent.children.get(node.key) is not node:
            raise ValueError("expected a prefix that is in the cache, got one that was evicted since; find it again")
        now = next(self._clock)
        node.last_used = now
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
            child = node.children[key] = PrefixNode(node, key, bundle, node.namespace)
            self.num_pages += 1
        # Ancestors keep their lock counts: the lock stays in their subtrees.
        child.num_locks += 1
        if child.num_locks == 1:
            self._num_locked += 1
        child.last_used = next(self._clock)
        return child

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
        """Removes up to `count` bundles, leaves first, least recently used first; returns how many."""
        evicted = 0
        while evicted < count and self._idle:
            last_used, _, node = heapq.heappop(self._idle)
            if node.last_used != last_used or not self._can_go(node):
                continue
            self._remove(node)
            evicted += 1
        return evicted

    def clear(self) -> int:
        """Removes every unlocked bundle; returns how many."""
        return self.evict(self.num_pages)

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
            self._roots[namespace] = PrefixNode(None, b"", Bundle((), (), 0), namespace)
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

    def _remove(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None, "a root owns no page"
        del parent.children[node.key]
        self._store.release(node.bundle, self)
        self.num_pages -= 1
        self._offer(parent)
