"""Checks that callers share the rows: none waits for long while another holds two rows more, and none loses its only
row, or a row that it needs to hold as many as the one that takes it.

Compares the running sequences before and after a scheduling decision. Judges only if pages and tokens are no reason to
wait. Does not know how the decision was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from sightline.scheduler.sequence import SequenceState
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.stage import StagedReplica

_PATIENCE = 3
"""Consecutive decisions that may leave a caller behind: an urgent request may take its row, and the rows that should be
given up may be in flight."""


class RowShares:
    """The rows of one replica, by caller."""

    def __init__(self, stage: StagedReplica, counts: EventCounts) -> None:
        self._stage = stage
        self._counts = counts
        self._ran: list[SequenceState] = []
        """Running sequences before the decision, by rank."""
        self._num_used = 0
        """Pages held before the decision."""
        self._num_refused = 0
        """Refused allocations before the decision."""
        self._last_step = -1
        """The last step whose decision was checked."""
        self._denied: Counter[str] = Counter()
        """For each caller, the consecutive decisions that left it behind another and gave it no row."""

    def before_step(self) -> None:
        """Records the state before a decision."""
        self._ran = list(self._stage.scheduler.running)
        self._num_used = self._pages_of(self._stage.holders())
        self._num_refused = self._stage.faults.num_refused

    def after_decision(self, step: int, num_tokens: int) -> Iterator[str]:
        """Yields everything that is wrong about which sequences have a row in a step of `num_tokens`."""
        if step == self._last_step:
            return
        self._last_step = step
        is_moving = any(tier.num_transfers for tier in self._stage.engine.runtime.tiers)
        if self._stage.faults.num_refused > self._num_refused or is_moving:
            # A refused allocation is a reason to wait, and so is a page on its way.
            self._denied.clear()
            return
        yield from self._taken()
        running = self._stage.scheduler.running
        had = Counter(sequence.caller for sequence in self._ran)
        held = Counter(sequence.caller for sequence in running)
        denied = set[str]() if self._prompts_took_all(num_tokens) else self._deprived() | self._behind()
        self._denied = Counter({each: self._denied[each] + 1 for each in denied if held[each] <= had[each]})
        for caller, count in self._denied.items():
            if count > _PATIENCE:
                yield f"caller {caller!r} has {held[caller]} rows, and another keeps at least two more"

    def _prompts_took_all(self, num_tokens: int) -> bool:
        """True if prompts may have used up the step, so that nobody could be admitted to it."""
        scene, running = self._stage.scene, self._stage.scheduler.running
        is_full = num_tokens >= scene.max_step_tokens or scene.max_step_ticks is not None
        is_scoring = any(sequence.wants_scores for sequence in self._stage.waiting())
        return (is_full or is_scoring) and any(sequence.num_pending > 1 for sequence in running)

    def _taken(self) -> Iterator[str]:
        """Yields rows that were taken for no reason: their caller then has fewer rows than any that got one."""
        running = self._stage.scheduler.running
        held = Counter(sequence.caller for sequence in running)
        new = [sequence for sequence in running if sequence not in self._ran]
        had_pages = self._num_used + self._pages_for([*self._ran, *new], new) <= self._stage.scene.num_pages
        for victim in self._ran:
            if victim in running or victim.is_out or any(other.rank[0] < victim.rank[0] for other in new):
                continue
            takers = {other.caller for other in new if other.rank[0] == victim.rank[0]} - {victim.caller}
            is_shared = any(held[taker] <= held[victim.caller] for taker in takers)
            self._counts.shared_rows += is_shared
            if had_pages and not held[victim.caller]:
                yield f"caller {victim.caller!r} lost its only row to one that is not more urgent"
            elif had_pages and not is_shared:
                yield f"a row of caller {victim.caller!r} was taken for none that is more urgent or has as few"

    def _behind(self) -> set[str]:
        """Returns the callers of the most urgent waiting sequences that hold two rows fewer than another, if there are
        pages for all of them."""
        running, waiting = self._stage.scheduler.running, self._stage.waiting()
        level = min((sequence.rank[0] for sequence in waiting), default=0)
        held = Counter(sequence.caller for sequence in running)
        most = max((held[sequence.caller] for sequence in running if sequence.rank[0] == level), default=0)
        heads = {each.caller: each for each in waiting if each.rank[0] == level and held[each.caller] + 2 <= most}
        if not heads:
            return set()
        # Whichever of its sequences a caller sends first, it is no longer than this.
        longest = [max(waiting, key=lambda each: len(each.tokens))] * len(heads)
        num_pages = self._pages_of(self._stage.holders()) + self._pages_for([*running, *longest], longest)
        return set(heads) if num_pages <= self._stage.scene.num_pages else set()

    def _deprived(self) -> set[str]:
        """Returns the callers of the most urgent waiting sequences that have no row, if another could give one up."""
        running, waiting = self._stage.scheduler.running, self._stage.waiting()
        level = min((sequence.rank[0] for sequence in waiting), default=0)
        held = Counter(sequence.caller for sequence in running)
        heads: dict[str, SequenceState] = {}
        for sequence in sorted(waiting, key=lambda each: each.arrival):
            if sequence.rank[0] == level and not held[sequence.caller]:
                heads.setdefault(sequence.caller, sequence)
        kept = list(running)
        for sequence in reversed(running):
            if sequence.rank[0] >= level and held[sequence.caller] > 1:
                held[sequence.caller] -= 1
                kept.remove(sequence)
        leaving = [sequence for sequence in self._stage.holders() if sequence.is_out]
        num_pages = self._pages_of([*kept, *leaving]) + self._pages_for([*kept, *heads.values()], heads.values())
        if len(kept) == len(running) or num_pages > self._stage.scene.num_pages:
            return set()
        return set(heads)

    def _pages_of(self, sequences: Iterable[SequenceState]) -> int:
        """Counts the pages that sequences hold and need, including those in the prefix cache."""
        table, pages = self._stage.store.pools[0].table, set[int]()
        for sequence in sequences:
            num_pages = -(-sequence.num_expected // self._stage.scene.page_size)
            pages.update(table.owned(sequence.table_row or 0)[:num_pages])
            node = sequence.prefix
            while node is not None and node.parent is not None:
                pages.add(node.bundle.pages[0])
                node = node.parent
        return len(pages)

    def _pages_for(self, sequences: Collection[SequenceState], new: Iterable[SequenceState]) -> int:
        """Counts the additional pages for the new sequences, and one for each sequence to grow."""
        size = self._stage.scene.page_size
        return len(sequences) + sum(-(-len(sequence.tokens) // size) for sequence in new)
