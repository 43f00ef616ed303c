"""The free list against a model of it: no page has two lives, and none is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sightline.cache.pages import PageAllocator
from sightline.core.errors import OutOfPages


class PagesAgainstModel(RuleBasedStateMachine):
    """Does the same to an allocator and to a dictionary of owners."""

    @initialize(num_pages=st.integers(2, 12))
    def build(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages)
        self.owners: dict[int, int] = {}

    def draw_owned(self, data: st.DataObject) -> list[int]:
        """Owned pages, each at most as often as it has owners, in any order."""
        pool = [page for page, owners in self.owners.items() for _ in range(owners)]
        return data.draw(st.lists(st.sampled_from(range(len(pool))), unique=True).map(lambda at: [pool[i] for i in at]))

    @rule(count=st.integers(0, 12))
    def allocate_all_or_nothing(self, count: int) -> None:
        free = self.num_pages - 1 - len(self.owners)
        if count > free:
            with pytest.raises(OutOfPages, match=f"expected {count} free pages, got {free} of {self.num_pages - 1}"):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert len(pages) == len(set(pages)) == count
        assert not set(pages) & self.owners.keys(), "an owned page was handed out again"
        self.owners |= dict.fromkeys(pages, 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.owners)), unique=True))
        self.allocator.share(pages)
        for page in pages:
            self.owners[page] += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.draw_owned(data)
        freed = self.allocator.release(pages)
        left = Counter(self.owners)
        left.subtract(pages)
        assert sorted(freed) == sorted(page for page in set(pages) if left[page] == 0)
        self.owners = {page: count for page, count in left.items() if count > 0}

    @rule(data=st.data(), bad=st.integers(-2, 14))
    def refuse_what_is_not_owned(self, data: st.DataObject, bad: int) -> None:
        if bad in self.owners:
            return
        pages = data.draw(st.permutations([*self.owners, bad]))
        for change in (self.allocator.release, self.allocator.share):
            with pytest.raises(ValueError, match=r"expected a page|owners"):
                change(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def refuse_a_double_free(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.owners)))
        times = self.owners[page] + 1
        with pytest.raises(ValueError, match=f"page {page} has {times - 1} owners and is named {times} times"):
            self.allocator.release([page] * times)

    @invariant()
    def agrees_with_the_model(self) -> None:
        for page in range(self.num_pages):
            assert self.allocator.owners(page) == self.owners.get(page, 0)
        assert self.allocator.num_free + len(self.owners) == self.allocator.num_usable == self.num_pages - 1
        assert 0 not in self.owners, "the padding page was handed out"


TestPagesAgainstModel = PagesAgainstModel.TestCase
TestPagesAgainstModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("num_pages", [-1, 1])
def test_a_pool_without_a_usable_page_is_refused(num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"expected more than 1 pages, or none at all, got {num_pages}"):
        PageAllocator(num_pages)


def test_a_pool_may_have_no_page_at_all_and_then_gives_none() -> None:
    allocator = PageAllocator(0)
    assert allocator.num_usable == allocator.num_free == 0
    with pytest.raises(OutOfPages):
        allocator.allocate(1)


def test_a_negative_count_is_refused() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(ValueError, match="expected a count of at least 0, got -1"):
        allocator.allocate(-1)
    assert allocator.num_free == 3


def test_a_shared_page_is_freed_by_its_last_owner() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    allocator.share([page])
    assert allocator.release([page]) == ()
    assert allocator.num_free == 1
    assert allocator.release([page]) == (page,)
    assert allocator.num_free == 2


def test_one_release_may_take_away_several_owners() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    allocator.share([page])
    assert allocator.release([page, page]) == (page,)
    assert allocator.owners(page) == 0


def test_pages_come_back_in_the_order_in_which_they_were_released() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(4)
    allocator.release([3, 1, 4])
    assert allocator.allocate(3) == (3, 1, 4)


def test_a_generator_of_pages_is_read_once() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(2)
    allocator.share(page for page in pages)
    assert [allocator.owners(page) for page in pages] == [2, 2]
    assert allocator.release(page for page in pages) == ()
