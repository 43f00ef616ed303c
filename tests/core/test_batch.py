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
    MaskKind,
    RowMask,
    RowWork,
    StepWork,
)
from sightline.core.errors import BatchError
from sightline.core.lengths import Lengths
from support.fake_pages import FakePages
from support.forged import forged

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RowCase:
    """One row to put in a batch."""

    query_len: int
    context_len: int
    mask: RowMask = CAUSAL
    num_logits: int = 0


def tree(query_len: int) -> RowMask:
    return RowMask(MaskKind.TREE, torch.ones(query_len, query_len, dtype=torch.bool).tril())


SOURCES = (FakePages("kv", 50, 0), FakePages("index", 51, 100_000))


def make_work(rows: Sequence[RowCase]) -> tuple[RowWork, ...]:
    firsts = itertools.accumulate((row.query_len for row in rows), initial=1000)
    return tuple(
        RowWork(index + 11, range(first, first + row.query_len), row.context_len, row.num_logits, row.mask)
        for index, (row, first) in enumerate(zip(rows, firsts, strict=False))
    )


def make_batch(rows: Sequence[RowCase]) -> Batch:
    """A batch in which every token, slot, version and table row is a number of its own."""
    return Batch(StepWork.of(make_work(rows)), SOURCES, CPU)


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
    return RowCase(query_len, draw(st.integers(0, 40)), mask, draw(st.integers(0, query_len)))


batches = st.lists(row_cases(), max_size=6).map(make_batch)
MIXED = [RowCase(3, 0, CAUSAL, 1), RowCase(1, 17, CAUSAL, 1), RowCase(2, 5, tree(2), 2)]


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
    assert Lengths(torch.tensor([3, 0]), (3, 0), (3, 0)).exact() == (3, 0)


DERIVED = sorted({field.name for field in fields(Batch)} - {"work", "sources", "device", "chosen", "awaited"})


@pytest.mark.parametrize("name", DERIVED)
def test_a_field_that_follows_from_others_cannot_be_replaced_alone(name: str) -> None:
    batch = make_batch(MIXED)
    with pytest.raises(ValueError, match=f"field {name} is declared with"):
        replace(batch, **{name: getattr(make_batch(MIXED[:1]), name)})


def wrong_work(case: RowCase = MIXED[2], **changes: object) -> RowWork:
    [work] = make_work([case])
    return replace(work, **changes)  # type: ignore[arg-type]


CONTRADICTIONS: dict[str, tuple[RowWork, str, str]] = {
    "too many logits": (wrong_work(num_logits=3), "num_logits", "0 to 2, the number of its new tokens"),
    "fewer than no logits": (wrong_work(num_logits=-1), "num_logits", "0 to 2"),
    "a context below 0": (wrong_work(context_len=-1), "context_lens", "at least 0"),
    "a tree of another size": (wrong_work(mask=tree(3)), "masks", "a tree of 2 × 2 booleans"),
    "a tree of numbers": (
        wrong_work(mask=RowMask(MaskKind.TREE, torch.ones(2, 2))),
        "masks",
        "a tree of 2 × 2 booleans",
    ),
    "positions without a tree": (wrong_work(mask=CAUSAL, positions=(5, 6)), "positions", "none: only a tree"),
    "too few positions": (wrong_work(positions=(5,)), "positions", "2 positions, one for each token, from 5 to 6"),
    "positions in the context": (wrong_work(positions=(4, 5)), "positions", "from 5 to 6"),
    "positions beyond the row": (wrong_work(positions=(5, 7)), "positions", "from 5 to 6"),
    "the padding row": (wrong_work(table_row=PADDING_ROW), "rows", "a page-table row from 1 to 64"),
    "a row below the first": (wrong_work(table_row=-1), "rows", "a page-table row from 1 to 64"),
    "a row beyond the last": (wrong_work(table_row=65), "rows", "a page-table row from 1 to 64"),
    "a row twice": (wrong_work(table_row=12), "rows", "each page-table row once"),
}


@pytest.mark.parametrize(("work", "field", "expected"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_facts_that_contradict_each_other_are_refused_by_field_and_row(
    work: RowWork, field: str, expected: str
) -> None:
    others = make_work(MIXED)[:2]
    with pytest.raises(BatchError, match="got") as caught:
        Batch(StepWork.of((*others, work)), SOURCES, CPU)
    assert (caught.value.field, caught.value.row) == (field, 2)
    assert expected in str(caught.value.expected)


def test_a_context_without_pools_is_refused() -> None:
    with pytest.raises(BatchError, match="expected context_lens of row 1 to be 0 in a batch without pools, got 17"):
        Batch(StepWork.of(make_work(MIXED)), (), CPU)


def test_replacing_a_fact_derives_everything_that_follows_from_it_again() -> None:
    batch = make_batch(MIXED)
    first, second, third = (batch.work.row(index) for index in range(3))
    longer = replace(batch, work=StepWork.of((first, replace(second, context_len=18), third)))
    assert longer.positions.tolist() == [0, 1, 2, 18, 5, 6]
    assert longer.context_lens.exact() == (0, 18, 5)
    assert longer.context_lens.device.tolist() == [0, 18, 5]
    assert longer.pools["kv"].write_slots.tolist() == [11000, 11001, 11002, 12018, 13005, 13006]


def test_tokens_that_a_step_in_flight_chooses_are_taken_from_the_device() -> None:
    work = make_work(MIXED)
    chosen = torch.tensor([70, 77, 71])
    rows = (work[0], replace(work[1], tokens=(), unread=1), work[2])
    batch = Batch(StepWork.of(rows), SOURCES, CPU, chosen)
    assert batch.query_lens.exact() == (3, 1, 2)
    assert batch.tokens.tolist() == [1000, 1001, 1002, 77, 1004, 1005]
    assert batch.take([1, 0]).tokens.tolist() == [77, 1000, 1001, 1002]
    assert replace(batch).tokens.tolist() == batch.tokens.tolist()
    longer = replace(batch, work=StepWork.of((replace(work[0], unread=2), *rows[1:])))
    assert longer.tokens.tolist() == [1000, 1001, 1002, 71, 77, 1004, 1005]
    assert chosen.tolist() == [70, 77, 71]


@pytest.mark.parametrize(
    ("places", "expected"),
    [([0, 1, 2], [5, 6, 7]), ([2, 0, 1], [7, 5, 6]), ([0, 1], [5, 6]), ([1, 2], [6, 7]), ([2], [7])],
    ids=["all", "in another order", "the first", "the last", "one"],
)
def test_decode_rows_go_on_with_their_own_tokens(places: list[int], expected: list[int]) -> None:
    rows = tuple(RowWork(index + 1, [], 4, 1, unread=place) for index, place in enumerate(places))
    chosen = torch.tensor([5, 6, 7])
    assert Batch(StepWork.of(rows), SOURCES, CPU, chosen).tokens.tolist() == expected
    known = RowWork(9, [3], 4, 1)
    assert Batch(StepWork.of((known, *rows)), SOURCES, CPU, chosen).tokens.tolist() == [3, *expected]
    assert Batch(StepWork.of((*rows, known)), SOURCES, CPU, chosen).tokens.tolist() == [*expected, 3]


@pytest.mark.parametrize(
    ("unread", "num_chosen", "message"),
    [
        ([0, 2], 2, r"among the 2 tokens that are being chosen, got \[0, 2\]"),
        ([-1, 1], 2, "among the 2 tokens"),
        ([1, 1], 2, "each token that is being chosen once"),
        ([0, 1], None, "among the 0 tokens"),
    ],
)
def test_a_row_continues_a_token_that_is_chosen_and_its_own(
    unread: list[int], num_chosen: int | None, message: str
) -> None:
    rows = tuple(RowWork(index + 1, [], 4, 1, unread=place) for index, place in enumerate(unread))
    chosen = None if num_chosen is None else torch.zeros(num_chosen, dtype=torch.int64)
    with pytest.raises(BatchError, match=message):
        Batch(StepWork.of(rows), SOURCES, CPU, chosen)


def test_rows_are_not_taken_from_behind_padding() -> None:
    padded = make_batch(MIXED).pad(5, 9)
    with pytest.raises(ValueError, match="expected padding rows, from 3 on, behind the others"):
        padded.take([3, 0])
    assert padded.take([2, 3]).num_rows == 2


def test_a_row_of_work_that_is_changed_later_changes_no_batch() -> None:
    work = make_work(MIXED)
    batch = Batch(StepWork.of(work), SOURCES, CPU)
    expected = batch.take([0]).logit_indices.tolist()
    work[0].num_logits, work[0].tokens = 0, [1]
    assert batch.take([0]).logit_indices.tolist() == expected


def test_a_part_has_the_tokens_of_its_rows() -> None:
    with pytest.raises(BatchError, match="those of the part's rows"):
        make_batch(MIXED).part(slice(1, 3), slice(0, 3))


def test_bounds_may_be_looser_and_never_tighter() -> None:
    batch = make_batch(MIXED)
    loose = batch.bounded((3, 3, 3), (9, 20, 9), known=True)
    assert (loose.query_lens.bound, loose.query_lens.exact()) == ((3, 3, 3), (3, 1, 2))
    assert loose.batch_id != batch.batch_id
    with pytest.raises(ValueError, match=r"expected bounds of at least \(3, 1, 2\), got \(2, 1, 2\)"):
        batch.bounded((2, 1, 2), (0, 17, 5), known=True)


def test_a_batch_placed_in_anothers_memory_keeps_its_contents_and_takes_the_query_bounds() -> None:
    memory = make_batch([RowCase(2, 9), RowCase(2, 8), RowCase(2, 7)]).bounded((4, 4, 4), (9, 9, 9), known=True)
    batch = make_batch([RowCase(3, 0), RowCase(1, 70), RowCase(2, 5)])
    before = contents(batch)
    placed = batch.placed_in(memory)
    assert placed.batch_id not in (batch.batch_id, memory.batch_id)
    assert placed.tokens.data_ptr() == memory.tokens.data_ptr()
    assert placed.pools["kv"].write_slots.data_ptr() == memory.pools["kv"].write_slots.data_ptr()
    assert (placed.query_lens.bound, placed.context_lens.bound) == ((4, 4, 4), (0, 70, 5))
    for one, other in zip(contents(placed), before, strict=True):
        assert replace(one, lengths=()) == replace(other, lengths=())
        assert [length[::2] for length in one.lengths] == [length[::2] for length in other.lengths]


def test_a_batch_whose_memory_another_was_placed_in_is_known_to_be_overwritten() -> None:
    memory, *others = (make_batch([RowCase(2, 9), RowCase(2, 8)]) for _ in range(3))
    first = others[0].placed_in(memory)
    assert (memory.is_overwritten, first.is_overwritten) == (True, False)
    second = others[1].placed_in(memory)
    assert (first.is_overwritten, second.is_overwritten) == (True, False)
    assert not second.bounded((2, 2), (9, 9), known=True).is_overwritten
    with pytest.raises(BatchError, match="got overwritten by a batch in the same memory"):
        first.pad(3, 5)


def test_a_batch_is_not_placed_under_bounds_that_are_too_small() -> None:
    with pytest.raises(ValueError, match="expected bounds of at least"):
        make_batch([RowCase(3, 9), RowCase(1, 8)]).placed_in(make_batch([RowCase(2, 9), RowCase(2, 8)]))


def test_a_batch_of_another_size_does_not_fit_into_anothers_memory() -> None:
    with pytest.raises(BatchError, match="expected sizes to be"):
        make_batch(MIXED).placed_in(make_batch(MIXED[:2]))


@pytest.mark.parametrize(("bound", "host"), [((0, 17), (0, 17, 5)), ((0, 17, 5), (0, 17))], ids=["bound", "host"])
def test_lengths_that_contradict_each_other_are_refused(bound: tuple[int, ...], host: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected bounds and host copies of 3 lengths"):
        Lengths(torch.tensor([0, 17, 5]), bound, host)


def test_a_batch_with_another_content_has_another_id() -> None:
    batch = make_batch(MIXED)
    assert replace(batch, work=batch.work.take([0])).batch_id != batch.batch_id


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
    unknown = batch.bounded((3, 1, 2), (9, 20, 9), known=False)
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
    unknown = forged(batch, context_lens=batch.context_lens.bounded((9, 20, 30), known=False))
    taken = unknown.take([2, 0])
    assert taken.context_lens.host is None
    assert taken.context_lens.bound == (30, 9)
    assert taken.context_lens.device.tolist() == [5, 0]


def test_taking_needs_query_lengths_that_the_host_knows() -> None:
    batch = make_batch(MIXED)
    unknown = batch.bounded((3, 1, 2), (0, 17, 5), known=False)
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


COLUMNS = ("table_rows", "tokens", "context_lens", "num_logits", "masks", "positions", "unread", "num_candidates")


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("count", [1, 39, 41])
def test_columns_of_different_lengths_are_refused(name: str, count: int) -> None:
    rows = 40
    values = {name: [value] * rows for name, value in zip(COLUMNS, (0, [5], 0, 1, CAUSAL, None, None, 1), strict=True)}
    values["table_rows"] = list(range(1, 1 + rows))
    short = {**values, name: [*values[name], FULL if name == "masks" else values[name][0]][:count]}
    with pytest.raises(BatchError, match="columns of one length"):
        StepWork(**short)  # type: ignore[arg-type]


def decoded(**facts: object) -> StepWork:
    """Three rows of decode with one fact of each replaced."""
    values = {name: (value,) * 3 for name, value in zip(COLUMNS, (0, [5], 4, 1, CAUSAL, None, None, 1), strict=True)}
    return StepWork(**{**values, "table_rows": (1, 2, 3), **facts})  # type: ignore[arg-type]


def test_decode_rows_are_refused_for_the_same_reasons_as_others() -> None:
    for work, told in [
        (decoded(context_lens=(4, -1, 4)), "context_lens of row 1 to be at least 0"),
        (decoded(positions=(None, [9], None)), "positions of row 1 to be none"),
    ]:
        with pytest.raises(BatchError, match=told):
            Batch(work, SOURCES, CPU)


def test_a_token_that_is_not_being_chosen_is_refused_though_its_place_is_the_same() -> None:
    work = decoded(tokens=([], [5], []), unread=(0, None, 2))
    with pytest.raises(BatchError, match="among the 2 tokens"):
        Batch(work, SOURCES, CPU, torch.tensor([7, 8]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("unread", [(0, 1, 2), (2, 1, 0)], ids=["in order", "reversed"])
def test_chosen_tokens_of_another_dtype_are_refused(dtype: torch.dtype, unread: tuple[int, ...]) -> None:
    work = decoded(tokens=([], [], []), unread=unread)
    with pytest.raises(BatchError, match="expected chosen to be int64"):
        Batch(work, SOURCES, CPU, torch.tensor([7.5, 8.5, 9.5]).to(dtype))
