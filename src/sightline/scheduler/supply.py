"""Cache resources for sequences: free pages, cached prefixes, pages of running sequences that can be shared.

Owns what happens to a sequence's row: opened, filled with shared entries, grown, released. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from sightline.cache.blocks import BlockHash, TransferTicket
from sightline.cache.prefix import PrefixCache, PrefixMatch, PrefixNode
from sightline.cache.states import StateCheckpoint
from sightline.cache.store import CacheStore
from sightline.cache.tier import Returning, TierCounts
from sightline.core.errors import OutOfPages
from sightline.scheduler.checkpoints import Checkpoints
from sightline.scheduler.decision import Finding
from sightline.scheduler.sequence import ScheduledRow, SequenceState
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
    state: StateCheckpoint | None = None
    """The recurrent state behind the tokens here; None if there are none, or the model has no such layers."""
    below: tuple[BlockHash, ...] = ()
    """Blocks of a tier below for the last of these tokens."""
    num_below: int = 0
    """Tokens of these blocks."""

    @property
    def num_here(self) -> int:
        """Tokens whose entries are in the pools."""
        return self.num_tokens - self.num_below

    @property
    def finding(self) -> Finding:
        """Returns the facts about it that the policy uses."""
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
        states = store.main.states
        self._checkpoints = None if states is None else Checkpoints(states, prefixes, self._page_size)
        """None if no layer of the model is recurrent."""
        self._tier = None if prefixes is None else prefixes.tier
        self._returning: dict[TransferTicket, tuple[SequenceState, bool]] = {}
        """The sequence that waits for each transfer, and whether its tokens count as found in the cache."""
        self.num_returned_tokens = 0
        """Prompt tokens that were found in the tier below, and came back."""

    @property
    def num_coming(self) -> int:
        """Pages that come free once the tier below has what they hold."""
        return 0 if self._tier is None else self._tier.num_leaving

    def tier_metrics(self) -> dict[str, Any]:
        """What `EngineMetrics` has about the tier below, by field."""
        return {} if self._tier is None else self._tier.metrics()

    def reset_counts(self) -> None:
        """Begins all counts again."""
        self.num_returned_tokens = 0
        if self._tier is not None:
            self._tier.counts = TierCounts()

    def find(self, sequence: SequenceState) -> PrefixReuse:
        """Returns what a waiting sequence can share. Leaves at least one token to compute, and all that need logits."""
        tokens = sequence.tokens
        match = None
        if self._prefixes is not None:
            match = self._prefixes.find(sequence.caller, [] if sequence.scores_prompt else tokens[:-1])
        num_pages = 0 if match is None else len(match.bundles)
        found, last = num_pages * self._page_size, len(sequence.request.prompt_token_ids) - 1
        leader, state = sequence.leader, None if match is None else match.checkpoint
        alone = PrefixReuse(match, None, found, num_pages, state)
        if leader is None or leader.is_out or found >= last or self._num_shared(leader) < last:
            return self._with_below(sequence, alone)
        if self._checkpoints is not None:
            state = self._checkpoints.fork(leader)
            if state is None and last:
                return self._with_below(sequence, alone)
        return PrefixReuse(match, leader, last, last // self._page_size, state)

    def _with_below(self, sequence: SequenceState, reuse: PrefixReuse) -> PrefixReuse:
        """Adds what the tier below has of the tokens behind a match."""
        if self._tier is None or self._prefixes is None or reuse.match is None or sequence.scores_prompt:
            return reuse
        below = self._prefixes.find_below(sequence.caller, reuse.match, sequence.tokens[:-1])
        num_below = len(below) * self._page_size
        return reuse._replace(num_tokens=reuse.num_tokens + num_below, below=below, num_below=num_below)

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
        num_copied = reuse.num_here - reuse.num_pages * self._page_size
        if leader is not None and leader.table_row is not None and num_copied:
            self.store.copy_page(leader.table_row, row, reuse.num_pages, num_copied)
        if reuse.state is not None:
            self.store.restore(row, reuse.state)
        sequence.branch = 0 if reuse.match is None else reuse.match.num_seen * self._page_size
        sequence.num_pages = self.store.row_pages(row)
        sequence.num_computed = sequence.num_scheduled = reuse.num_here

    def fetch(self, sequence: SequenceState, reuse: PrefixReuse) -> None:
        """Begins to fetch what the tier below has for a sequence that has its row.

        It may cost others their recurrent states: all that were admitted with it have theirs by then.
        """
        if self._tier is None or not reuse.below:
            return
        # A transfer may outlive the row, so its state needs the room of a checkpoint.
        if self._checkpoints is not None and not self._checkpoints.make_room():
            return
        # The state that gave way may have pushed some of these blocks out of the tier.
        below = self._tier.still_held(reuse.below)
        if below:
            returning = sequence.returning = self._tier.fetch(sequence.held_row, reuse.num_pages, below)
            self._returning[returning.ticket] = (sequence, not sequence.was_admitted)

    def poll(self) -> None:
        """Takes in which transfers to the tier below and back have ended, and how."""
        if self._tier is None:
            return
        for returning, why in self._tier.poll():
            sequence, counts = self._returning.pop(returning.ticket)
            # It may have been removed or retracted meanwhile.
            is_awaited, is_there = sequence.returning is returning, False
            if is_awaited:
                sequence.returning = None
                is_there = why is None and self.store.returned(returning.row, returning.num_tokens, returning.state)
            # Before the state is shared: while the tier owns it too, it takes the room of two checkpoints.
            self._tier.let_go(returning)
            if is_there:
                self._arrive(sequence, returning, counts=counts)
            elif is_awaited:
                self._tier.counts.failed_returns += len(returning.pages)

    def _arrive(self, sequence: SequenceState, returning: Returning, *, counts: bool) -> None:
        """Lets a sequence go on behind the blocks that came back, and shares them."""
        if self._tier is not None:
            self._tier.counts.returned += len(returning.pages)
        num_tokens = returning.num_tokens - sequence.num_computed
        sequence.num_computed = sequence.num_scheduled = returning.num_tokens
        sequence.num_charged = max(sequence.num_charged, returning.num_tokens)
        if counts:
            sequence.num_cached += num_tokens
            self.num_returned_tokens += num_tokens
        self.publish(sequence)
        if self._checkpoints is not None:
            self._checkpoints.returned(sequence, returning.num_tokens)

    def keep_states(self, row: ScheduledRow, *, has_followers: bool) -> None:
        """Keeps those of a row's next recurrent states that other sequences may go on from."""
        if self._checkpoints is not None:
            self._checkpoints.ask(row, has_followers=has_followers)

    def end_fork(self, leader: SequenceState) -> None:
        """Gives up the state kept for other continuations of a request: none of them waits any more."""
        if self._checkpoints is not None and leader.table_row is not None:
            self._checkpoints.end_fork(leader)

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
            if self._tier is not None:
                # What has come back waits: room for its state could be that of a prefix found for an admitted sequence.
                self._tier.settle()

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
            if self._checkpoints is not None:
                self._checkpoints.publish(sequence, sequence.num_prefix_pages * size)

    def release(self, sequence: SequenceState) -> None:
        """Releases a sequence's row, its pages and its lock. Idempotent."""
        if sequence.table_row is not None:
            if self.store.is_open(sequence.table_row):
                self.store.close_row(sequence.table_row)
            sequence.table_row = None
        sequence.num_pages, sequence.answered, sequence.returning = 0, None, None
        sequence.pinned.clear()
        if self._prefixes is not None and sequence.prefix is not None:
            node, sequence.prefix = sequence.prefix, None
            self._prefixes.unlock(node)
        sequence.num_prefix_pages = 0


def _path(node: PrefixNode | None) -> Iterator[PrefixNode]:
    """A node and its ancestors that own a page."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent
