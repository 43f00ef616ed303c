"""A batch is frozen, checks its shape, and every change of shape keeps each row's content under a new id."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.batch import (
    CAUSAL,
    FULL,
    PADDING_ROW,
    PADDING_SLOT,
    Batch,
    Lengths,
    MaskKind,
    PoolRows,
    RowMask,
)

CPU = torch.device("cpu")
POOLS = ("kv", "index")


@dataclass(frozen=True)
class RowCase:
    """One row to put in a batch."""

    query_len: int
    context_len: int
    mask: RowMask = CAUSAL
    logits: tuple[int, ...] = ()
    """Offsets of the wanted tokens within the row."""


def tree(query_len: int) -> RowMask:
    return RowMask(MaskKind.TREE, torch.ones(query_len, query_len, dtype=torch.bool).tril())


def make_batch(rows: Sequence[RowCase]) -> Batch:
    """A batch in which every token, slot, version and table row is a number of its own."""
    query_lens = [row.query_len for row in rows]
    offsets = list(itertools.accumulate(query_lens, initial=0))
    num_tokens = offsets[-1]
    wanted = [(offsets[index] + logit, index) for index, row in enumerate(rows) for logit in row.logits]
    return Batch(
        tokens=torch.arange(num_tokens) + 1000,
        positions=torch.tensor([row.context_len + i for row in rows for i in range(row.query_len)], dtype=torch.int64),
        query_lens=Lengths.known(query_lens, CPU),
        context_lens=Lengths.known([row.context_len for row in rows], CPU),
        masks=tuple(row.mask for row in rows),
        rows=tuple(range(11, 11 + len(rows))),
        table_rows=torch.arange(11, 11 + len(rows)),
        pools={
            key: PoolRows(
                table_id=50 + place,
                versions=tuple(range(100 * (place + 1), 100 * (place + 1) + len(rows))),
                write_slots=torch.arange(num_tokens) * 3 + 7000 * (place + 1),
            )
            for place, key in enumerate(POOLS)
        },
        logit_indices=torch.tensor([token for token, _ in wanted], dtype=torch.int64),
        logit_rows=tuple(row for _, row in wanted),
    )


@dataclass(frozen=True)
class Content:
    """Everything that a batch says of one row, free of where the row stands."""

    tokens: list[int]
    positions: list[int]
    lengths: tuple[tuple[int, int, int | None], ...]
    mask: int
    table_row: int
    pools: dict[str, tuple[int, int, list[int]]]
    logit_tokens: list[int]


def content(batch: Batch, row: int) -> Content:
    offsets = batch.query_offsets_host()
    tokens = slice(offsets[row], offsets[row + 1])
    return Content(
        tokens=batch.tokens[tokens].tolist(),
        positions=batch.positions[tokens].tolist(),
        lengths=tuple(
            (int(lengths.device[row]), lengths.bound[row], None if lengths.host is None else lengths.host[row])
            for lengths in (batch.query_lens, batch.context_lens)
        ),
        mask=id(batch.masks[row]),
        table_row=batch.rows[row],
        pools={
            key: (pool.table_id, pool.versions[row], pool.write_slots[tokens].tolist())
            for key, pool in batch.pools.items()
        },
        logit_tokens=[
            int(batch.tokens[index])
            for index, of in zip(batch.logit_indices.tolist(), batch.logit_rows, strict=True)
            if of == row
        ],
    )


def contents(batch: Batch) -> list[Content]:
    return [content(batch, row) for row in range(batch.num_rows)]


@st.composite
def row_cases(draw: st.DrawFn) -> RowCase:
    query_len = draw(st.integers(0, 4))
    mask = draw(st.sampled_from([CAUSAL, FULL, tree(query_len)]))
    logits = draw(st.sets(st.integers(0, query_len - 1))) if query_len else set()
    return RowCase(query_len, draw(st.integers(0, 40)), mask, tuple(sorted(logits)))


batches = st.lists(row_cases(), max_size=6).map(make_batch)
MIXED = [RowCase(3, 0, CAUSAL, (2,)), RowCase(1, 17, CAUSAL, (0,)), RowCase(2, 5, tree(2), (0, 1))]


def test_a_batch_and_its_values_are_frozen() -> None:
    batch = make_batch(MIXED)
    for value in (batch, batch.query_lens, batch.pools["kv"], batch.masks[0]):
        for field in fields(value):
            with pytest.raises(FrozenInstanceError):
                setattr(value, field.name, None)


def test_each_batch_has_an_id_of_its_own() -> None:
    assert make_batch(MIXED).batch_id != make_batch(MIXED).batch_id


def test_a_tree_mask_has_a_tree_and_no_other_mask_has_one() -> None:
    with pytest.raises(ValueError, match="expected a tree exactly for a TREE mask"):
        RowMask(MaskKind.TREE)
    with pytest.raises(ValueError, match=r"got MaskKind\.CAUSAL with tree"):
        RowMask(MaskKind.CAUSAL, torch.ones(1, 1, dtype=torch.bool))


def test_lengths_that_only_the_device_knows_refuse_to_be_read_on_the_host() -> None:
    unknown = Lengths(torch.tensor([3]), (5,), None)
    with pytest.raises(ValueError, match="expected lengths that the host knows"):
        unknown.exact()
    assert Lengths.known([3, 0], CPU).exact() == (3, 0)


WRONG_SHAPES: dict[str, tuple[dict[str, object], str]] = {
    "query_lens": ({"query_lens": Lengths.known([3, 1], CPU)}, "expected query_lens of length 3, got 2"),
    "context_lens": ({"context_lens": Lengths.known([0] * 4, CPU)}, "expected context_lens of length 3, got 4"),
    "masks": ({"masks": (CAUSAL,)}, "expected masks of length 3, got 1"),
    "positions": ({"positions": torch.zeros(5, dtype=torch.int64)}, "expected positions of length 6, got 5"),
    "logit_rows": ({"logit_rows": (0, 1, 2)}, "expected logit_rows of length 4, got 3"),
    "tokens": (
        {"query_lens": Lengths.known([3, 1, 3], CPU)},
        "expected at least 7 tokens for the rows, got 6",
    ),
    "versions": (
        {"pools": {"kv": PoolRows(1, (1, 2), torch.zeros(6, dtype=torch.int64))}},
        r"expected pools\[kv\]\.versions of length 3, got 2",
    ),
    "write_slots": (
        {"pools": {"kv": PoolRows(1, (1, 2, 3), torch.zeros(7, dtype=torch.int64))}},
        r"expected pools\[kv\]\.write_slots of length 6, got 7",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_SHAPES.values(), ids=WRONG_SHAPES.keys())
def test_a_batch_of_unequal_shapes_is_refused_by_field(changes: dict[str, object], message: str) -> None:
    batch = make_batch(MIXED)
    with pytest.raises(ValueError, match=message):
        replace(batch, **changes)  # type: ignore[arg-type]


INCONSISTENT: dict[str, dict[str, object]] = {
    "tree": {"masks": (CAUSAL, CAUSAL, tree(3))},
    "logit row": {"logit_rows": (0, 1, 2, 3)},
}


@pytest.mark.parametrize("changes", INCONSISTENT.values(), ids=INCONSISTENT.keys())
def test_a_batch_whose_fields_contradict_each_other_is_refused(changes: dict[str, object]) -> None:
    batch = make_batch(MIXED)
    with pytest.raises(ValueError, match="expected"):
        replace(batch, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bound", "host"), [((0, 17), (0, 17, 5)), ((0, 17, 5), (0, 17))], ids=["bound", "host"])
def test_lengths_that_contradict_each_other_are_refused(bound: tuple[int, ...], host: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected bounds and host copies of 3 lengths"):
        Lengths(torch.tensor([0, 17, 5]), bound, host)


def test_a_batch_with_another_content_has_another_id() -> None:
    batch = make_batch(MIXED)
    assert replace(batch, context_lens=Lengths.known([1, 1, 1], CPU)).batch_id != batch.batch_id


def test_query_offsets_count_tokens_row_by_row() -> None:
    assert make_batch(MIXED).query_offsets_host() == (0, 3, 4, 6)
    assert make_batch([]).query_offsets_host() == (0,)


def test_padding_adds_empty_rows_and_ownerless_tokens_at_the_end() -> None:
    padded = make_batch(MIXED).pad(5, 9)
    assert (padded.num_rows, padded.num_tokens) == (5, 9)
    assert padded.rows[3:] == (PADDING_ROW, PADDING_ROW)
    assert padded.masks[3:] == (CAUSAL, CAUSAL)
    for lengths in (padded.query_lens, padded.context_lens):
        assert lengths.exact()[3:] == lengths.bound[3:] == (0, 0)
        assert lengths.device[3:].tolist() == [0, 0]
    for pool in padded.pools.values():
        assert pool.versions[3:] == (0, 0)
        assert pool.write_slots[6:].tolist() == [PADDING_SLOT] * 3
    assert padded.tokens[6:].tolist() == padded.positions[6:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("sizes", [(2, 6), (3, 5)])
def test_padding_to_less_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"at least 3 rows and 6 tokens, got {sizes[0]} and {sizes[1]}"):
        make_batch(MIXED).pad(*sizes)


@settings(max_examples=60, deadline=None)
@given(batch=batches, extra_rows=st.integers(0, 3), extra_tokens=st.integers(0, 5))
def test_padding_never_changes_a_real_row(batch: Batch, extra_rows: int, extra_tokens: int) -> None:
    padded = batch.pad(batch.num_rows + extra_rows, batch.num_tokens + extra_tokens)
    assert padded.batch_id != batch.batch_id
    assert contents(padded)[: batch.num_rows] == contents(batch)
    assert padded.logit_rows == batch.logit_rows
    assert padded.logit_indices.tolist() == batch.logit_indices.tolist()


def test_padding_leaves_lengths_unknown_to_the_host_unknown() -> None:
    batch = make_batch(MIXED)
    unknown = replace(batch, context_lens=replace(batch.context_lens, bound=(9, 20, 9), host=None))
    padded = unknown.pad(4, 6)
    assert padded.context_lens.host is None
    assert padded.context_lens.bound == (9, 20, 9, 0)
    assert padded.context_lens.device.tolist() == [0, 17, 5, 0]


@settings(max_examples=60, deadline=None)
@given(batch=batches)
def test_taking_every_row_gives_the_same_content_under_a_new_id(batch: Batch) -> None:
    taken = batch.take(range(batch.num_rows))
    assert taken.batch_id != batch.batch_id
    assert contents(taken) == contents(batch)
    assert taken.tokens.tolist() == batch.tokens.tolist()
    assert taken.logit_indices.tolist() == batch.logit_indices.tolist()
    assert taken.logit_rows == batch.logit_rows


@settings(max_examples=80, deadline=None)
@given(batch=batches, data=st.data())
def test_taking_rows_in_any_order_keeps_each_rows_content(batch: Batch, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(batch.num_rows)))
    chosen = order[: data.draw(st.integers(0, batch.num_rows))]
    taken = batch.take(chosen)
    assert contents(taken) == [content(batch, row) for row in chosen]
    assert taken.num_tokens == sum(batch.query_lens.exact()[row] for row in chosen)
    assert len(taken.logit_rows) == sum(len(content(batch, row).logit_tokens) for row in chosen)


def test_taking_remaps_logits_to_the_new_places() -> None:
    taken = make_batch(MIXED).take([2, 0])
    assert taken.tokens.tolist() == [1004, 1005, 1000, 1001, 1002]
    wanted = set(zip(taken.logit_indices.tolist(), taken.logit_rows, strict=True))
    assert wanted == {(0, 0), (1, 0), (4, 1)}


@pytest.mark.parametrize("rows", [[0, 0], [-1], [3]], ids=repr)
def test_taking_a_row_twice_or_one_that_is_not_there_is_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="row"):
        make_batch(MIXED).take(rows)


def test_taking_from_a_padded_batch_leaves_padding_tokens_behind() -> None:
    batch = make_batch(MIXED)
    assert contents(batch.pad(5, 9).take([0, 1, 2])) == contents(batch)
    assert batch.pad(5, 9).take([0, 1, 2]).num_tokens == 6


def test_taking_keeps_lengths_that_the_host_does_not_know_unknown() -> None:
    batch = make_batch(MIXED)
    unknown = replace(batch, context_lens=replace(batch.context_lens, bound=(9, 20, 30), host=None))
    taken = unknown.take([2, 0])
    assert taken.context_lens.host is None
    assert taken.context_lens.bound == (30, 9)
    assert taken.context_lens.device.tolist() == [5, 0]


def test_taking_needs_query_lengths_that_the_host_knows() -> None:
    batch = make_batch(MIXED)
    unknown = replace(batch, query_lens=replace(batch.query_lens, host=None))
    with pytest.raises(ValueError, match="expected lengths that the host knows"):
        unknown.take([0])


@settings(max_examples=60, deadline=None)
@given(batch=batches, data=st.data())
def test_splitting_gives_two_new_batches_that_hold_every_row_once(batch: Batch, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, batch.num_rows))
    first, second = batch.split(at)
    assert first.num_rows == at
    assert contents(first) + contents(second) == contents(batch)
    assert torch.cat([first.tokens, second.tokens]).tolist() == batch.tokens.tolist()
    assert len({batch.batch_id, first.batch_id, second.batch_id}) == 3


@pytest.mark.parametrize("at", [-1, 4])
def test_splitting_outside_the_rows_is_refused(at: int) -> None:
    with pytest.raises(ValueError, match=f"expected a split between 0 and 3 rows, got {at}"):
        make_batch(MIXED).split(at)


def test_an_idle_batch_has_no_row_and_speaks_of_the_same_pools() -> None:
    batch = make_batch(MIXED)
    idle = batch.idle()
    assert (idle.num_rows, idle.num_tokens, len(idle.logit_rows)) == (0, 0, 0)
    assert idle.batch_id != batch.batch_id
    assert {key: pool.table_id for key, pool in idle.pools.items()} == {"kv": 50, "index": 51}
    assert idle.tokens.dtype == idle.logit_indices.dtype == torch.int64
    assert idle.query_offsets_host() == (0,)
