"""Who waits comes up by priority, then by what their callers have had, then by arrival."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from sightline.core.request import EffectiveParams, Request, Terms
from sightline.scheduler.queue import WaitingQueue
from sightline.scheduler.sequence import SequenceState
from sightline.scheduler.turns import QueuePosition, in_turn, usage_after


def make(arrival: int, caller: str, priority: int, length: int) -> SequenceState:
    params = EffectiveParams(0.0, 1.0, 0, 0.0, 0, 4, frozenset(), True)
    sequence = SequenceState(Request(str(arrival), None, (1,) * length, params.needs, Terms(caller, priority)))
    sequence.arrival, sequence.rank = arrival, (priority, arrival)
    return sequence


def turns_of(queue: WaitingQueue, had: Mapping[str, int], held: str) -> list[tuple[QueuePosition, int]]:
    """When it is the turn of whom, where each of the callers `held` has a row."""
    turns = []
    for priority, lines in sorted(queue.lines(99).items()):
        entries = in_turn(priority, lines, had, dict.fromkeys(held, 1))
        turns += [(turn, sequence.arrival) for turn, sequence in entries]
        had = usage_after(had, lines)
    return turns


def order(queue: WaitingQueue, had: Mapping[str, int], held: str = "abc") -> list[int]:
    """Arrivals of those that come up, where each of the callers `held` has a row."""
    return [arrival for _, arrival in turns_of(queue, had, held)]


def test_each_that_is_passed_counts_as_its_callers() -> None:
    queue = WaitingQueue()
    for arrival, caller, length in ((1, "a", 10), (2, "a", 10), (3, "a", 10), (4, "b", 4), (5, "b", 4), (6, "b", 4)):
        queue.add(make(arrival, caller, 0, length))
    assert order(queue, {"a": 0, "b": 0}) == [1, 4, 5, 2, 6, 3]
    assert order(queue, {"a": 100, "b": 0}) == [4, 1, 5, 2, 6, 3]


def test_callers_with_fewer_rows_come_first_of_their_priority_in_the_turn_of_the_first() -> None:
    queue = WaitingQueue()
    for arrival, caller, priority in ((1, "a", 0), (2, "a", 0), (3, "b", 0), (4, "b", 0), (5, "c", 0), (6, "b", 1)):
        queue.add(make(arrival, caller, priority, 10))
    had = {"a": 0, "b": 50, "c": 40}
    assert order(queue, had) == [1, 5, 3, 2, 4, 6]
    assert order(queue, had, "ac") == [3, 1, 5, 4, 2, 6]
    assert order(queue, had, "a") == [5, 3, 1, 4, 2, 6]
    turns = [turn for turn, _ in turns_of(queue, had, "a")]
    assert [turn.share for turn in turns] == [0, 0, 0, 10, 10, 70]
    assert turns == sorted(turns)
    assert queue.urgencies == {"a": 0, "b": 0, "c": 0}


def test_callers_with_fewer_rows_come_first() -> None:
    queue = WaitingQueue()
    for arrival, caller in enumerate("aabbbbbbcc", 1):
        queue.add(make(arrival, caller, 0, 10))
    lines = queue.lines(99)[0]
    turns = [each.arrival for _, each in in_turn(0, lines, {"a": 0, "b": 90, "c": 50}, {"a": 5, "b": 1, "c": 2})]
    assert turns == [3, 9, 4, 10, 5, 6, 1, 7, 2, 8]


def test_the_urgency_of_a_caller_is_that_of_its_most_urgent() -> None:
    queue = WaitingQueue()
    urgent, patient = make(1, "a", -1, 4), make(2, "a", 1, 4)
    queue.add(patient)
    queue.add(urgent)
    assert queue.urgencies == {"a": -1}
    assert queue.remove(urgent)
    assert queue.urgencies == {"a": 1}
    assert queue.remove(patient)
    assert queue.urgencies == {}
    assert queue.lines(9) == {}


def test_lines_list_no_more_than_asked_for_and_stay_as_they_were() -> None:
    queue = WaitingQueue()
    sequences = [make(arrival, "a", 0, 4) for arrival in (3, 1, 2)]
    for sequence in sequences:
        queue.add(sequence)
    lines = queue.lines(2)
    queue.remove(sequences[1])
    assert [sequence.arrival for sequence in lines[0]["a"]] == [1, 2]


def test_a_leader_is_busy_until_it_has_generated_or_is_out() -> None:
    queue, leader = WaitingQueue(), make(1, "a", 0, 4)
    followers = [SequenceState(leader.request, index, leader) for index in (1, 2)]
    for arrival, follower in enumerate(followers, 2):
        follower.arrival, follower.rank = arrival, (0, arrival)
        queue.add(follower)
    assert queue.busy_leaders() == {1: 2}
    leader.is_out = True
    assert queue.busy_leaders() == {}
    leader.is_out = False
    leader.tokens.append(7)
    assert queue.busy_leaders() == {}
    leader.tokens.pop()
    for follower in followers:
        queue.remove(follower)
    assert queue.busy_leaders() == {}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 9)), max_size=20),
    st.sampled_from(["", "a", "bc", "abc"]),
    st.data(),
)
def test_the_order_is_that_of_a_list_that_is_searched_each_time(
    entries: list[tuple[str, int, int]], held: str, data: st.DataObject
) -> None:
    queue = WaitingQueue()
    sequences = [make(arrival, *entry) for arrival, entry in enumerate(entries, 1)]
    for sequence in data.draw(st.permutations(sequences)):
        queue.add(sequence)
    for sequence in data.draw(st.lists(st.sampled_from(sequences), unique=True)) if sequences else []:
        assert queue.remove(sequence)
        assert not queue.remove(sequence), "it was taken out"
        sequences.remove(sequence)
    assert len(queue) == len(sequences)
    assert sorted(sequence.arrival for sequence in queue) == sorted(sequence.arrival for sequence in sequences)
    had = {"a": 3, "b": 0, "c": 7}
    tokens, left, expected = dict(had), list(sequences), []
    rows = {(caller, priority): int(caller in held) for caller in "abc" for priority in (-1, 0, 1)}
    while left:
        level = min(each.rank[0] for each in left)
        following = min(
            (each for each in left if each.rank[0] == level),
            key=lambda each: (rows[each.caller, each.rank[0]], tokens[each.caller], each.arrival),
        )
        rows[following.caller, level] += 1
        left.remove(following)
        expected.append(following.arrival)
        tokens[following.caller] += len(following.tokens)
    assert order(queue, had, held) == expected
    assert order(queue, had, held) == expected, "to look changes nothing"
