"""Cache resources for sequences: free pages, cached prefixes, pages of running sequences that can be shared.

Owns what happens to a sequence's row: opened, filled with shared entries, grown, released. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from sightline.cache.pools import CacheStore
from sightline.cache.prefix import PrefixCache, PrefixMatch, PrefixNode
from sightline.core.errors import OutOfPages
from sightline.scheduler.decision import Finding
from sightline.scheduler.sequence import SequenceState
from sightline.scheduler.tally import HeldPage, Holding, LockedPage, Tally


class PrefixReuse(NamedTuple):
    """Entries that a waiting sequence can share."""

    match: PrefixMatch | None
    """Match in the prefix cache; None if prefix caching is off."""
    leader: SequenceState | None
    """A running sequence that has computed more of the same prompt."""
    num_tokens: int
    """Tokens that need not be computed."""
    num_pages: int
    """Whole pages of these tokens, which are shared; the rest is copied."""

    @property
    def finding(self) -> Finding:
        """What the policy sees of it."""
        path = () if self.match is None else tuple([bundle.pages[0] for bundle in self.match.bundles])
        fork_of = None if self.leader is None else self.leader.arrival
        return Finding(self.num_tokens, self.num_pages, fork_of, path)


class Supply:
    """A store and, if there is one, its prefix cache."""

    def __init__(self, store: CacheStore, prefixes: PrefixCache | None) -> None:
        """Without `prefixes`, nothing outlives its request."""
        self.store = store
        self._prefixes = prefixes
        self._page_size = store.limits.page_size

    def find(self, sequence: SequenceState) -> PrefixReuse:
        """What a waiting sequence can share. Leaves at least one token to compute, and all that need logits."""
        tokens = sequence.tokens
        match = None
        if self._prefixes is not None:
            match = self._prefixes.find(sequence.caller, [] if sequence.scores_prompt else tokens[:-1])
        num_pages = 0 if match is None else len(match.bundles)
        found, last = num_pages * self._page_size, len(sequence.request.prompt_token_ids) - 1
        leader = sequence.leader
        if leader is None or leader.is_out or found >= last or self._num_shared(leader) < last:
            return PrefixReuse(match, None, found, num_pages)
        return PrefixReuse(match, leader, last, last // self._page_size)

    def _num_shared(self, leader: SequenceState) -> int:
        """Entries of a running sequence that others may share: those that every network has."""
        if leader.table_row is None:
            return leader.num_computed
        return min(leader.num_computed, self.store.committed(leader.table_row))

    def tally(self) -> Tally:
        """Tally of the available pages."""
        return Tally(self.store.num_free_pages + (0 if self._prefixes is None else self._prefixes.num_evictable))

    def idle(self, reuses: Collection[PrefixReuse]) -> frozenset[int]:
        """Pages of the matches that could be evicted: no sequence locks them."""
        idle: set[int] = set()
        for reuse in reuses:
            for node in _path(None if reuse.match is None else reuse.match.node):
                page = node.bundle.pages[0]
                # The nodes before it were seen with it, or are locked too.
                if node.num_locks or page in idle:
                    break
                idle.add(page)
        return frozenset(idle)

    def holding(self, sequence: SequenceState) -> Holding:
        """The pages that a running sequence holds and locks."""
        assert sequence.table_row is not None, "a running sequence has a row"
        pages = [self.store.pages_at(sequence.table_row, index) for index in range(sequence.num_pages)]
        nodes = list(_path(sequence.prefix))
        return Holding(
            tuple([HeldPage(each[0], self.store.owners(each)) for each in pages]),
            tuple([LockedPage(n.bundle.pages[0], self.store.owners(n.bundle.pages), n.num_locks) for n in nodes]),
        )

    def keep(self, sequence: SequenceState, reuse: PrefixReuse) -> None:
        """Locks the match, so that making room does not evict it."""
        if self._prefixes is not None and reuse.match is not None:
            sequence.prefix = self._prefixes.lock(sequence.caller, reuse.match)
            sequence.num_prefix_pages = len(reuse.match.bundles)

    def open(self, sequence: SequenceState, reuse: PrefixReuse, num_tokens: int) -> None:
        """Gives a sequence a row with the shared entries, and pages for `num_tokens` in total. Raises `OutOfPages`."""
        bundles = () if reuse.match is None else reuse.match.bundles
        leader = reuse.leader
        if leader is not None:
            if leader.table_row is None:
                raise OutOfPages("expected the pages of a running sequence to fork, got one that was retracted")
            more = range(len(bundles), reuse.num_pages)
            bundles = (*bundles, *(self.store.committed_bundle(leader.table_row, index) for index in more))
        row = sequence.table_row = self.store.open_row()
        self.store.adopt(row, bundles)
        self.store.grow_row(row, num_tokens)
        num_copied = reuse.num_tokens - reuse.num_pages * self._page_size
        if leader is not None and leader.table_row is not None and num_copied:
            self.store.copy_page(leader.table_row, row, reuse.num_pages, num_copied)
        sequence.num_pages = self.store.row_pages(row)
        sequence.num_computed = sequence.num_scheduled = reuse.num_tokens

    def grow(self, sequence: SequenceState, num_tokens: int) -> None:
        """Grows the row to `num_tokens` in total. Raises `OutOfPages`."""
        assert sequence.table_row is not None, "a running sequence has a row"
        self.store.grow_row(sequence.table_row, num_tokens)
        sequence.num_pages = self.store.row_pages(sequence.table_row)

    def make_room(self, num_pages: int, reserving: Iterable[SequenceState]) -> None:
        """Frees pages: first reserved unused ones, in the order of the sequences, then cached ones."""
        missing = num_pages - self.store.num_free_pages
        for sequence in reserving:
            if missing <= 0:
                return
            if sequence.table_row is not None:
                self.store.trim_row(sequence.table_row, sequence.num_expected)
                sequence.num_pages = self.store.row_pages(sequence.table_row)
                missing = num_pages - self.store.num_free_pages
        if self._prefixes is not None and missing > 0:
            self._prefixes.evict(missing)

    def publish(self, sequence: SequenceState) -> None:
        """Adds whole computed pages to the prefix cache. Their logits are known to be finite."""
        if self._prefixes is None or sequence.prefix is None or sequence.table_row is None:
            return
        size = self._page_size
        # Most steps complete no page, and every row of every step comes here.
        if (sequence.num_prefix_pages + 1) * size > sequence.num_computed:
            return
        num_shared = self._num_shared(sequence)
        while (sequence.num_prefix_pages + 1) * size <= num_shared:
            index = sequence.num_prefix_pages
            tokens = sequence.tokens[index * size : (index + 1) * size]
            bundle = self.store.committed_bundle(sequence.table_row, index)
            sequence.prefix = self._prefixes.extend(sequence.prefix, tokens, bundle)
            sequence.num_prefix_pages += 1

    def release(self, sequence: SequenceState) -> None:
        """Releases a sequence's row, its pages and its lock. Idempotent."""
        if sequence.table_row is not None:
            if self.store.is_open(sequence.table_row):
                self.store.close_row(sequence.table_row)
            sequence.table_row = None
        sequence.num_pages = 0
        if self._prefixes is not None and sequence.prefix is not None:
            node, sequence.prefix = sequence.prefix, None
            self._prefixes.unlock(node)
        sequence.num_prefix_pages = 0


def _path(node: PrefixNode | None) -> Iterator[PrefixNode]:
    """A node and its ancestors that own a page."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent
