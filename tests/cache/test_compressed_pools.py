"""Pools whose entries stand for several tokens: where entries are, who writes them, and what a page takes."""

from __future__ import annotations

import pytest
import torch

from sightline.cache.blocks import BlockHash, BlockPlace, layout_of
from sightline.cache.host import HostBlocks
from sightline.cache.layout import Layout, arrange_free_pages, walk_slots
from sightline.cache.pools import CacheLimits, Pool
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec
from sightline.cache.store import CacheStore
from sightline.core.batch import PADDING_SLOT
from sightline.core.errors import BatchError, ConfigError
from sightline.core.hot_memory import CachePage
from sightline.core.page_shape import CompressedEntries
from sightline.core.resolution import ModelFacts

CPU = torch.device("cpu")
SIZES = [(page, ratio) for page in (1, 16, 64) for ratio in (4, 16, 128)]
LENGTH = 300
sizes = pytest.mark.parametrize(("page", "ratio"), SIZES)


def make_store(page: int, ratio: int, *, poison: bool = False) -> CacheStore:
    """A store of two groups: a pool of single tokens, and one of compressed entries."""
    plain = PoolSpec("kv", (PlaneSpec("k", (2,), torch.float32),), num_layers=1)
    packed = PoolSpec("entry", (PlaneSpec("entry", (3,), torch.float32),), num_layers=2, tokens_per_entry=ratio)
    limits = CacheLimits(3 * -(-LENGTH // page) + 1, page, max_rows=3, max_seq_len=LENGTH)
    specs = [GroupCacheSpec("plain", (plain,)), GroupCacheSpec("packed", (packed,))]
    store = CacheStore(specs, limits, CPU, poison=poison)
    arrange_free_pages(store, Layout.SHUFFLED)
    return store


def packed_pool(store: CacheStore) -> Pool:
    return store.groups[1].pools["entry"]


def open_row(store: CacheStore, length: int) -> int:
    row = store.open_row()
    store.grow_row(row, length)
    return row


def write(pool: Pool, row: int, first: int, count: int) -> None:
    """Writes what each token writes: its number. The padding slot gets the rest."""
    slots = torch.tensor(pool.slots_to_write([row], [first], [count]))
    pool.plane("entry")[:, slots] = torch.arange(first, first + count, dtype=torch.float32)[None, :, None]


@sizes
def test_entry_i_is_written_by_the_last_token_of_its_window(page: int, ratio: int) -> None:
    store = make_store(page, ratio)
    pool, row, count = packed_pool(store), open_row(store, LENGTH), LENGTH // ratio
    for first in range(0, LENGTH, 7):
        write(pool, row, first, min(7, LENGTH - first))
    entries = torch.arange(count)
    slots = pool.entry_slots(torch.full_like(entries, row), entries)
    assert slots.tolist() == walk_slots(pool, row, count)
    assert len(set(slots.tolist())) == count
    assert PADDING_SLOT not in slots
    assert pool.plane("entry")[1, slots, 0].tolist() == [(entry + 1) * ratio - 1 for entry in range(count)]


@sizes
def test_tokens_that_complete_no_entry_write_the_padding_slot(page: int, ratio: int) -> None:
    store = make_store(page, ratio)
    pool, row = packed_pool(store), open_row(store, LENGTH)
    slots = pool.slots_to_write([row], [5], [200])
    complete = [token for token, slot in zip(range(5, 205), slots, strict=True) if slot != PADDING_SLOT]
    assert complete == [token for token in range(5, 205) if (token + 1) % ratio == 0]


@sizes
def test_host_and_device_find_the_same_slots_for_any_number_of_rows(page: int, ratio: int) -> None:
    limits = CacheLimits(40 * -(-LENGTH // page) + 1, page, max_rows=40, max_seq_len=LENGTH)
    spec = PoolSpec("entry", (PlaneSpec("entry", (1,), torch.float32),), 1, ratio)
    store = CacheStore([GroupCacheSpec("packed", (spec,))], limits, CPU)
    [pool] = store.pools
    rows = [open_row(store, LENGTH) for _ in range(40)]
    for shift in (0, 3, 250):
        tokens = [(place * 5 + shift) % LENGTH for place in range(40)]
        many = list(pool.slots_to_write(rows, tokens, [1] * 40))
        few = [
            slot for row, token in zip(rows, tokens, strict=True) for slot in pool.slots_to_write([row], [token], [1])
        ]
        assert many == few == pool.slots_of(torch.tensor(rows), torch.tensor(tokens)).tolist()


@sizes
def test_whole_pages_hold_whole_entries(page: int, ratio: int) -> None:
    store = make_store(page, ratio)
    pool = packed_pool(store)
    assert pool.plane("entry").shape[1] == store.limits.num_pages * max(1, page // ratio)
    row = open_row(store, LENGTH)
    for entry, slot in enumerate(walk_slots(pool, row, LENGTH // ratio)):
        assert slot // pool.entries_per_page == pool.table.page(row, ((entry + 1) * ratio - 1) // page)


@sizes
@pytest.mark.parametrize("part", [1, 5, 15, 16, 63, 64])
def test_a_copied_page_has_the_entries_that_its_first_tokens_complete(page: int, ratio: int, part: int) -> None:
    part = min(part, page)
    store = make_store(page, ratio, poison=True)
    source, index = open_row(store, LENGTH), (LENGTH // page) - 1
    pool, length = packed_pool(store), (index + 1) * page
    write(pool, source, 0, length)
    store.fill_row(source, length)
    target = store.open_row()
    store.adopt(target, [store.committed_bundle(source, place) for place in range(index)])
    store.grow_row(target, length)
    store.copy_page(source, target, index, part)
    count = (index * page + part) // ratio
    slots = walk_slots(pool, target, count)
    assert pool.plane("entry")[0, slots, 0].tolist() == [(entry + 1) * ratio - 1 for entry in range(count)]
    if page >= ratio:
        behind = walk_slots(pool, target, length // ratio)[count:]
        assert pool.plane("entry")[:, behind].isnan().all()


@sizes
def test_accepted_candidates_stay_and_scattered_ones_are_refused(page: int, ratio: int) -> None:
    store = make_store(page, ratio)
    row = open_row(store, 2 * ratio)
    store.fill_row(row, ratio - 2)
    store.main.keep(row, ratio - 2, (0, 1))
    assert store.lengths.launched(row) == ratio
    store.lengths.commit(row, ratio)
    with pytest.raises(BatchError, match=r"the first ones in pool packed\.entry"):
        store.main.keep(row, ratio, (0, 2))


@sizes
def test_blocks_bring_the_entries_of_whole_pages_back(page: int, ratio: int) -> None:
    store = make_store(page, ratio)
    pool, row, pages = packed_pool(store), open_row(store, LENGTH), 256 // page
    write(pool, row, 0, 256)
    layout = layout_of(store)
    assert [plane.shape for plane in layout.entries] == [(page, 2), (pool.entries_per_page, 3)]
    blocks = HostBlocks(store, pages * layout.entry_bytes)
    names = [BlockHash(bytes([number])) for number in range(pages)]
    blocks.put(names, [BlockPlace(store.pages_at(row, index)) for index in range(pages)])
    other = open_row(store, LENGTH)
    pool.plane("entry")[:, walk_slots(pool, other, 256 // ratio)] = -1.0
    blocks.fetch(names, [BlockPlace(store.pages_at(other, index)) for index in range(pages)])
    found = pool.plane("entry")[1, walk_slots(pool, other, 256 // ratio), 2].tolist()
    assert found == [(entry + 1) * ratio - 1 for entry in range(256 // ratio)]


@pytest.mark.parametrize(("page", "ratio", "fitting"), [(24, 16, 16), (48, 128, 32), (6, 4, 4), (3, 4, 2)])
def test_a_page_size_that_entries_do_not_fit_is_refused(page: int, ratio: int, fitting: int) -> None:
    with pytest.raises(ConfigError, match=f"got pages of {page}; choose such a page size, for instance {fitting}$"):
        make_store(page, ratio)


@sizes
def test_memory_counts_places_of_pages_not_tokens(page: int, ratio: int) -> None:
    facts = ModelFacts(
        max_positions=1000,
        weight_elements=0,
        quantised_bytes=0,
        cache_elements_per_token=2,
        compressed=(CompressedEntries(ratio, 6),),
        state_bytes=40,
        state_elements=10,
    )
    store = make_store(page, ratio)
    [plain, packed] = [pool.spec for pool in store.pools]
    size = plain.bytes_per_page(page) + packed.bytes_per_page(page)
    assert facts.page_shape(page, torch.float32).split() == CachePage(page, size)
    assert store.num_bytes == store.limits.num_pages * size
    assert packed.bytes_per_page(page) == 4 * 6 * max(1, page // ratio)
    assert packed.bytes_per_token == 24 / ratio
    assert facts.sequence_bytes(torch.bfloat16) == 60
    assert facts.with_drafter(facts, shares_weights=True).compressed == facts.compressed * 2


def test_an_entry_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1 token per entry, got 0"):
        PoolSpec("entry", (), 1, 0)


def test_decode_rows_without_a_page_of_their_own_are_refused() -> None:
    store = make_store(16, 4)
    row = open_row(store, 16)
    with pytest.raises(BatchError, match="enough for 17 tokens"):
        packed_pool(store).slots_to_write([row], [16], [1])


@pytest.mark.parametrize("num_rows", [1, 40])
def test_pages_that_others_read_are_never_written(num_rows: int) -> None:
    limits = CacheLimits(41, 16, max_rows=41, max_seq_len=16)
    spec = PoolSpec("entry", (PlaneSpec("entry", (1,), torch.float32),), 1, tokens_per_entry=4)
    store = CacheStore([GroupCacheSpec("packed", (spec,))], limits, CPU)
    rows = [open_row(store, 16) for _ in range(num_rows)]
    store.fill_row(rows[-1], 16)
    store.adopt(store.open_row(), [store.committed_bundle(rows[-1], 0)])
    with pytest.raises(BatchError, match="alone where it writes"):
        store.pools[0].slots_to_write(rows, [3] * num_rows, [1] * num_rows)
