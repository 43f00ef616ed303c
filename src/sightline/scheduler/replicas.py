"""Scheduling for several replicas: each has a scheduler, rows and a cache of its own, and they step together.

A request goes to the replica that has the least to compute for it: what the replica holds already, and the part of the
prompt that is not in its cache. Its continuations stay together, because they share the prompt's pages. While it waits
for a row or for pages, another replica that has them may take it over. Requests of one replica have their turns; those
of two have none.

Knows how much work each replica has. How a replica schedules its own is `Scheduler`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from sightline.cache.prefix import PrefixCache
from sightline.cache.store import CacheStore
from sightline.scheduler.drafted_rows import DraftCounts
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import RowResult, Schedule, ScheduledRow, SequenceState


class ReplicaScheduler:
    """Has the interface of a `Scheduler`, and hands everything on to that of the sequence's replica."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._each = tuple(schedulers)
        self._held: dict[SequenceState, int] = {}
        """The tokens that each sequence may come to compute, until it is removed."""
        self._loads = [0] * len(self._each)
        """Their sum for each replica."""

    def submit(self, sequence: SequenceState) -> None:
        """Adds a sequence to the queue of a replica. Raises `RequestError` if it could never finish."""
        leader = sequence.leader
        sequence.replica = self._lightest(sequence) if leader is None else leader.replica
        self._of(sequence).submit(sequence)
        self._held[sequence] = sequence.max_len
        self._loads[sequence.replica] += sequence.max_len

    def _lightest(self, sequence: SequenceState) -> int:
        """The replica with the least to compute once it has the sequence; the first of several."""
        loads = [load - each.num_cached(sequence) for load, each in zip(self._loads, self._each, strict=True)]
        return loads.index(min(loads))

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence in any phase. Idempotent."""
        self._loads[sequence.replica] -= self._held.pop(sequence, 0)
        self._of(sequence).remove(sequence)

    def schedule(self) -> Schedule:
        """The rows of the next step, those of the first replica first."""
        self._balance()
        generating = [each.generates for each in self._each]
        schedules = [
            each.schedule(generates_beside=sum(generating) > own)
            for each, own in zip(self._each, generating, strict=True)
        ]
        return Schedule(tuple(row for schedule in schedules for row in schedule.rows))

    def _balance(self) -> None:
        """Gives each replica for which nothing waits a request that has no room where it waits, of the replica where
        most wait."""
        for replica, free in enumerate(self._each):
            busy = sorted(self._each, key=lambda each: -each.num_waiting) if not free.num_waiting else []
            for each in [other for other in busy if other.num_waiting]:
                first = each.first_untouched()
                if first is not None and free.has_room_for(first) and not each.has_room_for(first):
                    self._move(first, each, replica)
                    break

    def _move(self, first: SequenceState, busy: Scheduler, replica: int) -> None:
        """Gives a waiting request to another replica."""
        for sequence in busy.give_up(first):
            self._loads[sequence.replica] -= self._held[sequence]
            self._loads[replica] += self._held[sequence]
            sequence.replica = replica
            self._of(sequence).submit(sequence)

    def launched(self, rows: Iterable[ScheduledRow]) -> None:
        """Records that a step with these rows is running."""
        for scheduler, own in self._shared_out(rows):
            scheduler.launched(own)

    def commit(self, row: ScheduledRow, result: RowResult) -> None:
        """Records what a step gave a row."""
        self._of(row.sequence).commit(row, result)

    def landed(self, rows: Iterable[ScheduledRow]) -> None:
        """Records that the step with these rows is over."""
        for scheduler, own in self._shared_out(rows):
            scheduler.landed(own)

    def pause(self, sequence: SequenceState) -> None:
        """Parks a sequence."""
        self._of(sequence).pause(sequence)

    def resume(self, sequence: SequenceState) -> None:
        """Lets a paused sequence run on, in its replica."""
        self._of(sequence).resume(sequence)

    def recount(self, in_flight: Sequence[ScheduledRow]) -> None:
        """Repairs the state after an interruption between two statements, from the rows in flight."""
        for scheduler, own in self._shared_out(in_flight):
            scheduler.recount(own)

    def drop_all(self) -> None:
        """Drops every sequence without touching the caches, which are lost."""
        self._held.clear()
        self._loads = [0] * len(self._each)
        for each in self._each:
            each.drop_all()

    def _of(self, sequence: SequenceState) -> Scheduler:
        return self._each[sequence.replica]

    def _shared_out(self, rows: Iterable[ScheduledRow]) -> list[tuple[Scheduler, list[ScheduledRow]]]:
        """Every scheduler, with the rows of its replica."""
        found = [(scheduler, list[ScheduledRow]()) for scheduler in self._each]
        for row in rows:
            found[row.sequence.replica][1].append(row)
        return found

    @property
    def running(self) -> Sequence[SequenceState]:
        """By replica, then by rank."""
        return [sequence for each in self._each for sequence in each.running]

    @property
    def num_waiting(self) -> int:
        return sum(each.num_waiting for each in self._each)

    @property
    def num_running(self) -> int:
        return sum(each.num_running for each in self._each)

    @property
    def num_paused(self) -> int:
        return sum(each.num_paused for each in self._each)

    @property
    def has_work(self) -> bool:
        """True while a replica has work."""
        return any(each.has_work for each in self._each)

    @property
    def num_retractions(self) -> int:
        return sum(each.num_retractions for each in self._each)

    @property
    def draft_counts(self) -> DraftCounts:
        """Guesses of all replicas."""
        return DraftCounts.total(each.draft_counts for each in self._each)

    def prefix_metrics(self) -> Mapping[str, Any]:
        """What `EngineMetrics` has about the prefix caches, by field."""
        total = Counter[str]()
        for each in self._each:
            total.update(each.prefix_metrics())
        return total

    def reset_counts(self) -> None:
        """Begins all counts again."""
        for each in self._each:
            each.reset_counts()


AnyScheduler: TypeAlias = Scheduler | ReplicaScheduler


def schedule_replicas(
    stores: Sequence[CacheStore],
    prefixes: Sequence[PrefixCache],
    make: Callable[[CacheStore, PrefixCache | None], Scheduler],
) -> AnyScheduler:
    """Makes a scheduler for each store, with its prefix cache if there are some; that of a single one is enough."""
    each = [make(store, own) for store, own in zip_longest(stores, prefixes)]
    return each[0] if len(each) == 1 else ReplicaScheduler(each)
