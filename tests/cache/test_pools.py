"""Rows grow in every pool or in none, and give everything back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.cache.pools import CacheLimits
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec
from sightline.cache.store import CacheStore
from sightline.core.errors import BatchError, OutOfPages

CPU = torch.device("cpu")
LIMITS = CacheLimits(num_pages=9, page_size=4, max_rows=3, max_seq_len=24)
KV = PoolSpec("kv", (PlaneSpec("k", (2, 3), torch.float32), PlaneSpec("v", (2, 5), torch.float16)), num_layers=2)
INDEX = PoolSpec("index", (PlaneSpec("k", (4,), torch.bfloat16),), num_layers=1)
NARROW = PoolSpec(
    "kv",
    (
        PlaneSpec("k", (2, 3), torch.float8_e4m3fn, (0.5, 0.3)),
        PlaneSpec("v", (2, 3), torch.float8_e4m3fn),
    ),
    num_layers=2,
)
SPECS = (GroupCacheSpec("group0", (KV, INDEX)), GroupCacheSpec("group1", (KV,)))


def make_store(*, poison: bool = False) -> CacheStore:
    return CacheStore(SPECS, LIMITS, CPU, poison=poison)


def state(store: CacheStore) -> tuple[object, ...]:
    """Everything that growing or closing a row may change, versions left out."""
    return (
        store.num_free_rows,
        tuple(pool.allocator.num_free for pool in store.pools),
        tuple(pool.table.owned(row) for pool in store.pools for row in range(LIMITS.max_rows + 1)),
        tuple(tuple(pool.table.pages.flatten().tolist()) for pool in store.pools),
    )


def versions(store: CacheStore, row: int) -> list[int]:
    return [pool.table.version(row) for pool in store.pools]


def test_a_pool_spec_counts_the_elements_of_an_entry_over_planes_and_layers() -> None:
    assert KV.entry_elements == 2 * (2 * 3 + 2 * 5)
    assert INDEX.entry_elements == 4


def test_a_pool_spec_counts_the_bytes_of_an_entry_in_each_planes_own_dtype() -> None:
    assert KV.entry_bytes == 2 * (2 * 3 * 4 + 2 * 5 * 2)
    assert NARROW.entry_bytes == NARROW.entry_elements == 24


def test_a_pool_tells_the_scales_of_its_planes_on_the_host_and_on_the_device() -> None:
    [pool] = CacheStore([GroupCacheSpec("group0", (NARROW,))], LIMITS, CPU).pools
    assert (pool.scales("k"), pool.scales("v")) == ((0.5, 0.3), (1.0, 1.0))
    assert pool.scales_device("k").dtype == torch.float32
    assert torch.equal(pool.scales_device("k"), torch.tensor([0.5, 0.3]))
    assert torch.equal(pool.scales_device("v"), torch.ones(2))


def test_planes_that_hold_values_as_they_are_have_scales_of_1() -> None:
    for pool in make_store().pools:
        for plane in pool.spec.planes:
            assert pool.scales(plane.name) == (1.0,) * pool.spec.num_layers


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_number_above_0_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="expected scales of plane k above 0 and finite"):
        PlaneSpec("k", (4,), torch.float8_e4m3fn, (1.0, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_a_plane_that_would_ignore_them_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="expected no scales"):
        PlaneSpec("k", (4,), dtype, (0.5,))


def test_a_scale_for_each_layer_is_expected() -> None:
    with pytest.raises(ValueError, match="a scale of plane k for each of 3 layers, got 2"):
        PoolSpec("kv", (PlaneSpec("k", (4,), torch.float8_e4m3fn, (1.0, 2.0)),), num_layers=3)


def test_pages_of_8_bit_floats_are_poisoned_and_copied_too() -> None:
    store = CacheStore([GroupCacheSpec("group0", (NARROW,))], LIMITS, CPU, poison=True)
    [pool] = store.pools
    for name in ("k", "v"):
        pool.plane(name).zero_()
    row, other = store.open_row(), store.open_row()
    store.grow_row(row, 7)
    slots = row_slots(store, 0, row)
    others = [slot for slot in range(36) if slot not in slots]
    for name in ("k", "v"):
        assert pool.plane(name).float()[:, slots].isnan().all()
        assert not pool.plane(name).float()[:, others].count_nonzero(), "a page of nobody's was touched"
    pool.plane("k")[:, slots[:4]] = torch.arange(48.0).view(2, 4, 2, 3).to(torch.float8_e4m3fn)
    store.grow_row(other, 4)
    store.fill_row(row, 3)
    store.copy_page(row, other, 0, 3)
    copied = pool.plane("k").float()[:, row_slots(store, 0, other)]
    assert torch.equal(copied[:, :3], pool.plane("k").float()[:, slots[:3]])
    assert copied[:, 3:].isnan().all()
    store.close_row(row)
    assert pool.plane("k").float()[:, slots].isnan().all()


def test_every_group_has_its_own_pools_under_its_own_keys() -> None:
    store = make_store()
    assert [pool.key for pool in store.pools] == ["group0.kv", "group0.index", "group1.kv"]
    assert [group.group for group in store.groups] == ["group0", "group1"]
    assert store.groups[0].pools["kv"] is not store.groups[1].pools["kv"]
    assert len({pool.table.table_id for pool in store.pools}) == 3


def test_a_pool_holds_its_planes_for_every_layer_and_slot() -> None:
    pool = make_store().groups[0].pools["kv"]
    assert pool.plane("k").shape == (2, 36, 2, 3)
    assert pool.plane("v").shape == (2, 36, 2, 5)
    assert (pool.plane("k").dtype, pool.plane("v").dtype) == (torch.float32, torch.float16)
    assert pool.num_bytes == 2 * 36 * (6 * 4 + 10 * 2)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (24, 6)])
def test_a_row_grows_to_whole_pages_in_every_pool(tokens: int, pages: int) -> None:
    store = make_store()
    row = store.open_row()
    store.grow_row(row, tokens)
    assert store.pages_for(tokens) == pages
    assert [pool.table.num_owned(row) for pool in store.pools] == [pages] * 3
    assert store.num_free_pages == store.num_usable_pages - pages == 8 - pages


def test_growing_to_what_a_row_has_already_changes_nothing() -> None:
    store = make_store()
    row = store.open_row()
    store.grow_row(row, 8)
    before, before_versions = state(store), versions(store, row)
    for tokens in (8, 5, 0):
        store.grow_row(row, tokens)
    assert state(store) == before
    assert versions(store, row) == before_versions


def test_growing_keeps_the_pages_that_a_row_has() -> None:
    store = make_store()
    row = store.open_row()
    store.grow_row(row, 6)
    first = [pool.table.owned(row) for pool in store.pools]
    store.grow_row(row, 20)
    assert [pool.table.owned(row)[:2] for pool in store.pools] == first


@pytest.mark.parametrize("scarce", [0, 1, 2])
def test_a_row_grows_in_all_pools_or_in_none(scarce: int) -> None:
    store = make_store()
    row = store.open_row()
    store.grow_row(row, 4)
    store.pools[scarce].allocator.allocate(6)
    before, before_versions = state(store), versions(store, row)
    with pytest.raises(OutOfPages, match=f"expected 2 free pages in pool {store.pools[scarce].key}, got 1"):
        store.grow_row(row, 12)
    assert state(store) == before
    assert versions(store, row) == before_versions
    store.grow_row(row, 8)
    assert store.num_free_pages == 0


def test_growing_beyond_the_longest_sequence_is_refused_and_loses_no_page() -> None:
    store = make_store()
    row = store.open_row()
    before = state(store)
    with pytest.raises((ValueError, OutOfPages)):
        store.grow_row(row, LIMITS.max_seq_len + 1)
    assert state(store) == before


@pytest.mark.parametrize("row", [0, 1, 4])
def test_growing_a_row_that_nobody_opened_is_refused_and_loses_no_page(row: int) -> None:
    store = make_store()
    before = state(store)
    with pytest.raises((ValueError, IndexError)):
        store.grow_row(row, 4)
    assert state(store) == before


def test_rows_are_handed_out_once_and_never_the_padding_row() -> None:
    store = make_store()
    assert {store.open_row() for _ in range(3)} == {1, 2, 3}
    with pytest.raises(OutOfPages, match="expected a free page-table row, got none of 3"):
        store.open_row()


def test_closing_every_row_returns_to_the_beginning() -> None:
    store = make_store()
    fresh = state(store)
    rows = [store.open_row() for _ in range(3)]
    for row, tokens in zip(rows, (3, 20, 4), strict=True):
        store.grow_row(row, tokens)
    for row in (rows[1], rows[2], rows[0]):
        store.close_row(row)
    assert state(store) == fresh


@pytest.mark.parametrize("row", [0, 4, -1])
def test_a_row_that_does_not_exist_cannot_be_closed(row: int) -> None:
    store = make_store()
    fresh = state(store)
    with pytest.raises(ValueError, match=f"got {row}"):
        store.close_row(row)
    assert state(store) == fresh


def test_closing_a_row_twice_is_refused_and_frees_nothing_twice() -> None:
    store = make_store()
    row = store.open_row()
    store.grow_row(row, 8)
    store.close_row(row)
    before = state(store)
    with pytest.raises(ValueError, match=f"expected a row that is open, got {row}"):
        store.close_row(row)
    assert state(store) == before


def test_a_reused_row_has_versions_that_it_never_had() -> None:
    store = make_store()
    row = store.open_row()
    seen = {tuple(versions(store, row))}
    for round_number in range(1, 4):
        store.grow_row(row, 8)
        assert tuple(versions(store, row)) in seen, "growth takes no page away"
        store.close_row(row)
        assert store.open_row() == row
        seen.add(tuple(versions(store, row)))
        assert len(seen) == 1 + round_number


def test_pages_that_another_row_shares_outlive_the_row() -> None:
    store = make_store()
    first, second = store.open_row(), store.open_row()
    store.grow_row(first, 8)
    for pool in store.pools:
        pool.allocator.share(pool.table.owned(first))
        pool.table.append(second, pool.table.owned(first))
    store.close_row(first)
    assert store.num_free_pages == 6
    store.close_row(second)
    assert store.num_free_pages == 8


def row_slots(store: CacheStore, pool_index: int, row: int) -> list[int]:
    pool = store.pools[pool_index]
    return [page * pool.page_size + offset for page in pool.table.owned(row) for offset in range(pool.page_size)]


@pytest.mark.parametrize("poison", [True, False])
def test_pages_are_poisoned_when_they_are_handed_out(poison: bool) -> None:
    store = make_store(poison=poison)
    for pool in store.pools:
        for plane in pool.spec.planes:
            pool.plane(plane.name).zero_()
    row = store.open_row()
    store.grow_row(row, 7)
    for index, pool in enumerate(store.pools):
        slots = row_slots(store, index, row)
        others = [slot for slot in range(36) if slot not in slots]
        assert len(slots) == 8
        for plane in pool.spec.planes:
            assert bool(pool.plane(plane.name)[:, slots].isnan().all()) is poison
            assert pool.plane(plane.name)[:, others].count_nonzero() == 0, "a page of nobody's was touched"


@pytest.mark.parametrize("poison", [True, False])
def test_pages_are_poisoned_when_they_are_given_back(poison: bool) -> None:
    store = make_store(poison=poison)
    row, other = store.open_row(), store.open_row()
    store.grow_row(row, 8)
    store.grow_row(other, 4)
    store.fill_row(row, 3)
    for pool in store.pools:
        for plane in pool.spec.planes:
            pool.plane(plane.name).zero_()
    slots = [row_slots(store, index, row) for index in range(3)]
    kept = [row_slots(store, index, other) for index in range(3)]
    store.close_row(row)
    for pool, freed, held in zip(store.pools, slots, kept, strict=True):
        for plane in pool.spec.planes:
            assert bool(pool.plane(plane.name)[:, freed].isnan().all()) is poison
            assert pool.plane(plane.name)[:, held].count_nonzero() == 0, "another row's page was touched"


def test_growing_poisons_only_the_new_pages() -> None:
    store = make_store(poison=True)
    row = store.open_row()
    store.grow_row(row, 4)
    plane = store.pools[0].plane("k")
    plane[:, row_slots(store, 0, row)] = 1.0
    store.grow_row(row, 8)
    slots = row_slots(store, 0, row)
    assert plane[:, slots[:4]].eq(1.0).all()
    assert plane[:, slots[4:]].isnan().all()


def test_a_page_that_is_still_shared_keeps_its_entries_when_one_owner_leaves() -> None:
    store = make_store(poison=True)
    row = store.open_row()
    store.grow_row(row, 4)
    pool = store.pools[0]
    pages = pool.table.owned(row)
    slots = row_slots(store, 0, row)
    pool.plane("k")[:, slots] = 1.0
    pool.allocator.share(pages)
    store.close_row(row)
    assert pool.plane("k")[:, slots].eq(1.0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 24)), max_size=25))
def test_whatever_rows_do_no_page_has_two_owners_and_none_is_lost(changes: list[tuple[int, int]]) -> None:
    store = make_store()
    rows: list[int | None] = [None, None, None]
    for place, tokens in changes:
        row = rows[place]
        if row is None:
            rows[place] = store.open_row()
        elif tokens == 0:
            store.close_row(row)
            rows[place] = None
        else:
            needed = store.pages_for(tokens) - store.pools[0].table.num_owned(row)
            if needed > store.num_free_pages:
                with pytest.raises(OutOfPages):
                    store.grow_row(row, tokens)
            else:
                store.grow_row(row, tokens)
        for pool in store.pools:
            owned = [page for table_row in range(1, 4) for page in pool.table.owned(table_row)]
            assert len(owned) == len(set(owned))
            assert len(owned) + pool.allocator.num_free == pool.allocator.num_usable
            assert 0 not in owned


def filled_row(store: CacheStore, num_tokens: int, num_candidates: int) -> int:
    """A row whose entries are their index plus 1, candidates behind its tokens included."""
    row = store.open_row()
    store.grow_row(row, num_tokens + num_candidates)
    store.fill_row(row, num_tokens)
    for pool in store.pools:
        slots = pool.slots_to_write((row,), (0,), (num_tokens + num_candidates,))
        for plane in pool.spec.planes:
            entries = torch.arange(1.0, len(slots) + 1).to(plane.dtype)
            pool.plane(plane.name)[:, slots] = entries.view(1, -1, *(1,) * len(plane.shape))
    return row


def entries_of(store: CacheStore, row: int, count: int) -> list[list[float]]:
    """The entries of a row in every plane and layer, each of which is one number."""
    found = []
    for pool in store.pools:
        slots = pool.slots_to_write((row,), (0,), (count,))
        for plane in pool.spec.planes:
            entries = pool.plane(plane.name).float()[:, slots].flatten(2)
            assert (entries == entries[:1, :, :1]).all()
            found.append(entries[0, :, 0].tolist())
    return found


@pytest.mark.parametrize("specs", [SPECS, (GroupCacheSpec("group0", (NARROW,)),)], ids=["floats", "fp8"])
@pytest.mark.parametrize("places", [(0,), (0, 1, 2), (0, 2, 4, 7), (0, 3), (0, 7)])
def test_candidates_that_are_kept_move_behind_the_context_once(
    specs: tuple[GroupCacheSpec, ...], places: tuple[int, ...]
) -> None:
    store = CacheStore(specs, LIMITS, CPU)
    row = filled_row(store, 6, 8)
    expected = [*range(1, 7), *(7 + place for place in places)]
    for _ in range(2):
        store.main.keep(row, 6, places)
        assert store.lengths.launched(row) == 6 + len(places)
        assert entries_of(store, row, len(expected)) == [expected] * len(entries_of(store, row, 1))
    store.lengths.commit(row, 6 + len(places))
    store.main.keep(row, 6, places)
    assert entries_of(store, row, len(expected)) == [expected] * len(entries_of(store, row, 1))


def test_candidates_are_kept_only_behind_what_was_launched_and_in_pages_of_the_row() -> None:
    store = make_store()
    row = filled_row(store, 6, 2)
    with pytest.raises(BatchError, match="launched length to be 5, in front of candidates"):
        store.main.keep(row, 5, (0, 2))
    with pytest.raises(BatchError, match="enough for 12 tokens"):
        store.main.keep(row, 6, (0, 5))
    assert store.lengths.launched(row) == 6
