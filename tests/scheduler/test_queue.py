"""The queue gives out who waits by priority, then by what their callers have had, then by arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sightline.core.request import EffectiveParams, Request, Terms
from sightline.scheduler.queue import WaitingQueue
from sightline.scheduler.sequence import SequenceState


def make(arrival: int, caller: str, priority: int, length: int) -> SequenceState:
    params = EffectiveParams(0.0, 1.0, 0, 0.0, 0, 4, frozenset(), True)
    sequence = SequenceState(Request(str(arrival), None, (1,) * length, params.needs, Terms(caller, priority)))
    sequence.arrival, sequence.rank = arrival, (priority, arrival)
    return sequence


def in_turn(queue: WaitingQueue, had: dict[str, int], held: str = "abc") -> list[int]:
    """Arrivals of those that come up, where each of the callers `held` has a row."""
    return [sequence.arrival for _, sequence in queue.in_turn(had, dict.fromkeys(held, 1))]


def test_each_that_is_passed_counts_as_its_callers() -> None:
    queue = WaitingQueue()
    for arrival, caller, length in ((1, "a", 10), (2, "a", 10), (3, "a", 10), (4, "b", 4), (5, "b", 4), (6, "b", 4)):
        queue.add(make(arrival, caller, 0, length))
    assert in_turn(queue, {"a": 0, "b": 0}) == [1, 4, 5, 6, 2, 3]
    assert in_turn(queue, {"a": 100, "b": 0}) == [4, 5, 6, 1, 2, 3]


def test_callers_without_a_row_come_first_of_their_priority_each_with_one_in_the_turn_of_the_first() -> None:
    queue = WaitingQueue()
    for arrival, caller, priority in ((1, "a", 0), (2, "a", 0), (3, "b", 0), (4, "b", 0), (5, "c", 0), (6, "b", 1)):
        queue.add(make(arrival, caller, priority, 10))
    had = {"a": 0, "b": 50, "c": 40}
    assert in_turn(queue, had) == [1, 2, 5, 3, 4, 6]
    assert in_turn(queue, had, "ac") == [3, 1, 2, 5, 4, 6]
    assert in_turn(queue, had, "a") == [5, 3, 1, 2, 4, 6]
    turns = [turn for turn, _ in queue.in_turn(had, {"a": 1})]
    assert [turn.share for turn in turns] == [0, 0, 0, 10, 60, 70]
    assert turns == sorted(turns)
    assert queue.most_urgent_beside({"a": 1, "b": 2}) == 0
    assert queue.most_urgent_beside({"a": 1, "c": 2}) == 0
    assert queue.most_urgent_beside({"a": 1, "b": 1, "c": 2}) is None


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
    served = {(caller, priority) for caller in held for priority in (-1, 0, 1)}
    while left:
        following = min(
            left,
            key=lambda each: (
                each.rank[0],
                (each.caller, each.rank[0]) in served,
                tokens[each.caller],
                each.arrival,
            ),
        )
        served.add((following.caller, following.rank[0]))
        left.remove(following)
        expected.append(following.arrival)
        tokens[following.caller] += len(following.tokens)
    assert in_turn(queue, had, held) == expected
    assert in_turn(queue, had, held) == expected, "to look changes nothing"
