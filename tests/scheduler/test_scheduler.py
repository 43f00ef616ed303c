"""Running rows never stall, prompts go in chunks, nobody starves, and pages never run out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.errors import SightlineError
from sightline.scheduler.sequence import Draft, DraftRoom, RowResult, ScheduledRow, SequenceState
from support.scheduling import PAGE_SIZE, Loop, make_sequence, make_store


def test_a_sequence_counts_what_is_computed_pending_and_generated() -> None:
    sequence = make_sequence("a", 5, 3)
    assert (sequence.num_pending, sequence.num_generated, sequence.max_len) == (5, 0, 7)
    sequence.num_computed = sequence.num_scheduled = 5
    sequence.tokens.append(9)
    sequence.num_expected = 6
    assert (sequence.num_pending, sequence.num_generated) == (1, 1)
    assert sequence.request.prompt_token_ids == (0, 1, 2, 3, 4), "the request's own prompt was changed"


def test_one_continuation_scores_the_prompt_until_its_last_token_but_one() -> None:
    sequence = make_sequence("a", 5, 3, scored=True)
    assert not make_sequence("a", 5, 3, scored=True, index=1).scores_prompt
    assert not make_sequence("a", 1, 3, scored=True).scores_prompt
    assert ScheduledRow(sequence, 1, 0, 3, completes=False, scores_prompt=True).num_logits == 3
    assert ScheduledRow(sequence, 1, 0, 3, completes=False, scores_prompt=False).num_logits == 0
    assert ScheduledRow(sequence, 1, 3, 2, completes=True, scores_prompt=False).num_logits == 1
    sequence.num_scheduled = 3
    assert sequence.scores_prompt
    sequence.num_scheduled = 4
    assert not sequence.scores_prompt


def test_scored_prompts_share_a_bound_and_leave_the_rest_of_the_step_to_others() -> None:
    loop = Loop(budget=16, scored=4)
    loop.submit("a", 6, 2, scored=True)
    loop.submit("b", 5, 2, scored=True)
    loop.submit("c", 7, 2)
    assert loop.step() == {"a": 4}, "the next in the queue waits for its turn, and so do those behind it"
    assert loop.step() == {"a": 2, "b": 2, "c": 7}
    assert loop.step() == {"a": 1, "c": 1, "b": 3}
    loop.run_to_the_end(10)
    loop.assert_baseline()


def test_a_short_prompt_is_computed_at_once_and_then_decodes() -> None:
    loop = Loop()
    loop.submit("a", 10, 3)
    assert [loop.step() for _ in range(4)] == [{"a": 10}, {"a": 1}, {"a": 1}, {}]
    assert loop.finished == ["a"]
    loop.assert_baseline()


def test_nothing_to_do_is_a_schedule_of_no_rows() -> None:
    assert Loop().step() == {}


def test_the_last_token_generated_needs_no_page() -> None:
    loop = Loop(make_store(usable_pages=2))
    loop.submit("a", 5, 4)
    loop.run_to_the_end(4)
    loop.assert_baseline()


def test_a_long_prompt_is_chunked_beside_decoding_rows() -> None:
    loop = Loop(budget=8)
    loop.submit("short", 2, 20)
    loop.submit("other", 3, 20)
    loop.step()
    loop.submit("long", 20, 2)
    steps = [loop.step() for _ in range(5)]
    assert steps == [
        {"short": 1, "other": 1, "long": 6},
        {"short": 1, "other": 1, "long": 6},
        {"short": 1, "other": 1, "long": 6},
        {"short": 1, "other": 1, "long": 2},
        {"short": 1, "other": 1, "long": 1},
    ]


def test_a_prompt_under_way_goes_before_a_new_one() -> None:
    loop = Loop(budget=8)
    loop.submit("first", 12, 2)
    loop.submit("second", 12, 2)
    assert [loop.step() for _ in range(4)] == [
        {"first": 8},
        {"first": 4, "second": 4},
        {"first": 1, "second": 7},
        {"second": 1},
    ]


def test_the_budget_is_filled_with_as_many_prompts_as_fit() -> None:
    loop = Loop(budget=10)
    for name in "abcd":
        loop.submit(name, 3, 5)
    assert loop.step() == {"a": 3, "b": 3, "c": 3, "d": 1}


def test_decoding_rows_go_first_even_where_they_fill_the_budget() -> None:
    loop = Loop(make_store(max_rows=4), budget=4)
    for name in "abc":
        loop.submit(name, 1, 9)
    loop.step()
    loop.submit("d", 6, 2)
    assert loop.step() == {"a": 1, "b": 1, "c": 1, "d": 1}
    loop.submit("e", 6, 2)
    assert loop.step() == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert loop.admitted == ["a", "b", "c", "d"]


def test_requests_are_admitted_in_the_order_of_arrival() -> None:
    loop = Loop(make_store(usable_pages=8, max_rows=2), budget=4)
    names = [f"request{index}" for index in range(7)]
    for index, name in enumerate(names):
        loop.submit(name, 1 + 5 * (index % 3), 1 + index % 4)
    loop.run_to_the_end(100)
    assert loop.admitted == names


def test_a_large_request_is_not_overtaken_by_small_ones_that_would_fit() -> None:
    loop = Loop(make_store(usable_pages=6), budget=16)
    running = loop.submit("running", 4, 9)
    loop.step()
    loop.submit("large", 16, 5)
    small = [loop.submit(f"small{index}", 1, 2) for index in range(3)]
    assert loop.step() == {"running": 1}, "a small request took the pages that the large one waits for"
    loop.remove(running)
    assert list(loop.step()) == ["large"]
    loop.remove(small[0])
    loop.run_to_the_end(30)
    assert loop.admitted == ["running", "large", "small1", "small2"]


@pytest.mark.parametrize(("usable_pages", "admitted"), [(4, ["a"]), (5, ["a", "b"])])
def test_a_request_is_admitted_with_pages_for_what_it_holds_and_one_for_each_that_runs(
    usable_pages: int, admitted: list[str]
) -> None:
    loop = Loop(make_store(usable_pages))
    loop.submit("a", 8, 5)
    loop.submit("b", 8, 5)
    assert list(loop.schedule()) == admitted
    assert loop.scheduler.num_waiting == 2 - len(admitted)
    loop.run_to_the_end(40)
    loop.assert_baseline()


def test_free_pages_are_reserved_for_what_runs_and_taken_back_for_what_comes() -> None:
    loop = Loop(make_store(6))
    first = loop.submit("a", 2, 23)
    loop.step()
    assert loop.store.num_free_pages == 0, "the whole of a's length is reserved"
    loop.submit("b", 2, 3)
    assert list(loop.step()) == ["a", "b"]
    assert first.table_row is not None
    assert loop.store.row_pages(first.table_row) == 1
    loop.run_to_the_end(60)
    loop.assert_baseline()


def test_the_last_to_arrive_gives_way_and_goes_on_where_it_was() -> None:
    loop = Loop(make_store(4))
    a = loop.submit("a", 3, 12)
    b = loop.submit("b", 3, 8)
    loop.step()
    loop.step()
    assert loop.scheduler.num_retractions == 0
    while not loop.scheduler.num_retractions:
        loop.step()
    assert (a.table_row is not None, b.table_row is None) == (True, True)
    generated = list(b.tokens)
    loop.submit("c", 1, 1)
    loop.run_to_the_end(60)
    assert b.tokens[: len(generated)] == generated
    assert loop.finished[0] == "a"
    assert (a.num_generated, b.num_generated) == (12, 8)
    loop.assert_baseline()


def test_a_retracted_sequence_finds_what_it_left_in_the_cache() -> None:
    loop = Loop(make_store(5), caches=True)
    loop.submit("a", 3, 14)
    b = loop.submit("b", 9, 6)
    while not loop.scheduler.num_retractions:
        loop.step()
    while loop.scheduler.num_waiting:
        loop.schedule()
        if loop.scheduler.num_waiting:
            loop.step()
    assert b.num_computed > 0, "of its pages, those that nobody needed were in the cache"
    assert b.num_cached == 0, "what it left itself is not counted as another's"
    loop.run_to_the_end(60)
    loop.check_pages()


def test_the_fullest_pool_decides_about_admission() -> None:
    loop = Loop(make_store(6))
    loop.store.pools[1].allocator.allocate(4)
    loop.submit("a", 8, 1)
    loop.submit("b", 1, 1)
    admitted = [row.sequence.request.request_id for row in loop.scheduler.schedule().rows]
    assert admitted == ["a"], "b's page is not there in the second pool"


def test_a_request_waits_for_a_free_row() -> None:
    loop = Loop(make_store(max_rows=2))
    for name in "abc":
        loop.submit(name, 3, 2)
    assert list(loop.step()) == ["a", "b"]
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 1)
    assert list(loop.step()) == ["a", "b"]
    assert list(loop.step()) == ["c"]


def test_scheduling_twice_without_a_commit_gives_the_same_rows() -> None:
    loop = Loop(budget=8)
    loop.submit("a", 6, 3)
    loop.submit("b", 6, 3)
    first = loop.schedule()
    free = loop.store.num_free_pages
    assert loop.schedule() == first == {"a": 6, "b": 2}
    assert loop.store.num_free_pages == free


def test_a_row_that_completes_is_committed_with_its_token_and_others_without() -> None:
    loop = Loop()
    loop.submit("a", 6, 3)
    (row,) = loop.scheduler.schedule().rows
    with pytest.raises(ValueError, match="expected tokens exactly where a row completes"):
        loop.scheduler.commit(row, RowResult(row.seq_len))
    loop.store.lengths.advance(row.table_row, row.seq_len)
    loop.scheduler.launched([row])
    for _ in range(2):
        loop.scheduler.commit(row, RowResult(row.seq_len, (7,)))
    loop.scheduler.landed([row])
    assert (row.sequence.tokens[5:], row.sequence.num_pending) == ([5, 7], 1), "committed twice is committed once"
    loop = Loop()
    loop.submit("long", 30, 3)
    (row,) = loop.scheduler.schedule().rows
    assert not row.completes
    with pytest.raises(ValueError, match="expected tokens exactly where a row completes"):
        loop.scheduler.commit(row, RowResult(row.seq_len, (7,)))


def test_a_row_goes_on_from_the_length_that_was_accepted() -> None:
    loop = Loop()
    sequence = loop.submit("a", 6, 9)
    (row,) = loop.scheduler.schedule().rows
    loop.store.lengths.advance(row.table_row, row.seq_len)
    loop.scheduler.launched([row])
    for wrong in (0, 7):
        with pytest.raises(ValueError, match="expected an accepted length of 6, or a shorter one above 0"):
            loop.scheduler.commit(row, RowResult(wrong, (7,)))
    # As if the last two of its tokens were drafts, and the second was not accepted.
    drafted = replace(row, drafts=(4, 5))
    with pytest.raises(ValueError, match="expected an accepted length that ends before the last of 1 tokens behind 4"):
        loop.scheduler.commit(drafted, RowResult(5, (4,)))
    loop.scheduler.commit(drafted, RowResult(5, (4, 8)))
    loop.scheduler.landed([row])
    assert (sequence.tokens, sequence.num_computed) == ([0, 1, 2, 3, 4, 8], 5)
    (row,) = loop.scheduler.schedule().rows
    assert (row.context_len, row.num_tokens, row.completes) == (5, 1, True)
    loop.store.lengths.advance(row.table_row, row.seq_len)


def test_a_shorter_length_is_not_accepted_while_a_step_follows_that_read_the_rest() -> None:
    loop = Loop()
    sequence = loop.submit("a", 6, 9)
    for _ in range(2):
        (row,) = loop.scheduler.schedule().rows
        loop.store.lengths.advance(row.table_row, row.seq_len)
        loop.scheduler.launched([row])
        if row.context_len == 0:
            first = row
    with pytest.raises(ValueError, match="if no step follows, got 5"):
        loop.scheduler.commit(first, RowResult(5, (7,)))
    assert sequence.num_computed == 0


def test_a_waiting_request_is_removed_from_the_queue() -> None:
    loop = Loop(make_store(max_rows=1))
    loop.submit("a", 3, 2)
    waiting = loop.submit("b", 3, 2)
    loop.submit("c", 3, 2)
    loop.step()
    loop.remove(waiting)
    loop.run_to_the_end(10)
    assert loop.finished == ["a", "c"]
    loop.assert_baseline()


@pytest.mark.parametrize(("steps", "phase"), [(1, "prefilling"), (2, "prefilling"), (3, "decoding"), (5, "decoding")])
def test_a_running_request_is_removed_with_its_row_and_pages(steps: int, phase: str) -> None:
    loop = Loop(budget=8)
    sequence = loop.submit("a", 20, 9)
    for _ in range(steps):
        loop.step()
    assert ("decoding" if sequence.num_generated else "prefilling") == phase
    assert loop.store.num_free_pages < loop.store.num_usable_pages
    loop.remove(sequence)
    assert sequence.table_row is None
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (0, 0)
    loop.assert_baseline()
    assert loop.step() == {}


def test_a_request_is_removed_between_schedule_and_commit() -> None:
    loop = Loop(budget=8)
    sequence = loop.submit("a", 6, 3)
    loop.schedule()
    loop.remove(sequence)
    loop.assert_baseline()


def test_removing_a_request_again_changes_nothing() -> None:
    loop = Loop()
    sequence, other = loop.submit("a", 6, 3), loop.submit("b", 6, 3)
    loop.step()
    loop.remove(sequence)
    free = loop.store.num_free_pages
    loop.remove(sequence)
    assert loop.store.num_free_pages == free
    assert other.table_row is not None


def test_removing_one_of_two_equal_requests_leaves_the_other() -> None:
    loop = Loop()
    first, second = loop.submit("same", 3, 2), loop.submit("same", 3, 2)
    loop.remove(second)
    loop.scheduler.schedule()
    assert (first.table_row is None, second.table_row is None) == (False, True)


def test_a_request_that_can_never_fit_is_refused_when_it_is_submitted() -> None:
    loop = Loop(make_store(usable_pages=4))
    with pytest.raises((ValueError, SightlineError), match="page"):
        loop.submit("too large", 10, 8)


workloads = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 8), st.integers(0, 4)),
    min_size=1,
    max_size=10,
)
"""(prompt length, tokens to generate, steps before it arrives)."""


def longest(workload: Sequence[tuple[int, int, int]]) -> int:
    return max(prompt_len + max_tokens - 1 for prompt_len, max_tokens, _ in workload)


@settings(max_examples=60, deadline=None)
@given(
    workload=workloads,
    spare_pages=st.integers(0, 4),
    max_rows=st.integers(1, 4),
    spare_budget=st.integers(0, 6),
    cancelled=st.sets(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=4),
    caches=st.booleans(),
    depth=st.integers(0, 1),
)
def test_every_workload_finishes_in_a_tiny_pool_and_leaves_nothing_behind(
    workload: list[tuple[int, int, int]],
    spare_pages: int,
    max_rows: int,
    spare_budget: int,
    cancelled: set[tuple[int, int]],
    caches: bool,
    depth: int,
) -> None:
    usable = -(-longest(workload) // PAGE_SIZE) + spare_pages
    loop = Loop(make_store(usable, max_rows, longest(workload)), max_rows + spare_budget, caches=caches, depth=depth)
    arriving = [(str(index), *request) for index, request in enumerate(workload)]
    sequences: dict[str, SequenceState] = {}
    gone: set[str] = set()
    bound = sum(prompt_len + max_tokens for prompt_len, max_tokens, _ in workload) * 4 + 30
    for step in range(bound):
        for name, prompt_len, max_tokens, delay in arriving:
            if delay == step:
                sequences[name] = loop.submit(name, prompt_len, max_tokens)
        for index, when in cancelled:
            name = str(index)
            if when == step and name in sequences and name not in (*loop.finished, *gone):
                loop.remove(sequences[name])
                gone.add(name)
        before, under_way = loop.scheduler.num_waiting + loop.scheduler.num_running, len(loop.flying)
        retractions = loop.scheduler.num_retractions
        has_rows = bool(loop.step())
        # A step has no row where everybody is in flight, or the only one that runs gives way to its own copies.
        excused = under_way or loop.scheduler.num_retractions > retractions
        assert has_rows == bool(before) or excused, "there is work and the step has no row"
    assert sorted([*loop.finished, *gone]) == sorted(name for name, *_ in arriving)
    for name in loop.finished:
        assert sequences[name].num_generated == sequences[name].request.needs.max_new_tokens
        assert sequences[name].num_computed == sequences[name].max_len
    loop.assert_baseline()


def test_a_prompt_is_scored_once_although_its_row_gives_way() -> None:
    """Its own pages are copies of cached ones, and both do not fit: admitted again, it shares the cached ones."""
    loop = Loop(make_store(34), caches=True)
    loop.submit("cached", 60, 1)
    loop.run_to_the_end(20)
    sequence = loop.submit("scored", 60, 60, scored=True)
    # 60 tokens at 8 a step, 60 at one a step, and a step in which it gives way.
    for _ in range(7 + 60 + 2):
        loop.step()
    assert loop.finished == ["cached", "scored"]
    assert sequence.num_retractions == 1
    loop.assert_baseline()


class Counting:
    """Guesses what it was told to, and counts what it hears of it."""

    max_step_tokens = 64

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.heard: list[tuple[int, int]] = []

    def propose(self, rooms: Sequence[DraftRoom], most: int) -> Sequence[Draft]:
        return [self.draft] * len(rooms)

    def observe(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        self.heard.append((num_drafted, num_accepted))

    def forget(self, sequence: SequenceState) -> None:
        """Keeps nothing."""


@pytest.mark.parametrize(
    ("draft", "path", "longest"),
    [(Draft((4, 5)), None, 2), (Draft((8, 4, 6, 5), (-1, -1, 0, 1)), (1, 3), 2), (Draft((4, 9), (-1, 0)), (0,), 2)],
    ids=["chain", "tree", "half a path"],
)
def test_a_commit_that_is_repeated_counts_a_draft_once(
    draft: Draft, path: tuple[int, ...] | None, longest: int
) -> None:
    store, drafts = make_store(), Counting(draft)
    loop = Loop(store, drafts=drafts)
    sequence = loop.submit("a", 6, 9)
    loop.step()
    (row,) = loop.scheduler.schedule().rows
    assert (row.num_tokens, row.drafts, row.parents) == (1 + len(draft.tokens), draft.tokens, draft.parents)
    # Candidates of a tree are not launched: which of them follow the context is not known.
    store.lengths.advance(row.table_row, row.context_len if row.parents else row.seq_len)
    loop.scheduler.launched([row])
    right = (4, 5) if path is None else tuple(draft.tokens[guess] for guess in path)
    result = RowResult(row.context_len + 1 + len(right), (*right, 3), path)
    for _ in range(3):
        loop.scheduler.commit(row, result)
    scheduler = loop.scheduler
    assert drafts.heard == [(longest, len(right))]
    assert (scheduler.draft_counts.num_drafts, scheduler.draft_counts.num_drafted_tokens) == (1, len(draft.tokens))
    assert scheduler.draft_counts.num_accepted_tokens == len(right)
    assert sequence.tokens[-len(right) - 1 :] == [*right, 3]
    scheduler.landed([row])
    assert store.lengths.launched(row.table_row) == store.lengths.committed(row.table_row) == result.seq_len


def test_a_tree_is_committed_with_its_path_alone() -> None:
    store = make_store()
    loop = Loop(store, drafts=Counting(Draft((8, 4), (-1, -1))))
    loop.submit("a", 6, 9)
    loop.step()
    (row,) = loop.scheduler.schedule().rows
    loop.scheduler.launched([row])
    for path, tokens in ((None, (4, 3)), ((0,), (4, 3)), ((0, 1), (8, 4, 3))):
        with pytest.raises(ValueError, match=r"expected (a|the accepted) path"):
            loop.scheduler.commit(row, RowResult(row.context_len + len(tokens), tokens, path))
