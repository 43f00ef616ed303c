"""Bugs planted in the engine, each of which the simulator finds within 2,000 steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sightline.attention.planner import PlannedBatch, Planner, StepPlan
from sightline.cache.pools import Bundle, Pool
from sightline.cache.prefix import PrefixCache, PrefixMatch, PrefixNode
from sightline.cache.store import CacheStore
from sightline.cache.table import PageTable
from sightline.core.batch import Batch
from sightline.engine.deadlines import Deadlines
from sightline.engine.engine import Engine
from sightline.engine.launch import Launch, LaunchedStep, RowFailure, StepLauncher, UnreadTokens, unread_tokens
from sightline.engine.live import LiveSequence
from sightline.engine.sampled import Sampled, SampledTokens
from sightline.scheduler.costs import StepLimit
from sightline.scheduler.decision import WaitingSequence
from sightline.scheduler.queue import WaitingQueue
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState
from sightline.scheduler.supply import Supply
from sightline.testing.simulator.scenario import Scenario
from sightline.testing.simulator.simulation import Simulation, Violation, play
from sightline.testing.simulator.workload import draw_scenario
from support.pause_bugs import (
    keep_the_lock_of_a_paused_row,
    leak_the_pages_of_a_paused_row,
    never_resume_a_paused_row,
    park_a_row_in_flight,
    pause_nothing,
    resume_from_where_it_was,
)
from support.row_bugs import (
    let_a_caller_keep_all_rows,
    let_a_caller_keep_all_rows_but_one,
    take_rows_from_callers_that_have_as_few,
    take_the_only_row_of_a_caller,
)


def leak_a_page(patch: pytest.MonkeyPatch) -> None:
    """A row that is closed keeps its last page."""
    clear = PageTable.clear
    patch.setattr(PageTable, "clear", lambda table, row: clear(table, row)[:-1])


def free_twice(patch: pytest.MonkeyPatch) -> None:
    """An evicted bundle is given back once too often."""
    release = CacheStore.release

    def twice(store: CacheStore, bundle: Bundle, owner: object) -> None:
        release(store, bundle, owner)
        for pool, page in zip(store.pools, bundle.pages, strict=True):
            pool.release([page])

    patch.setattr(CacheStore, "release", twice)


def evict_what_is_locked(patch: pytest.MonkeyPatch) -> None:
    def can_go(cache: PrefixCache, node: PrefixNode) -> bool:
        attached = node.parent is not None and node.parent.children.get(node.key) is node
        return attached and not node.children

    patch.setattr(PrefixCache, "_can_go", can_go)


def leave_the_page_table_stale(patch: pytest.MonkeyPatch) -> None:
    """Pages that a row gives back stay in the device's table."""
    trim = PageTable.trim

    def forgetful(table: PageTable, row: int, num_pages: int) -> tuple[int, ...]:
        before = table.pages[row].clone()
        pages = trim(table, row, num_pages)
        table.pages[row] = before
        return pages

    patch.setattr(PageTable, "trim", forgetful)


def write_to_a_shared_tail(patch: pytest.MonkeyPatch) -> None:
    """The last page, not whole yet, goes into the prefix cache too and is then written by its owner."""
    publish = Supply.publish

    def too_much(supply: Supply, sequence: SequenceState) -> None:
        computed = sequence.num_computed
        sequence.num_computed = len(sequence.tokens)
        publish(supply, sequence)
        sequence.num_computed = computed

    patch.setattr(Supply, "publish", too_much)
    # What the store has committed would limit it otherwise.
    patch.setattr(Supply, "_num_shared", lambda _, sequence: sequence.num_computed)


def reuse_a_row_as_it_was(patch: pytest.MonkeyPatch) -> None:
    """A row that is closed gives its pages back and still names them."""
    patch.setattr(Pool, "clear", lambda pool, row: pool.release(pool.table.owned(row)))


def restart_where_it_was(patch: pytest.MonkeyPatch) -> None:
    """Who was retracted, and finds nothing, goes on as if its entries were still there."""
    open_row = Supply.open

    def remembering(supply: Supply, sequence: SequenceState, *rest: object) -> None:
        computed = sequence.num_computed
        open_row(supply, sequence, *rest)  # type: ignore[arg-type]
        if sequence.num_retractions:
            sequence.num_computed = sequence.num_scheduled = max(computed, len(sequence.tokens) - 1)

    patch.setattr(Supply, "open", remembering)


def lose_a_cancel(patch: pytest.MonkeyPatch) -> None:
    """What is cancelled while a step is in flight goes on."""
    cancel = Engine.cancel

    def lossy(engine: Engine, request_id: str) -> None:
        if not engine.in_flight:
            cancel(engine, request_id)

    patch.setattr(Engine, "cancel", lossy)


def keep_what_was_cancelled_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    remove = Scheduler.remove

    def lossy(scheduler: Scheduler, sequence: SequenceState) -> None:
        waiting = not sequence.is_out and sequence in list(scheduler._waiting)
        remove(scheduler, sequence)
        if waiting:
            scheduler._waiting.add(sequence)

    patch.setattr(Scheduler, "remove", lossy)


def keep_a_plan_across_a_retraction(patch: pytest.MonkeyPatch) -> None:
    """A plan serves every later batch of the same rows and lengths, whatever became of their pages."""
    plan, kept = Planner.plan, dict[object, StepPlan]()

    def keeping(planner: Planner, batch: Batch) -> PlannedBatch:
        key = (id(planner), batch.rows, batch.query_lens.host, batch.context_lens.host)
        fresh = plan(planner, batch)
        old = kept.setdefault(key, fresh.plan)
        return PlannedBatch(batch, replace(fresh.plan, groups=old.groups))

    patch.setattr(Planner, "plan", keeping)
    patch.setattr(Planner, "ensure", lambda planner, work: work)


def mix_up_namespaces(patch: pytest.MonkeyPatch) -> None:
    """All callers look into one tree."""
    find, lock = PrefixCache.find, PrefixCache.lock

    def find_anywhere(cache: PrefixCache, namespace: str, tokens: Sequence[int]) -> PrefixMatch:
        return find(cache, "", tokens)

    def lock_anywhere(cache: PrefixCache, namespace: str, match: PrefixMatch) -> PrefixNode:
        return lock(cache, "", match)

    patch.setattr(PrefixCache, "find", find_anywhere)
    patch.setattr(PrefixCache, "lock", lock_anywhere)


def chunk_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A chunk that does not end its prompt counts as one token longer."""
    commit = Scheduler.commit

    def miscounted(scheduler: Scheduler, row: ScheduledRow, result: RowResult) -> None:
        commit(scheduler, row, result)
        if not result.tokens:
            row.sequence.num_computed += 1

    patch.setattr(Scheduler, "commit", miscounted)


def free_pages_at_the_cancel(patch: pytest.MonkeyPatch) -> None:
    """Not when the last step that was launched with them is over."""
    remove = Scheduler.remove

    def hasty(scheduler: Scheduler, sequence: SequenceState) -> None:
        remove(scheduler, sequence)
        scheduler._supply.release(sequence)

    patch.setattr(Scheduler, "remove", hasty)


def ignore_deadlines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "_end_late", lambda engine: None)


def look_at_deadlines_before_a_launch_only(patch: pytest.MonkeyPatch) -> None:
    commit = Engine._commit

    def careless(engine: Engine, step: LaunchedStep[LiveSequence]) -> None:
        kept, engine._deadlines = engine._deadlines, Deadlines()
        commit(engine, step)
        engine._deadlines = kept

    patch.setattr(Engine, "_commit", careless)


def fail_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    """A step that raises fails all its rows."""

    def fail_all(
        launcher: StepLauncher[LiveSequence], rows: object, lives: Sequence[LiveSequence], in_flight: object
    ) -> Launch[LiveSequence]:
        return Launch((), tuple(RowFailure(live, RuntimeError("the step raised")) for live in lives))

    patch.setattr(StepLauncher, "_launch_parts", fail_all)


def share_the_tail_of_a_fork(patch: pytest.MonkeyPatch) -> None:
    """The page that would be copied is shared, and written by both."""

    def share(store: CacheStore, source: int, target: int, index: int, num_entries: int) -> None:
        for pool in store.pools:
            page, spare = pool.table.page(source, index), pool.table.page(target, index)
            pool.allocator.share([page])
            pool.release([spare])
            pool.table._owned[target][index] = page
            pool.table.pages[target, index] = page

    patch.setattr(CacheStore, "copy_page", share)


def give_a_token_to_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
    """Of the tokens that a step in flight chooses, each row goes on with its neighbour's."""

    def rotated(in_flight: Sequence[LaunchedStep[LiveSequence]]) -> UnreadTokens:
        places, tokens = unread_tokens(in_flight)
        return UnreadTokens(places, None if tokens is None else tokens.roll(1))

    patch.setattr("sightline.engine.launch.unread_tokens", rotated)


def forget_priorities(patch: pytest.MonkeyPatch) -> None:
    """All wait in the same line."""

    lines = WaitingQueue.lines

    def by_arrival(queue: WaitingQueue, depth: int) -> Mapping[int, Mapping[str, Sequence[WaitingSequence]]]:
        all_lines: dict[str, list[WaitingSequence]] = {}
        for callers in lines(queue, depth).values():
            for caller, line in callers.items():
                merged = [*all_lines.get(caller, ()), *line]
                all_lines[caller] = sorted(merged, key=lambda each: each.arrival)
        return {0: all_lines}

    patch.setattr(WaitingQueue, "lines", by_arrival)


def trim_too_much(patch: pytest.MonkeyPatch) -> None:
    """A page that is in use is taken back with those that are not."""
    trim = CacheStore.trim_row
    patch.setattr(CacheStore, "trim_row", lambda store, row, tokens: trim(store, row, max(0, tokens - 9)))


def adopt_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """Shared pages are put into the table in the wrong order."""
    adopt = CacheStore.adopt
    patch.setattr(CacheStore, "adopt", lambda store, row, bundles: adopt(store, row, bundles[::-1]))


def copy_a_page_short(patch: pytest.MonkeyPatch) -> None:
    """Of the tail of a fork, one entry is left out."""
    copy = Pool.copy_page
    patch.setattr(Pool, "copy_page", lambda pool, source, target, count: copy(pool, source, target, count - 1))


def take_what_is_no_number(patch: pytest.MonkeyPatch) -> None:
    """A row of NaN gives a token like any other."""

    read = Sampled.read

    def credulous(step: Sampled) -> SampledTokens:
        choices = read(step)
        return choices._replace(finite=[True] * len(choices.finite))

    patch.setattr(Sampled, "read", credulous)


def refuse_too_early(patch: pytest.MonkeyPatch) -> None:
    can_queue = Engine.can_queue
    patch.setattr(Engine, "can_queue", lambda engine, count: can_queue(engine, count + 1))


def grow_one_pool_only(patch: pytest.MonkeyPatch) -> None:
    """What was refused in one pool stays taken in the other."""
    grow = CacheStore.grow_row

    def halfway(store: CacheStore, row: int, num_tokens: int) -> None:
        had = [pool.table.num_owned(row) for pool in store.pools]
        grow(store, row, num_tokens)
        if num_tokens % 5 == 0:
            store.pools[1].release(store.pools[1].table.trim(row, had[1]))

    patch.setattr(CacheStore, "grow_row", halfway)


def ignore_the_time_of_scored_prompts(patch: pytest.MonkeyPatch) -> None:
    """The logits of every token of a prompt seem to take no time."""
    take = StepLimit.take

    def careless(limit: StepLimit, count: int, context_len: int, *, scored: bool) -> tuple[int, StepLimit]:
        return take(limit, count, context_len, scored=False)

    patch.setattr(StepLimit, "take", careless)


def ignore_the_time_of_steps(patch: pytest.MonkeyPatch) -> None:
    """Prompts take all tokens of a step, whoever waits."""
    patch.setattr("sightline.scheduler.policy.generates", lambda running: False)


BUGS = (
    leak_a_page,
    free_twice,
    evict_what_is_locked,
    leave_the_page_table_stale,
    write_to_a_shared_tail,
    reuse_a_row_as_it_was,
    restart_where_it_was,
    lose_a_cancel,
    keep_what_was_cancelled_in_the_queue,
    keep_a_plan_across_a_retraction,
    mix_up_namespaces,
    chunk_off_by_one,
    free_pages_at_the_cancel,
    ignore_deadlines,
    look_at_deadlines_before_a_launch_only,
    fail_the_neighbours,
    share_the_tail_of_a_fork,
    give_a_token_to_the_wrong_row,
    forget_priorities,
    trim_too_much,
    adopt_in_reverse,
    copy_a_page_short,
    take_what_is_no_number,
    refuse_too_early,
    grow_one_pool_only,
    let_a_caller_keep_all_rows,
    let_a_caller_keep_all_rows_but_one,
    take_the_only_row_of_a_caller,
    take_rows_from_callers_that_have_as_few,
    never_resume_a_paused_row,
    leak_the_pages_of_a_paused_row,
    keep_the_lock_of_a_paused_row,
    park_a_row_in_flight,
    pause_nothing,
    resume_from_where_it_was,
)


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_within_two_thousand_steps(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    num_steps = 0
    for seed in range(100):
        simulation = Simulation(draw_scenario(seed, 100))
        try:
            simulation.run()
        except Violation:
            break
        finally:
            num_steps += simulation.counts.steps
    else:
        pytest.fail("not found")
    assert num_steps <= 2000


@pytest.mark.parametrize(
    "plant", [ignore_the_time_of_scored_prompts, ignore_the_time_of_steps], ids=lambda plant: plant.__name__
)
def test_a_bug_in_the_limit_of_time_is_found_by_a_script(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).parent / "scripts" / "a_scored_prompt_beside_rows_that_generate.json"
    scenario = Scenario.from_json(script.read_text())
    assert play(scenario) is None
    plant(monkeypatch)
    violation = play(scenario)
    assert violation is not None
    assert "a step with rows that generate costs" in str(violation)
