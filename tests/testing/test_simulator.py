"""Traffic by seed finds nothing wrong with the engine, and finds what is wrong with a broken one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sightline.cache.pools import CacheStore
from sightline.cache.prefix import PrefixCache, PrefixNode
from sightline.cache.table import PageTable
from sightline.core.errors import SightlineError
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import ScheduledRow, SequenceState
from sightline.testing.simulator.simulation import Violation, simulate

SEEDS = 40


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_traffic_breaks_nothing(first: int) -> None:
    played = [simulate(seed, num_steps=120) for seed in range(first, first + 10)]
    assert sum(simulation.num_finished for simulation in played) > 100
    assert sum(simulation.engine.num_retractions for simulation in played) > 10


def test_a_seed_repeats_exactly() -> None:
    first, second = simulate(7, 150), simulate(7, 150)
    assert (first.num_steps, first.num_finished, first.engine.num_retractions) == (
        second.num_steps,
        second.num_finished,
        second.engine.num_retractions,
    )


def leak_a_page(patch: pytest.MonkeyPatch) -> None:
    """A row that is closed keeps its last page."""
    clear = PageTable.clear
    patch.setattr(PageTable, "clear", lambda table, row: clear(table, row)[:-1])


def evict_what_is_locked(patch: pytest.MonkeyPatch) -> None:
    def can_go(cache: PrefixCache, node: PrefixNode) -> bool:
        attached = node.parent is not None and node.parent.children.get(node.key) is node
        return attached and not node.children

    patch.setattr(PrefixCache, "_can_go", can_go)


def mix_up_namespaces(patch: pytest.MonkeyPatch) -> None:
    """All callers look into one tree."""
    root = PrefixCache._root
    patch.setattr(PrefixCache, "_root", lambda cache, namespace: root(cache, ""))


def publish_a_page_too_many(patch: pytest.MonkeyPatch) -> None:
    """The tail that is not full yet is shared too, and then written by its owner."""

    def publish(scheduler: Scheduler, sequence: SequenceState) -> None:
        prefixes, store = scheduler._prefixes, scheduler._store
        if prefixes is None or sequence.prefix is None or sequence.table_row is None:
            return
        size = store.limits.page_size
        while (sequence.num_prefix_pages + 1) * size <= len(sequence.tokens):
            index = sequence.num_prefix_pages
            tokens = sequence.tokens[index * size : (index + 1) * size]
            sequence.prefix = prefixes.extend(sequence.prefix, tokens, store.bundle(sequence.table_row, index))
            sequence.num_prefix_pages += 1

    patch.setattr(Scheduler, "_publish", publish)


def chunk_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A chunk that does not end its prompt counts as one token longer."""
    commit = Scheduler.commit

    def miscounted(scheduler: Scheduler, row: ScheduledRow, token: int | None) -> None:
        commit(scheduler, row, token)
        if token is None:
            row.sequence.num_computed += 1

    patch.setattr(Scheduler, "commit", miscounted)


def keep_pages_of_a_retracted_row(patch: pytest.MonkeyPatch) -> None:
    """What was computed is still counted, though the pages are gone."""
    retract = Scheduler._retract

    def forgetful(scheduler: Scheduler, sequence: SequenceState) -> None:
        computed = sequence.num_computed
        retract(scheduler, sequence)
        sequence.num_computed = computed

    def admit(scheduler: Scheduler, sequence: SequenceState) -> bool:
        computed = sequence.num_computed
        admitted = original(scheduler, sequence)
        if admitted and computed:
            sequence.num_computed = max(computed, sequence.num_computed)
        return admitted

    original = Scheduler._admit
    patch.setattr(Scheduler, "_retract", forgetful)
    patch.setattr(Scheduler, "_admit", admit)


def release_twice(patch: pytest.MonkeyPatch) -> None:
    """An evicted bundle is given back once too often."""
    release = CacheStore.release

    def twice(store: CacheStore, bundle: tuple[int, ...]) -> None:
        release(store, bundle)
        release(store, bundle)

    patch.setattr(CacheStore, "release", twice)


def lose_a_cancel(patch: pytest.MonkeyPatch) -> None:
    """Of what is removed while it waits, the queue keeps the entry."""
    remove = Scheduler.remove

    def lossy(scheduler: Scheduler, sequence: SequenceState) -> None:
        waiting = sequence in scheduler._waiting
        remove(scheduler, sequence)
        if waiting:
            scheduler._waiting.append(sequence)

    patch.setattr(Scheduler, "remove", lossy)


def trim_too_much(patch: pytest.MonkeyPatch) -> None:
    """A page that is in use is taken back with those that are not."""
    trim = CacheStore.trim_row
    patch.setattr(CacheStore, "trim_row", lambda store, row, tokens: trim(store, row, max(0, tokens - 9)))


def adopt_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """Shared pages are put into the table in the wrong order."""
    adopt = CacheStore.adopt
    patch.setattr(CacheStore, "adopt", lambda store, row, bundles: adopt(store, row, bundles[::-1]))


BUGS = (
    leak_a_page,
    evict_what_is_locked,
    mix_up_namespaces,
    publish_a_page_too_many,
    chunk_off_by_one,
    keep_pages_of_a_retracted_row,
    release_twice,
    lose_a_cancel,
    trim_too_much,
    adopt_in_reverse,
)


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_within_two_thousand_steps(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    num_steps = 0
    for seed in range(40):
        try:
            num_steps += simulate(seed, 100).num_steps
        except (Violation, SightlineError, ValueError, AssertionError, KeyError, IndexError):
            break
    else:
        pytest.fail("not found")
    assert num_steps <= 2000
