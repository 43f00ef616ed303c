"""A batch says of each row exactly what the page tables and the work say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.cache.layout import Layout, arrange_free_pages, walk_slots
from sightline.cache.pools import CacheLimits
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec
from sightline.cache.store import CacheStore
from sightline.core.batch import CAUSAL, MaskKind, RowMask, RowWork
from sightline.core.errors import BatchError
from sightline.runner.batching import assemble, assemble_transient

CPU = torch.device("cpu")
POOL = PoolSpec("kv", (PlaneSpec("k", (1,), torch.float32),), num_layers=1)
SPECS = (GroupCacheSpec("group0", (POOL,)), GroupCacheSpec("group1", (POOL,)))


def make_store(page_size: int = 4, seed: int = 1) -> CacheStore:
    store = CacheStore(SPECS, CacheLimits(200, page_size, 8, 64), CPU)
    arrange_free_pages(store, Layout.SHUFFLED, seed)
    return store


def open_row(store: CacheStore, num_tokens: int) -> int:
    row = store.open_row()
    store.grow_row(row, num_tokens)
    return row


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 9)), max_size=6),
    page_size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_slots_positions_and_logits_are_those_that_walking_the_pages_gives(
    lengths: list[tuple[int, int, int]], page_size: int, seed: int
) -> None:
    store = make_store(page_size, seed)
    work = []
    for number, (context_len, query_len, num_logits) in enumerate(lengths):
        row = open_row(store, context_len + query_len)
        tokens = [100 * number + index for index in range(query_len)]
        work.append(RowWork(row, tokens, context_len, min(num_logits, query_len)))
    batch = assemble(work, store)
    assert batch.tokens.tolist() == [token for row in work for token in row.tokens]
    assert batch.positions.tolist() == [row.context_len + index for row in work for index in range(len(row.tokens))]
    assert batch.query_lens.exact() == tuple(query_len for _, query_len, _ in lengths)
    assert batch.context_lens.exact() == tuple(context_len for context_len, _, _ in lengths)
    assert batch.rows == tuple(row.table_row for row in work)
    assert batch.pools.keys() == {"group0.kv", "group1.kv"}
    for pool in store.pools:
        expected = [
            slot
            for row in work
            for slot in walk_slots(pool, row.table_row, row.context_len + len(row.tokens))[row.context_len :]
        ]
        assert batch.pools[pool.key].write_slots.tolist() == expected
        assert batch.pools[pool.key].table_id == pool.table.table_id
        assert batch.pools[pool.key].versions == pool.table.versions(batch.rows)
    assert batch.logit_rows == tuple(index for index, row in enumerate(work) for _ in range(row.num_logits))
    wanted = [token for row in work for token in row.tokens[len(row.tokens) - row.num_logits :]]
    assert batch.tokens[batch.logit_indices].tolist() == wanted
    assert all(tensor.dtype == torch.int64 for tensor in (batch.tokens, batch.positions, batch.logit_indices))


def test_the_pools_of_two_groups_have_slots_of_their_own() -> None:
    store = make_store()
    store.pools[1].allocator.allocate(3)
    batch = assemble([RowWork(open_row(store, 9), [1] * 9, 0, True)], store)
    first, second = (batch.pools[pool.key].write_slots.tolist() for pool in store.pools)
    assert first != second


def test_a_batch_keeps_the_versions_of_when_it_was_made() -> None:
    store = make_store()
    row = open_row(store, 4)
    batch = assemble([RowWork(row, [1, 2], 0, True)], store)
    before = store.pools[0].table.version(row)
    store.grow_row(row, 8)
    assert store.pools[0].table.version(row) == before, "growth takes no page away"
    store.trim_row(row, 4)
    assert batch.pools["group0.kv"].versions == (before,)
    assert store.pools[0].table.version(row) != before


def test_masks_and_given_positions_are_kept() -> None:
    store = make_store()
    mask = RowMask(MaskKind.TREE, torch.eye(3, dtype=torch.bool))
    rows = [open_row(store, 8), open_row(store, 8)]
    work = [RowWork(rows[0], [7, 8, 9], 5, True, mask, (5, 6, 6)), RowWork(rows[1], [4], 2, True)]
    batch = assemble(work, store)
    assert batch.masks == (mask, CAUSAL)
    assert batch.positions.tolist() == [5, 6, 6, 2]
    slots = walk_slots(store.pools[0], rows[0], 8)[5:]
    assert batch.pools["group0.kv"].write_slots.tolist()[:3] == slots, "siblings have slots of their own"


def test_no_work_is_a_batch_of_no_rows() -> None:
    batch = assemble([], make_store())
    assert (batch.num_rows, batch.num_tokens, batch.logit_indices.tolist()) == (0, 0, [])
    assert batch.logit_indices.dtype == torch.int64


def test_a_transient_batch_speaks_of_no_pool() -> None:
    batch = assemble_transient([RowWork(0, [5, 6], 0, True), RowWork(0, [7], 0, False)], CPU)
    assert batch.pools == {}
    assert batch.tokens.tolist() == [5, 6, 7]
    assert batch.positions.tolist() == [0, 1, 0]
    assert (batch.logit_rows, batch.logit_indices.tolist()) == ((0,), [1])


@pytest.mark.parametrize("owned", [0, 4])
def test_a_row_without_pages_for_its_tokens_is_refused(owned: int) -> None:
    store = make_store()
    row = open_row(store, owned)
    with pytest.raises(ValueError, match="page"):
        assemble([RowWork(row, [1] * 5, 0, True)], store)


def test_taking_rows_keeps_all_the_logits_that_they_want() -> None:
    work = [RowWork(0, [5, 6, 7], 0, 2), RowWork(0, [8], 0, 0), RowWork(0, [9, 10], 0, 2)]
    taken = assemble_transient(work, CPU).take([2, 0])
    assert taken.tokens[taken.logit_indices].tolist() == [9, 10, 6, 7]
    assert taken.logit_rows == (0, 0, 1, 1)


@pytest.mark.parametrize("wanted", [-1, 3])
def test_logits_of_more_tokens_than_the_row_has_are_refused(wanted: int) -> None:
    with pytest.raises(
        ValueError, match=f"num_logits of row 0 to be 0 to 2, the number of its new tokens, got {wanted}"
    ):
        assemble_transient([RowWork(0, [5, 6], 0, wanted)], CPU)


@pytest.mark.parametrize("others", [0, 1])
def test_logits_of_a_row_without_tokens_are_refused(others: int) -> None:
    store = make_store()
    work = [RowWork(open_row(store, 4), [1, 2], 0, False) for _ in range(others)]
    with pytest.raises(ValueError, match="token"):
        assemble([*work, RowWork(open_row(store, 4), [], 2, num_logits=True)], store)


def test_a_row_that_would_write_into_a_page_of_others_is_refused() -> None:
    store = make_store()
    row = open_row(store, 8)
    store.fill_row(row, 4)
    store.share(store.committed_bundle(row, 0), "another")
    assemble([RowWork(row, [1] * 4, 4, True)], store)
    with pytest.raises(ValueError, match=r"row 1's alone where it writes, got page .* with 2 owners; copy it"):
        assemble([RowWork(row, [1] * 5, 3, True)], store)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6),
    page_size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_a_step_of_decode_rows_is_what_they_are_beside_a_prompt(
    rows: list[tuple[int, bool]], page_size: int, seed: int
) -> None:
    """Steps of decode rows alone are derived in a shorter way."""
    store = make_store(page_size, seed)
    work = []
    for number, (context_len, is_pending) in enumerate(rows):
        row = open_row(store, context_len + 1)
        tokens = [] if is_pending else [100 + number]
        work.append(RowWork(row, tokens, context_len, 1, unread=number if is_pending else None))
    prompt = RowWork(open_row(store, 3), [7, 8, 9], 0, 0)
    chosen = torch.arange(50, 50 + len(rows))
    alone, beside = assemble(work, store, chosen), assemble([*work, prompt], store, chosen)
    count = len(work)
    for name in ("tokens", "positions", "table_rows"):
        assert getattr(alone, name).tolist() == getattr(beside, name)[:count].tolist()
    for name in ("logit_rows", "logit_places"):
        assert getattr(alone, name) == getattr(beside, name)
    assert alone.logit_indices.tolist() == beside.logit_indices.tolist()
    assert alone.context_lens.exact() == beside.context_lens.exact()[:count]
    for key, pool in alone.pools.items():
        assert pool.write_slots.tolist() == beside.pools[key].write_slots[:count].tolist()


@pytest.mark.parametrize(
    ("work", "named"),
    [
        (RowWork(1, [5], 2, 2), "num_logits of row 1 to be 0 to 1"),
        (RowWork(1, [5], -1, 1), "context_lens of row 1 to be at least 0"),
        (RowWork(1, [5], 2, 1, CAUSAL, [9]), "positions of row 1 to be none"),
    ],
)
def test_a_decode_row_that_contradicts_itself_is_refused_among_others(work: RowWork, named: str) -> None:
    store = make_store()
    open_row(store, 8), open_row(store, 8)
    with pytest.raises(BatchError, match=named):
        assemble([RowWork(2, [4], 1, 1), work], store)
