"""A paused sequence holds nothing and is no work; resumed, it runs on from its old place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.request import Request, RowNeeds, Terms
from sightline.scheduler.sequence import SequenceState
from support.scheduling import Loop, make_sequence, make_store


def holds_nothing(sequence: SequenceState) -> bool:
    held = (sequence.table_row, sequence.prefix, sequence.num_pages, sequence.num_steps)
    return held == (None, None, 0, 0) and sequence.num_computed == sequence.num_scheduled == 0


def test_a_paused_row_gives_way_at_once_and_the_others_go_on() -> None:
    loop = Loop()
    paused, _ = loop.submit("a", 5, 4), loop.submit("b", 3, 6)
    loop.step()
    loop.scheduler.pause(paused)
    loop.scheduler.pause(paused)
    assert holds_nothing(paused)
    assert (loop.scheduler.num_paused, loop.scheduler.num_waiting, loop.scheduler.num_running) == (1, 0, 1)
    assert [loop.step() for _ in range(5)] == [{"b": 1}] * 5
    assert not loop.scheduler.has_work, "only a paused sequence is left"
    loop.assert_baseline()
    loop.scheduler.resume(paused)
    loop.scheduler.resume(paused)
    assert (loop.scheduler.num_paused, loop.scheduler.num_waiting) == (0, 1)
    assert [loop.step() for _ in range(4)] == [{"a": 6}, {"a": 1}, {"a": 1}, {}]
    assert loop.finished == ["b", "a"]
    loop.assert_baseline()


def test_a_sequence_that_waits_is_passed_over_while_it_is_paused() -> None:
    loop = Loop(make_store(max_rows=1))
    loop.submit("a", 3, 2)
    paused = loop.submit("b", 3, 2)
    loop.scheduler.pause(paused)
    loop.submit("c", 3, 2)
    loop.run_to_the_end(9)
    assert loop.finished == ["a", "c"]
    loop.scheduler.resume(paused)
    loop.run_to_the_end(9)
    assert loop.finished == ["a", "c", "b"]


def test_a_resumed_sequence_has_its_old_place_in_the_queue() -> None:
    loop = Loop(make_store(max_rows=1))
    first = loop.submit("a", 3, 9)
    loop.step()
    loop.scheduler.pause(first)
    for name in "bcd":
        loop.submit(name, 3, 2)
    loop.step()
    loop.scheduler.resume(first)
    loop.run_to_the_end(30)
    assert loop.finished == ["b", "a", "c", "d"]


def test_a_row_in_flight_is_left_out_of_the_next_step_and_parked_when_its_own_is_over() -> None:
    loop = Loop(depth=1)
    paused, _ = loop.submit("a", 5, 6), loop.submit("b", 3, 6)
    loop.step()
    loop.scheduler.pause(paused)
    assert paused.table_row is not None
    assert loop.scheduler.num_paused == 0
    assert loop.step() == {"b": 1}
    assert holds_nothing(paused), "the step that it was in is over"
    assert paused.num_generated == 1, "its token is kept"
    loop.scheduler.resume(paused)
    loop.run_to_the_end(20)
    assert sorted(loop.finished) == ["a", "b"]
    loop.assert_baseline()


def test_a_row_that_is_resumed_before_its_step_is_over_never_leaves() -> None:
    loop = Loop(depth=1)
    sequence = loop.submit("a", 5, 6)
    loop.step()
    row = sequence.table_row
    loop.scheduler.pause(sequence)
    loop.scheduler.resume(sequence)
    assert loop.step() == {"a": 1}
    assert sequence.table_row == row
    loop.run_to_the_end(20)
    loop.assert_baseline()


def test_the_pages_of_a_paused_row_stay_cached_until_others_need_them() -> None:
    loop = Loop(make_store(usable_pages=8), caches=True)
    paused = loop.submit("a", 14, 6)
    loop.step()
    loop.scheduler.pause(paused)
    assert loop.prefixes is not None
    assert loop.prefixes.num_evictable == loop.prefixes.num_pages == 3
    loop.scheduler.resume(paused)
    assert loop.step() == {"a": 3}, "twelve tokens are found"
    loop.scheduler.pause(paused)
    loop.submit("b", 28, 1, terms=Terms(caller="other"))
    loop.run_to_the_end(9)
    assert loop.finished == ["b"], "it needs every page but one"
    loop.scheduler.resume(paused)
    loop.run_to_the_end(9)
    loop.assert_baseline()


def test_a_paused_leader_keeps_nobody_waiting_for_its_prompt() -> None:
    loop = Loop(budget=4)
    leader = loop.submit("leader", 12, 2)
    follower = make_sequence("follower", 12, 2, index=1)
    follower.leader = leader
    loop.scheduler.submit(follower)
    assert loop.step() == {"leader": 4}
    loop.scheduler.pause(leader)
    loop.run_to_the_end(9)
    assert loop.finished == ["follower"]
    loop.scheduler.resume(leader)
    loop.run_to_the_end(9)
    loop.assert_baseline()


def test_a_whole_sequence_is_not_paused() -> None:
    loop = Loop()
    whole = SequenceState(Request("a", None, (1, 2, 3), RowNeeds(0, every_output=True, is_whole=True), Terms()))
    loop.scheduler.submit(whole)
    loop.scheduler.pause(whole)
    assert not whole.is_paused
    assert [row.sequence for row in loop.scheduler.schedule().rows] == [whole]


def test_what_is_removed_is_not_paused_and_what_is_paused_can_be_removed() -> None:
    loop = Loop()
    sequence = loop.submit("a", 3, 4)
    loop.step()
    loop.scheduler.pause(sequence)
    loop.remove(sequence)
    loop.remove(sequence)
    assert loop.scheduler.num_paused == 0
    loop.scheduler.pause(sequence)
    loop.scheduler.resume(sequence)
    assert not loop.scheduler.has_work
    loop.assert_baseline()


def test_a_lost_cache_drops_what_is_paused() -> None:
    loop = Loop()
    sequence = loop.submit("a", 3, 4)
    loop.scheduler.pause(sequence)
    loop.scheduler.drop_all()
    assert sequence.is_out
    assert loop.scheduler.num_paused == 0


def test_a_caller_pays_for_what_is_computed_again_and_gains_nothing_while_it_is_paused() -> None:
    loop = Loop()
    shares = loop.scheduler._shares
    slow = loop.submit("slow", 8, 20, terms=Terms(caller="slow"))
    loop.submit("fast", 8, 20, terms=Terms(caller="fast"))
    loop.step()
    assert shares.of("slow") == shares.of("fast") == 8
    loop.scheduler.pause(slow)
    for _ in range(10):
        loop.step()
    loop.scheduler.resume(slow)
    assert shares.of("slow") == shares.of("fast") == 18, "absence earns no credit"
    loop.step()
    assert shares.of("slow") == 18 + 9, "eight tokens again, and a new one"
    loop.run_to_the_end(60)
    loop.assert_baseline()


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["submit", "step", "step", "pause", "resume", "remove", "recount"]), st.integers(0, 7)),
    max_size=40,
)


@settings(max_examples=60)
@given(OPERATIONS, st.booleans(), st.integers(0, 1), st.sampled_from([9, 16, 64]))
def test_whoever_is_resumed_ends_once_and_whoever_is_parked_holds_nothing(
    operations: list[tuple[str, int]], caches: bool, depth: int, usable_pages: int
) -> None:
    loop = Loop(make_store(usable_pages=usable_pages, max_rows=3), caches=caches, depth=depth)
    sequences = [loop.submit(f"request{index}", 3 + 4 * index, 5) for index in range(3)]
    gone: set[str] = set()
    for operation, number in operations:
        sequence = sequences[number % len(sequences)]
        match operation:
            case "submit":
                caller = "one" if number % 2 else "other"
                sequences.append(loop.submit(f"request{len(sequences)}", 1 + 2 * number, 4, terms=Terms(caller=caller)))
            case "pause":
                loop.scheduler.pause(sequence)
            case "resume":
                loop.scheduler.resume(sequence)
            case "remove":
                if not sequence.is_out:
                    gone.add(sequence.request.request_id)
                loop.remove(sequence)
            case "recount":
                loop.scheduler.recount([row for rows in loop.flying for row in rows])
            case _:
                paused = {each.request.request_id for each in sequences if each.is_paused}
                assert not paused & loop.step().keys(), "a paused sequence runs"
        for each in sequences:
            if each.is_paused and not each.is_out and not each.num_steps:
                assert holds_nothing(each)
                assert each not in loop.scheduler.running
        loop.check_pages()
    for sequence in sequences:
        loop.scheduler.resume(sequence)
    loop.run_to_the_end(400)
    assert sorted([*loop.finished, *gone]) == sorted(each.request.request_id for each in sequences)
    loop.assert_baseline()
