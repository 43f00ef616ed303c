"""The store of responses: bounded, by caller, and the ones used longest ago go first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.server.store import OVERHEAD_BYTES, ResponseStore, StoredResponse


def response(size: int = 0) -> StoredResponse:
    return StoredResponse(b"a" * size, b"")


def test_a_response_is_found_by_its_own_caller_alone() -> None:
    store = ResponseStore(8, 1 << 20)
    store.keep("a", "x", response(1))
    assert store.find("a", "x") == response(1)
    assert store.find("b", "x") is None
    assert not store.delete("b", "x")
    assert store.delete("a", "x")
    assert store.find("a", "x") is None
    assert store.num_bytes == len(store) == 0


def test_the_one_used_longest_ago_goes_first() -> None:
    store = ResponseStore(2, 1 << 20)
    for name in ("x", "y"):
        store.keep("a", name, response())
    store.find("a", "x")
    store.keep("a", "z", response())
    assert [name for name in "xyz" if store.find("a", name)] == ["x", "z"]


@pytest.mark.parametrize(("most", "most_bytes"), [(8, 1 << 20), (10**6, 8 * OVERHEAD_BYTES)])
def test_a_caller_with_an_equal_share_loses_nothing_to_one_that_floods(most: int, most_bytes: int) -> None:
    store = ResponseStore(most, most_bytes)
    for number in range(4):
        store.keep("quiet", str(number), response())
    for number in range(100):
        store.keep("loud", str(number), response())
    assert all(store.find("quiet", str(number)) for number in range(4))
    assert [number for number in range(100) if store.find("loud", str(number))] == [96, 97, 98, 99]


@pytest.mark.parametrize(("most", "most_bytes"), [(0, 1 << 20), (8, 0)])
def test_a_store_without_room_keeps_nothing(most: int, most_bytes: int) -> None:
    store = ResponseStore(most, most_bytes)
    store.keep("a", "x", response())
    assert store.find("a", "x") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 4000), st.booleans())))
def test_it_keeps_to_both_limits_and_counts_right(steps: list[tuple[str, str, int, bool]]) -> None:
    store, most, most_bytes = ResponseStore(5, 12_000), 5, 12_000
    for caller, name, size, deletes in steps:
        if deletes or store.find(caller, name):
            store.delete(caller, name)
        else:
            store.keep(caller, name, response(size))
        held = [found for each in "abc" for one in "xyz" if (found := store.find(each, one)) is not None]
        assert len(held) == len(store) <= most
        assert sum(each.num_bytes for each in held) == store.num_bytes <= most_bytes
