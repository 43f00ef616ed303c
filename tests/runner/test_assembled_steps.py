"""A batch, however it is assembled, is what a plain construction row by row gives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.cache.pools import CacheLimits
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec
from sightline.cache.store import CacheStore
from sightline.core.batch import Batch, RowWork, StepWork
from sightline.core.batch_memory import StaticMemory, StepShape
from sightline.core.errors import BatchError
from sightline.core.staging import StagingRing

CPU = torch.device("cpu")
PAGE_SIZE, MAX_ROWS, MAX_LEN = 4, 80, 24


@dataclass(frozen=True)
class RowCase:
    context_len: int
    num_known: int
    is_unread: bool
    num_logits: int


def rows_of_any_kind() -> st.SearchStrategy[list[RowCase]]:
    row = st.builds(
        lambda context, known, unread, logits: RowCase(context, known, unread, min(logits, known + unread)),
        st.integers(0, MAX_LEN - 5),
        st.integers(0, 3),
        st.booleans(),
        st.integers(0, 4),
    )
    return st.lists(row, max_size=6)


def decode_rows() -> st.SearchStrategy[list[RowCase]]:
    """Enough rows for the way that serves many at once, and few."""
    contexts = st.lists(st.integers(0, MAX_LEN - 1), max_size=MAX_ROWS)
    kinds = st.sampled_from(["known", "unread", "either"])

    def rows(lens: list[int], kind: str) -> list[RowCase]:
        unread = [kind == "unread" or (kind == "either" and length % 2 == 1) for length in lens]
        return [RowCase(length, int(not each), each, 1) for length, each in zip(lens, unread, strict=True)]

    return st.builds(rows, contexts, kinds)


def make_store() -> CacheStore:
    pools = tuple(PoolSpec(name, (PlaneSpec("x", (1,), torch.float32),), 1) for name in ("kv", "index"))
    limits = CacheLimits(1 + MAX_ROWS * MAX_LEN // PAGE_SIZE, PAGE_SIZE, MAX_ROWS, MAX_LEN)
    return CacheStore([GroupCacheSpec("group", pools)], limits, CPU)


def open_rows(store: CacheStore, lens: list[int]) -> list[int]:
    """Rows with pages for so many tokens, in shuffled order: every row grows by one page in its turn."""
    rows = [store.open_row() for _ in lens][::-1]
    for pages in range(1, MAX_LEN // PAGE_SIZE + 1):
        for row, length in zip(rows, lens, strict=True):
            if (pages - 1) * PAGE_SIZE < length:
                store.grow_row(row, min(length, pages * PAGE_SIZE))
    return rows


def made_work(cases: list[RowCase], rows: list[int], sources: list[int]) -> list[RowWork]:
    left = iter(sources)
    return [
        RowWork(
            row,
            [100 * row + place for place in range(case.num_known)],
            case.context_len,
            case.num_logits,
            unread=next(left) if case.is_unread else None,
        )
        for case, row in zip(cases, rows, strict=True)
    ]


def expected_numbers(work: list[RowWork], store: CacheStore, chosen: list[int], size: int) -> dict[str, object]:
    """The batch, one token after the other."""
    tokens, positions, logits, logit_rows = list[int](), list[int](), list[int](), list[int]()
    slots: dict[str, list[int]] = {pool.key: [] for pool in store.pools}
    lens = []
    for index, row in enumerate(work):
        new = [*row.tokens, *([] if row.unread is None else [chosen[row.unread]])]
        lens.append(len(new))
        for number, token in enumerate(new):
            if len(new) - number <= row.num_logits:
                logits.append(len(tokens))
                logit_rows.append(index)
            entry = row.context_len + number
            tokens.append(token)
            positions.append(entry)
            for pool in store.pools:
                page = pool.table.page(row.table_row, entry // PAGE_SIZE)
                slots[pool.key].append(page * PAGE_SIZE + entry % PAGE_SIZE)
    num_rows, num_tokens = size - len(work), size - len(tokens)
    rows = [row.table_row for row in work] + [0] * num_rows
    return {
        "tokens": tokens + [0] * num_tokens,
        "positions": positions + [0] * num_tokens,
        "query_lens": (lens + [0] * num_rows,) * 2,
        "context_lens": ([row.context_len for row in work] + [0] * num_rows,) * 2,
        "rows": (rows, rows),
        "logits": (logits, logits, logit_rows),
        "versions": {pool.key: [pool.table.version(row) for row in rows] for pool in store.pools},
        "slots": {key: each + [0] * num_tokens for key, each in slots.items()},
    }


def found_numbers(batch: Batch) -> dict[str, object]:
    places = list(batch.logit_places)
    return {
        "tokens": batch.tokens.tolist(),
        "positions": batch.positions.tolist(),
        "query_lens": (batch.query_lens.device.tolist(), list(batch.query_lens.exact())),
        "context_lens": (batch.context_lens.device.tolist(), list(batch.context_lens.exact())),
        "rows": (list(batch.rows), batch.table_rows.tolist()),
        "logits": (batch.logit_indices.tolist()[: len(places)], places, list(batch.logit_rows)),
        "versions": {key: list(pool.versions) for key, pool in batch.pools.items()},
        "slots": {key: pool.write_slots.tolist() for key, pool in batch.pools.items()},
    }


@settings(max_examples=120, deadline=None)
@given(
    cases=st.one_of(rows_of_any_kind(), decode_rows()),
    extra=st.integers(0, 5),
    order=st.randoms(use_true_random=False),
    in_order=st.booleans(),
)
def test_a_batch_is_the_one_that_is_built_token_by_token(
    cases: list[RowCase], extra: int, order: object, in_order: bool
) -> None:
    store = make_store()
    rows = open_rows(store, [case.context_len + case.num_known + case.is_unread for case in cases])
    num_unread = sum(case.is_unread for case in cases)
    sources = list(range(num_unread if in_order else num_unread + 2))
    if not in_order:
        order.shuffle(sources)  # type: ignore[attr-defined]
    chosen = [7000 + place for place in range(len(sources))]
    work = made_work(cases, rows, sources)
    num_tokens = sum(case.num_known + case.is_unread for case in cases)
    on_device = torch.tensor(chosen, dtype=torch.int64)
    eager = Batch(StepWork.of(work), store.pools, CPU, on_device)
    size = max(len(cases), num_tokens)
    expected = expected_numbers(work, store, chosen, size)
    assert found_numbers(eager.pad(size, size)) == expected
    shape = StepShape(size + extra + 1, 4)
    ring = StagingRing.of(StaticMemory.num_numbers(shape, len(store.pools)), CPU)
    memory = StaticMemory(shape, len(store.pools), CPU, ring)
    memory._block.fill_(-9)
    inside = Batch.inside(StepWork.of(work), store.pools, memory, on_device)
    assert found_numbers(inside) == expected_numbers(work, store, chosen, shape.size)


@pytest.mark.parametrize("num_rows", [3, 64])
def test_many_rows_are_refused_for_the_same_reasons_as_few(num_rows: int) -> None:
    store = make_store()
    rows = open_rows(store, [6] * num_rows)

    def refusal(context_len: int) -> str:
        work = [RowWork(row, [1], 5, 1) for row in rows]
        work[2] = RowWork(rows[2], [1], context_len, 1)
        with pytest.raises(BatchError) as caught:
            Batch(StepWork.of(work), store.pools, CPU)
        assert caught.value.row == 2
        return str(caught.value)

    assert f"enough for 9 tokens in row {rows[2]} of pool group.kv, got 2" in refusal(8)
    assert f"enough for {MAX_LEN + 1} tokens in row {rows[2]}" in refusal(MAX_LEN)
    store.pools[1].allocator.share([store.pools[1].table.page(rows[2], 1)])
    assert f"row {rows[2]}'s alone where it writes, got page" in refusal(5)
    assert "of pool group.index with 2 owners" in refusal(5)
