"""Checks that callers share the rows: a waiting caller without a row gets one, and none loses its only row to another.

Compares the running sequences before and after a scheduling decision. Judges only if pages and tokens are no reason to
wait. Does not know how the decision was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from sightline.scheduler.sequence import SequenceState
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.stage import Stage

_PATIENCE = 3
"""Consecutive decisions that may leave a caller without a row: an urgent request may take its row, and the rows that
should be given up may be in flight."""


class RowShares:
    """The rows of one engine, by caller."""

    def __init__(self, stage: Stage, counts: EventCounts) -> None:
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
        """For each caller, the consecutive decisions that left it without a row."""

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
        if self._stage.faults.num_refused > self._num_refused:
            # A refused allocation is a reason to wait.
            self._denied.clear()
            return
        yield from self._taken()
        denied = self._deprived(num_tokens)
        self._denied = Counter({caller: self._denied[caller] + 1 for caller in denied})
        for caller, count in self._denied.items():
            if count > _PATIENCE:
                yield f"caller {caller!r} has no row, and another keeps two or more"

    def _taken(self) -> Iterator[str]:
        """Yields rows that were taken for no reason, or that were a caller's only one."""
        running = self._stage.scheduler.running
        held = Counter(sequence.caller for sequence in running)
        keeping = {sequence.caller for sequence in self._ran if sequence in running}
        new = [sequence for sequence in running if sequence not in self._ran]
        had_pages = self._num_used + self._pages_for([*self._ran, *new], new) <= self._stage.scene.num_pages
        for victim in self._ran:
            if victim in running or victim.is_out or any(other.rank[0] < victim.rank[0] for other in new):
                continue
            is_shared = any(other.rank[0] == victim.rank[0] and other.caller not in keeping for other in new)
            self._counts.shared_rows += is_shared
            if had_pages and not is_shared:
                yield f"a row of caller {victim.caller!r} was taken, and no new row is more urgent or a caller's first"
            elif had_pages and not held[victim.caller]:
                yield f"caller {victim.caller!r} lost its only row to one that is not more urgent"

    def _deprived(self, num_tokens: int) -> set[str]:
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
        is_full = num_tokens >= self._stage.scene.max_step_tokens or self._stage.scene.max_step_ticks is not None
        prompts_took_all = is_full and any(sequence.num_pending > 1 for sequence in running)
        leaving = [sequence for sequence in self._stage.holders() if sequence.is_out]
        num_pages = self._pages_of([*kept, *leaving]) + self._pages_for([*kept, *heads.values()], heads.values())
        if len(kept) == len(running) or prompts_took_all or num_pages > self._stage.scene.num_pages:
            return set()
        return set(heads)

    def _pages_of(self, sequences: Iterable[SequenceState]) -> int:
        """Counts the pages that sequences hold and need, including those in the prefix cache."""
        table, pages = self._stage.engine.runtime.store.pools[0].table, set[int]()
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
