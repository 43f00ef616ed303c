"""Every row with tokens is in one tile, tiles are not wasteful, and what they read and see is the row's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.attention.oracle.attention import visible_keys
from sightline.attention.shared import tiles as tiles_module
from sightline.attention.shared.tiles import (
    RowSpan,
    fill_bias,
    fill_slots,
    is_plain_causal,
    needs_bias,
    pack_tiles,
    row_spans,
)
from sightline.attention.spec import SoftmaxSpec
from sightline.cache.table import PageTable
from sightline.core.batch import CAUSAL, CONTEXT, FULL, Batch, MaskKind, RowMask, RowWork, StepWork
from support.fake_pages import FakePages

CPU = torch.device("cpu")
MASKS = {MaskKind.CAUSAL: CAUSAL, MaskKind.FULL: FULL, MaskKind.CONTEXT: CONTEXT}
Shape = tuple[int, int, MaskKind]
"""(context_len, query_len, mask) of a row."""


def spec(window: int | None) -> SoftmaxSpec:
    return SoftmaxSpec(num_q_heads=2, num_kv_heads=1, head_dim=4, scale=1.0, window=window)


def make_batch(shapes: Sequence[Shape]) -> Batch:
    """A batch that has the rows' lengths and masks; trees are chains, each token seeing every other one before it."""
    work = [
        RowWork(row + 1, [1] * query_len, context_len, False, mask(kind, query_len))
        for row, (context_len, query_len, kind) in enumerate(shapes)
    ]
    return Batch(StepWork.of(work), (FakePages("kv", 1),), CPU)


def mask(kind: MaskKind, query_len: int) -> RowMask:
    if kind is not MaskKind.TREE:
        return MASKS[kind]
    distance = torch.arange(query_len).view(-1, 1) - torch.arange(query_len).view(1, -1)
    return RowMask(MaskKind.TREE, (distance >= 0) & (distance % 2 == 0))


shapes = st.tuples(
    st.one_of(st.just(0), st.integers(0, 90)),
    st.one_of(st.just(1), st.integers(0, 6)),
    st.sampled_from([MaskKind.CAUSAL, MaskKind.CAUSAL, MaskKind.FULL, MaskKind.TREE]),
)
windows = st.one_of(st.none(), st.integers(1, 40))


def walk(table: PageTable, row: int, page_size: int) -> list[int]:
    return [page * page_size + offset for page in table.owned(row) for offset in range(page_size)]


@settings(max_examples=120, deadline=None)
@given(rows=st.lists(shapes, max_size=24), window=windows, spare=st.integers(0, 300), transient=st.booleans())
def test_tiles_partition_the_rows_and_fit_and_waste_less_than_half(
    rows: list[Shape], window: int | None, spare: int, transient: bool
) -> None:
    if transient:
        rows = [(0, query_len, kind) for _, query_len, kind in rows]
    spans = row_spans(make_batch(rows), window)
    max_keys = max((span.num_keys for span in spans), default=1) + spare
    tiles = pack_tiles(spans, max_keys, transient=transient)
    packed = [span.row for tile in tiles for span in tile]
    assert sorted(packed) == [row for row, (_, query_len, _) in enumerate(rows) if query_len > 0]
    for tile in tiles:
        longest = max(span.num_keys for span in tile)
        assert len(tile) * longest <= max_keys
        assert 2 * sum(span.num_keys for span in tile) > len(tile) * longest, "half or more of the tile is padding"
        assert len({(span.query_len, span.kind) for span in tile}) == 1
        assert transient or len({span.is_fresh for span in tile}) == 1
        assert tile[0].kind is not MaskKind.TREE or len(tile) == 1


def decode_spans(num_keys: Sequence[int]) -> list[RowSpan]:
    return [RowSpan(row, row, 1, keys - 1, 0, MaskKind.CAUSAL) for row, keys in enumerate(num_keys)]


def test_decode_rows_of_every_length_need_one_tile_for_each_power_of_two() -> None:
    tiles = pack_tiles(decode_spans(range(1, 1025)), 1 << 40, transient=False)
    assert len(tiles) == 11
    assert sum(len(tile) for tile in tiles) == 1024


def test_decode_rows_of_like_lengths_are_one_tile_in_token_order() -> None:
    spans = decode_spans([300, 257, 511, 256, 400])
    assert pack_tiles(spans[::-1], 1 << 20, transient=False) == (tuple(spans),)


def test_a_row_as_long_as_the_lease_has_a_tile_of_its_own() -> None:
    tiles = pack_tiles(decode_spans([100, 100, 64]), 100, transient=False)
    assert [len(tile) for tile in tiles] == [1, 1, 1]


def test_masks_that_would_be_too_large_are_split_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [RowSpan(row, 8 * row, 8, 92, 0, MaskKind.CAUSAL) for row in range(5)]
    monkeypatch.setattr(tiles_module, "MAX_BIAS_ELEMENTS", 8 * 100 * 2)
    assert [len(tile) for tile in pack_tiles(spans, 1 << 40, transient=False)] == [2, 2, 1]
    monkeypatch.setattr(tiles_module, "MAX_BIAS_ELEMENTS", 10)
    assert [len(tile) for tile in pack_tiles(spans, 1 << 40, transient=False)] == [1] * 5


def test_a_first_chunk_reads_the_step_and_a_later_one_the_cache() -> None:
    shapes_of_rows = [(0, 4, MaskKind.CAUSAL), (4, 4, MaskKind.CAUSAL), (0, 1, MaskKind.CAUSAL)]
    fresh, later, decode = row_spans(make_batch(shapes_of_rows), None)
    assert (fresh.is_fresh, later.is_fresh, decode.is_fresh) == (True, False, False)
    assert len(pack_tiles([fresh, later, decode], 1 << 20, transient=False)) == 3


def test_rows_without_tokens_have_no_span() -> None:
    spans = row_spans(make_batch([(5, 0, MaskKind.CAUSAL), (3, 2, MaskKind.FULL), (0, 0, MaskKind.CAUSAL)]), None)
    assert spans == (RowSpan(row=1, first_token=0, query_len=2, context_len=3, first_key=0, kind=MaskKind.FULL),)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(shapes, min_size=1, max_size=4), window=st.integers(1, 40))
def test_a_span_skips_exactly_the_keys_that_no_query_sees(rows: list[Shape], window: int) -> None:
    batch = make_batch(rows)
    for span in row_spans(batch, window):
        positions = batch.positions[span.first_token : span.first_token + span.query_len]
        seen = visible_keys(spec(window), batch.masks[span.row], span.context_len, positions).any(dim=0)
        assert not seen[: span.first_key].any(), "a key that a query sees is skipped"
        assert seen[span.first_key], "a key that no query sees is gathered"
        assert span.num_keys == span.context_len + span.query_len - span.first_key


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    query_len=st.integers(1, 4),
    window=windows,
    page_size=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_slots_are_each_rows_own_entries_in_order_and_its_last_one_beyond(
    contexts: list[int], query_len: int, window: int | None, page_size: int, seed: int
) -> None:
    pages = iter((torch.randperm(300, generator=torch.Generator().manual_seed(seed)) + 1).tolist())
    table = PageTable(len(contexts), 40, CPU)
    for row, context_len in enumerate(contexts, start=1):
        table.append(row, [next(pages) for _ in range(-(-(context_len + query_len) // page_size))])
    batch = make_batch([(context_len, query_len, MaskKind.CAUSAL) for context_len in contexts])
    spans = row_spans(batch, window)
    longest = max(span.num_keys for span in spans)
    out = torch.full((len(spans), longest), -1)
    fill_slots(spans, table, batch.rows, page_size, out)
    for span, slots in zip(spans, out.tolist(), strict=True):
        own = walk(table, batch.rows[span.row], page_size)[: span.context_len + query_len]
        assert slots[: span.num_keys] == own[span.first_key :]
        assert slots[span.num_keys :] == [own[-1]] * (longest - span.num_keys)


@settings(max_examples=100, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    query_len=st.integers(1, 6),
    kind=st.sampled_from(MaskKind),
    window=windows,
)
def test_the_bias_shows_what_the_oracle_shows_and_is_left_out_only_where_all_is_seen(
    contexts: list[int], query_len: int, kind: MaskKind, window: int | None
) -> None:
    batch = make_batch([(context_len, query_len, kind) for context_len in contexts])
    spans = row_spans(batch, window)
    for tile in [(span,) for span in spans] if kind is MaskKind.TREE else [spans]:
        longest = max(span.num_keys for span in tile)
        bias = torch.full((len(tile), 1, query_len, longest), torch.nan)
        fill_bias(tile, spec(window), batch, bias)
        expected = torch.full_like(bias, -torch.inf)
        for place, span in enumerate(tile):
            positions = batch.positions[span.first_token : span.first_token + query_len]
            seen = visible_keys(spec(window), batch.masks[span.row], span.context_len, positions)
            expected[place, 0, :, : span.num_keys][seen[:, span.first_key : span.stop_key]] = 0.0
        assert torch.equal(bias, expected)
        if not needs_bias(tile, spec(window)):
            assert expected.count_nonzero() == 0, "a mask was needed and left out"


@settings(max_examples=60, deadline=None)
@given(
    context_len=st.integers(0, 1),
    query_len=st.integers(1, 6),
    kind=st.sampled_from([MaskKind.CAUSAL, MaskKind.FULL]),
    window=st.one_of(st.none(), st.integers(1, 8)),
)
def test_a_tile_is_plain_causal_only_where_its_mask_is_a_triangle(
    context_len: int, query_len: int, kind: MaskKind, window: int | None
) -> None:
    batch = make_batch([(context_len, query_len, kind)])
    seen = visible_keys(spec(window), batch.masks[0], context_len, batch.positions)
    triangle = context_len == 0 and query_len > 1 and torch.equal(seen, torch.ones_like(seen).tril())
    assert is_plain_causal(row_spans(batch, window), spec(window)) == (triangle and kind is MaskKind.CAUSAL)


def test_full_rows_need_a_bias_exactly_where_a_window_cuts_them() -> None:
    batch = make_batch([(0, 6, MaskKind.FULL)])
    assert [needs_bias(row_spans(batch, window), spec(window)) for window in (None, 6, 5)] == [False, False, True]


def test_decode_rows_of_one_length_need_no_bias() -> None:
    spans = row_spans(make_batch([(9, 1, MaskKind.CAUSAL)] * 3), None)
    assert not needs_bias(spans, spec(None))
    assert not needs_bias(row_spans(make_batch([(9, 1, MaskKind.CAUSAL)]), 4), spec(4))
    assert needs_bias(row_spans(make_batch([(9, 1, MaskKind.CAUSAL), (8, 1, MaskKind.CAUSAL)]), None), spec(None))
