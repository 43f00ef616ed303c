"""Host memory gives back exactly what it was given, forgets what was unused for longest, and holds pages meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sightline.cache.blocks import (
    BlockHash,
    BlockPlace,
    TransferDone,
    TransferEnd,
    TransferFailed,
    TransferTicket,
    hash_after,
    layout_of,
)
from sightline.cache.host import HostBlocks, HostRows
from sightline.cache.pools import CacheLimits
from sightline.cache.prefix import PrefixCache, PrefixMatch
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec, StateSpec
from sightline.cache.store import CacheStore
from sightline.cache.tier import LowerTier
from sightline.core.errors import ConfigError

POOL = PoolSpec("kv", (PlaneSpec("k", (3,), torch.float32), PlaneSpec("v", (2,), torch.float32)), num_layers=2)
STATES = StateSpec((PlaneSpec("state", (2,), torch.float32),), num_layers=2)
PAGE = 2


def make_store(*, states: bool = False, num_pages: int = 8) -> CacheStore:
    specs = [GroupCacheSpec("a", (POOL,)), GroupCacheSpec("b", (POOL,))]
    if states:
        specs.append(GroupCacheSpec("c", (), STATES))
    limits = CacheLimits(num_pages + 1, PAGE, 3, 32, states_per_row=2, max_checkpoints=4)
    return CacheStore(specs, limits, torch.device("cpu"), poison=True)


def make_blocks(store: CacheStore, num_blocks: int = 4) -> HostBlocks:
    layout = layout_of(store)
    room = 2 * max(layout.entry_bytes, layout.state_bytes) if layout.states else layout.entry_bytes
    return HostBlocks(store, num_blocks * room)


def names(count: int, seed: bytes = b"") -> list[BlockHash]:
    made = [hash_after(BlockHash(b"root" + seed), b"0")]
    while len(made) < count:
        made.append(hash_after(made[-1], b"0"))
    return made


def write(store: CacheStore, page: int, value: float) -> None:
    """Fills a page of every pool with a number of its own."""
    for number, pool in enumerate(store.pools):
        for plane in pool.spec.planes:
            pool.plane(plane.name)[:, page * PAGE : (page + 1) * PAGE] = value + number / 8


def holds(store: CacheStore, page: int, value: float) -> bool:
    return all(
        bool((pool.plane(plane.name)[:, page * PAGE : (page + 1) * PAGE] == value + number / 8).all())
        for number, pool in enumerate(store.pools)
        for plane in pool.spec.planes
    )


def at(*pages: int) -> list[BlockPlace]:
    return [BlockPlace((page, page)) for page in pages]


def put(blocks: HostBlocks, hashes: Sequence[BlockHash], places: Sequence[BlockPlace]) -> None:
    ticket = blocks.put(hashes, places)
    assert list(blocks.poll()) == [(ticket, TransferDone())]


def fetch(blocks: HostBlocks, hashes: Sequence[BlockHash], places: Sequence[BlockPlace]) -> bool:
    ticket = blocks.fetch(hashes, places)
    [(ended, end)] = blocks.poll()
    assert ended == ticket
    return end == TransferDone()


def test_blocks_come_back_as_they_were_into_other_pages() -> None:
    store = make_store()
    blocks, [one, two, three] = make_blocks(store), names(3)
    for page in (1, 2, 3):
        write(store, page, page)
    put(blocks, [one, two, three], at(1, 2, 3))
    for page in (1, 2, 3):
        write(store, page, 9)
    assert fetch(blocks, [one, two, three], at(6, 1, 4))
    assert holds(store, 6, 1)
    assert holds(store, 1, 2)
    assert holds(store, 4, 3)
    assert holds(store, 2, 9), "other pages stay as they are"
    assert list(blocks.poll()) == [], "a transfer is reported once"


def test_lookup_counts_leading_blocks_and_reads_no_hash_behind_the_first_miss() -> None:
    store = make_store()
    blocks, hashes = make_blocks(store), names(4)
    put(blocks, [hashes[0], hashes[1], hashes[3]], at(1, 2, 4))
    read: list[BlockHash] = []

    def asked() -> object:
        for each in hashes:
            read.append(each)
            yield each

    assert blocks.lookup(asked()) == 2  # type: ignore[arg-type]
    assert read == hashes[:3]
    assert blocks.lookup(names(2, b"other")) == 0


def test_the_block_unused_for_longest_leaves_first_and_a_fetch_is_a_use() -> None:
    store = make_store()
    blocks, hashes = make_blocks(store, 3), names(5)
    for number, each in enumerate(hashes[:3], 1):
        write(store, number, number)
        put(blocks, [each], at(number))
    assert fetch(blocks, [hashes[0]], at(5))
    put(blocks, [hashes[3]], at(4))
    assert set(blocks.hashes()) == {hashes[0], hashes[2], hashes[3]}
    put(blocks, [hashes[2]], at(3))
    put(blocks, [hashes[4]], at(4))
    assert set(blocks.hashes()) == {hashes[2], hashes[3], hashes[4]}, "to be put again is a use too"
    assert blocks.usage().num_blocks == blocks.usage().max_blocks == 3


def test_the_end_of_a_text_that_was_fetched_leaves_before_its_beginning() -> None:
    store = make_store()
    blocks, hashes = make_blocks(store, 3), names(4)
    put(blocks, hashes[:3], at(1, 2, 3))
    assert fetch(blocks, hashes[:3], at(4, 5, 6))
    put(blocks, names(1, b"other"), at(7))
    assert blocks.lookup(hashes) == 2


def test_a_block_that_is_not_held_fails_the_fetch_and_writes_nothing() -> None:
    store = make_store()
    blocks, hashes = make_blocks(store), names(2)
    put(blocks, hashes[:1], at(1))
    write(store, 5, 3)
    assert not fetch(blocks, hashes, at(5, 6))
    assert holds(store, 5, 3)


def test_more_blocks_than_fit_keep_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    monkeypatch.setattr("sightline.cache.host._STAGING_BYTES", 2 * layout_of(store).entry_bytes)
    blocks, hashes = make_blocks(store, 3), names(5)
    for page in range(1, 6):
        write(store, page, page)
    put(blocks, hashes, at(1, 2, 3, 4, 5))
    assert set(blocks.hashes()) == set(hashes[2:])
    assert fetch(blocks, hashes[2:], at(8, 7, 6))
    assert [holds(store, page, value) for page, value in ((8, 3), (7, 4), (6, 5))] == [True] * 3


def test_a_closed_tier_holds_nothing_and_takes_nothing() -> None:
    store = make_store()
    blocks, hashes = make_blocks(store), names(1)
    put(blocks, hashes, at(1))
    blocks.close()
    blocks.close()
    assert blocks.usage().num_blocks == 0
    blocks.put(hashes, at(1))
    blocks.fetch(hashes, at(1))
    assert [type(end) for _, end in blocks.poll()] == [TransferFailed, TransferFailed]


@pytest.mark.parametrize("states", [False, True])
def test_memory_without_room_for_a_block_is_refused(states: bool) -> None:
    with pytest.raises(ConfigError, match="raise host_cache_gib, or leave it out"):
        HostBlocks(make_store(states=states), 16)


def test_rows_of_host_memory_are_in_slabs_and_each_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.cache.host._SLAB_BYTES", 25)
    rows = HostRows(5, 10, torch.device("cpu"))
    assert rows.num_bytes == 50
    taken = [rows.take() for _ in range(6)]
    assert sorted(each for each in taken if each is not None) == [0, 1, 2, 3, 4]
    assert taken[-1] is None
    for index in range(5):
        rows.row(index).fill_(index)
    assert [set(rows.row(index).tolist()) for index in range(5)] == [{0}, {1}, {2}, {3}, {4}]
    rows.give_back(3)
    assert rows.take() == 3


def test_states_go_with_their_blocks_and_a_prefix_ends_at_the_last_one() -> None:
    store = make_store(states=True)
    blocks, hashes, plane = make_blocks(store), names(3), store.groups[2].states.plane("state")
    plane[:, 4] = 4.5
    put(blocks, hashes, [BlockPlace((1, 1)), BlockPlace((2, 2), 4), BlockPlace((3, 3))])
    assert blocks.lookup(hashes) == 2
    assert blocks.lookup(hashes[:1]) == 0, "nothing can go on from a block without a state"
    plane[:, 4] = 0.0
    assert fetch(blocks, hashes[:2], [BlockPlace((4, 4)), BlockPlace((5, 5), 6)])
    assert bool((plane[:, 6] == 4.5).all())
    assert not fetch(blocks, hashes[:1], [BlockPlace((4, 4), 6)]), "a block without a state gives none"
    # Put again, with its state.
    put(blocks, hashes[2:], [BlockPlace((3, 3), 6)])
    assert blocks.lookup(hashes) == 3
    assert blocks.num_states == 2


def test_without_room_for_a_state_another_block_loses_its_own_and_keeps_its_entries() -> None:
    store = make_store(states=True)
    layout = layout_of(store)
    blocks, hashes = HostBlocks(store, 2 * layout.entry_bytes + layout.state_bytes), names(2)
    assert blocks.max_states < 3
    for number, each in enumerate(names(blocks.max_states + 1), 1):
        put(blocks, [each], [BlockPlace((number, number), number)])
        hashes = [each]
    assert blocks.num_states == blocks.max_states
    assert blocks.lookup(hashes) == 1


def leave(store: CacheStore, cache: PrefixCache, tokens: list[int], *, state: bool = False, tenant: str = "") -> None:
    """A request that leaves its tokens in the cache, each page with a number of its own."""
    node = cache.lock(tenant, PrefixMatch(None, (), 0))
    row = store.open_row()
    store.grow_row(row, len(tokens))
    store.fill_row(row, len(tokens))
    for index in range(len(tokens) // PAGE):
        write(store, store.pages_at(row, index)[0], tokens[index * PAGE])
        node = cache.extend(node, tokens[index * PAGE : (index + 1) * PAGE], store.committed_bundle(row, index))
    if state and store.main.states is not None:
        checkpoint = store.main.states.checkpoint(row, len(tokens))
        assert checkpoint is not None
        assert cache.attach(node, checkpoint)
    store.close_row(row)
    cache.unlock(node)


def tiered(store: CacheStore) -> tuple[PrefixCache, LowerTier, HostBlocks]:
    blocks = make_blocks(store)
    tier = LowerTier(store, blocks, "model")
    return PrefixCache(store, tier), tier, blocks


@pytest.mark.parametrize("states", [False, True])
def test_what_is_evicted_is_found_below_and_comes_back_into_a_row(states: bool) -> None:
    store = make_store(states=states)
    cache, tier, _ = tiered(store)
    leave(store, cache, [1, 1, 2, 2, 3, 3], state=True)
    assert cache.evict(3) == 3
    assert store.num_free_pages == 8 - 3, "pages wait for their transfer"
    assert tier.num_leaving == 3
    assert tier.poll() == []
    assert store.num_free_pages == 8
    match = cache.find("", [1, 1, 2, 2, 3, 3])
    assert match.bundles == ()
    below = cache.find_below("", match, [1, 1, 2, 2, 3, 3, 4])
    assert len(below) == 3
    assert cache.find_below("another tenant", match, [1, 1, 2, 2, 3, 3, 4]) == ()
    row = store.open_row()
    store.grow_row(row, 8)
    returning = tier.fetch(row, 0, below)
    with pytest.raises(ValueError, match="to share its page"):
        store.committed_bundle(row, 0)
    assert tier.poll() == [(returning, None)]
    assert store.returned(row, returning.num_tokens, returning.state)
    tier.let_go(returning)
    assert [holds(store, store.pages_at(row, index)[0], index + 1) for index in range(3)] == [True] * 3
    assert store.committed(row) == 6
    assert store.committed_bundle(row, 2).place == 2
    store.close_row(row)
    assert store.num_free_pages == 8
    if store.main.states is not None:
        assert store.main.states.num_free == store.main.states.num_usable


def test_a_row_that_is_closed_while_its_blocks_come_leaves_its_pages_to_the_transfer() -> None:
    store = make_store(states=True)
    cache, tier, _ = tiered(store)
    leave(store, cache, [1, 1, 2, 2], state=True)
    cache.evict(2)
    tier.poll()
    row = store.open_row()
    store.grow_row(row, 4)
    below = cache.find_below("", cache.find("", [1, 1, 2, 2]), [1, 1, 2, 2])
    returning = tier.fetch(row, 0, below)
    store.close_row(row)
    assert store.num_free_pages == 8 - 2
    assert sorted(tier.holds()) == sorted(returning.pages)
    assert store.open_row() == row, "its row may be another's by then"
    assert not store.returned(row, returning.num_tokens, returning.state), "which gets nothing of it"
    assert tier.poll() == [(returning, None)]
    tier.let_go(returning)
    tier.let_go(returning)
    assert store.num_free_pages == 8
    assert store.main.states is not None
    assert store.main.states.num_free == store.main.states.num_usable


def test_a_closed_tier_gives_back_every_page_that_was_on_its_way() -> None:
    store = make_store(states=True)
    cache, tier, _ = tiered(store)
    leave(store, cache, [1, 1, 2, 2], state=True)
    leave(store, cache, [3, 3], state=True)
    cache.evict(1)
    assert tier.num_transfers == 1
    cache.close()
    assert (tier.num_transfers, store.num_free_pages, tier.usage().num_blocks) == (0, 8, 0)
    assert store.main.states is not None
    assert (store.main.states.num_checkpoints, store.main.states.num_free) == (0, store.main.states.num_usable)


def test_blocks_below_go_on_from_what_is_cached_and_are_their_tenants_alone() -> None:
    store = make_store()
    cache, tier, _ = tiered(store)
    tokens = [1, 1, 2, 2, 3, 3]
    leave(store, cache, tokens, tenant="one")
    cache.evict(2)
    tier.poll()
    here = cache.find("one", tokens)
    assert len(here.bundles) == 1
    assert len(cache.find_below("one", here, tokens)) == 2
    cache.evict(1)
    tier.poll()
    found = {tenant: cache.find_below(tenant, cache.find(tenant, tokens), tokens) for tenant in ("", "one", "two")}
    assert {tenant: len(blocks) for tenant, blocks in found.items()} == {"": 0, "one": 3, "two": 0}


def test_what_is_cleared_does_not_go_below() -> None:
    store = make_store()
    cache, _, blocks = tiered(store)
    leave(store, cache, [1, 1, 2, 2])
    assert cache.clear() == 2
    assert blocks.usage().num_blocks == 0
    assert store.num_free_pages == 8


def test_what_a_store_reports_twice_or_of_transfers_that_nobody_began_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = make_store(states=True)
    cache, tier, blocks = tiered(store)
    poll = blocks.poll

    def babble() -> list[tuple[TransferTicket, TransferEnd]]:
        ended = list(poll())
        again = [(ticket, TransferFailed("no, it did not")) for ticket, _ in ended]
        return [*ended, *again, *ended, (TransferTicket(10**6), TransferDone())]

    monkeypatch.setattr(blocks, "poll", babble)
    leave(store, cache, [1, 1, 2, 2], state=True)
    leave(store, cache, [3, 3], state=True)
    cache.evict(3)
    assert tier.poll() == []
    assert (store.num_free_pages, tier.counts.failed_offloads) == (8, 0)
    fetched = []
    for tokens in ([1, 1, 2, 2], [3, 3]):
        row = store.open_row()
        store.grow_row(row, len(tokens))
        fetched.append(tier.fetch(row, 0, cache.find_below("", cache.find("", tokens), tokens)))
    assert tier.poll() == [(each, None) for each in fetched]
    for each in fetched:
        tier.let_go(each)
        store.close_row(each.row)
    assert (tier.poll(), tier.num_transfers, store.num_free_pages) == ([], 0, 8)


def test_a_store_that_numbers_two_transfers_alike_or_counts_fewer_than_no_blocks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = make_store()
    cache, _, blocks = tiered(store)
    leave(store, cache, [1, 1, 2, 2])
    monkeypatch.setattr(blocks, "put", lambda *_: TransferTicket(1))
    assert cache.evict(1) == 1
    with pytest.raises(ValueError, match="expected a ticket of its own for each transfer"):
        cache.evict(1)
    assert store.num_free_pages == 8 - 2, "the store may still read both"
    monkeypatch.setattr(blocks, "lookup", lambda *_: -1)
    with pytest.raises(ValueError, match="to count the blocks that it has, got -1"):
        cache.find_below("", cache.find("", [1, 1]), [1, 1])


def test_blocks_of_another_store_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="use the same model"):
        LowerTier(make_store(), make_blocks(make_store(states=True)), "model")


def test_pages_that_are_shared_or_hold_entries_are_not_filled() -> None:
    store = make_store()
    row = store.open_row()
    store.grow_row(row, 8)
    store.fill_row(row, 3)
    with pytest.raises(ValueError, match="behind its entries"):
        store.hold_pages(row, 1, 3)
    store.hold_pages(row, 2, 3)
    with pytest.raises(ValueError, match="expected pages of row 1's own to fill"):
        store.hold_pages(row, 2, 3)
