"""Every slot that a plan reads was committed or launched before the step, in stream order, or is written by that plan.

A plan is proven to be its batch's own; here the batch is proven to be true. Each test makes a mistake with nothing but
the public parts (`assemble`, `dataclasses.replace`, `Planner.plan`, `Runner.forward`), and expects an error that names
the field: every one of them gave wrong logits, or could have. `docs/law.md` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.cache.lengths import RowLengths
from sightline.cache.prefix import PrefixCache
from sightline.core.batch import FULL, Batch, MaskKind, RowMask, RowWork, StepWork
from sightline.core.config import EngineConfig
from sightline.core.errors import BatchError, StalePlanError
from sightline.runner.batching import assemble
from sightline.runner.runtime import Runtime
from support import attention_cases as cases
from support.tiny_models import load_runtime, make_model, random_prompts, reference_logits, relative_error

PROMPT, OTHER = random_prompts([13, 11])
CHUNK = 8
TOLERANCE = 1e-4
PLAIN = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def runtime(folder: Path) -> Runtime:
    return load_runtime(folder, EngineConfig(cache_tokens=256, max_num_batched_tokens=64, page_size=4))


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """Logits of every token of the prompt, by transformers."""
    return reference_logits(make_model("llama"), PROMPT)


def open_row(runtime: Runtime, num_tokens: int = 16) -> int:
    row = runtime.store.open_row()
    runtime.store.grow_row(row, num_tokens)
    return row


def work_of(row: int, tokens: list[int], context_len: int) -> RowWork:
    return RowWork(row, tokens, context_len, 1)


def chunk(runtime: Runtime, row: int, start: int, stop: int, tokens: list[int] = PROMPT) -> Batch:
    return assemble([work_of(row, tokens[start:stop], start)], runtime.store)


def forward(runtime: Runtime, batch: Batch) -> Tensor:
    return runtime.runner.forward(runtime.planner.plan(batch))


def refused(runtime: Runtime, batch: Batch, field: str) -> BatchError:
    """The error of a batch that must neither be planned nor run."""
    with pytest.raises(BatchError, match="expected") as caught:
        forward(runtime, batch)
    assert caught.value.field == field
    return caught.value


def test_chunks_in_order_give_the_logits_of_the_whole_prompt(runtime: Runtime, expected: Tensor) -> None:
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    assert relative_error(forward(runtime, chunk(runtime, row, CHUNK, 13))[0], expected[-1]) < TOLERANCE


def test_a_second_chunk_without_the_first_is_refused_on_pages_that_another_request_had_used(runtime: Runtime) -> None:
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, 11, OTHER))
    runtime.store.close_row(row)
    again = open_row(runtime)
    assert again == row, "the same pages, with the entries of another request"
    error = refused(runtime, chunk(runtime, again, CHUNK, 13), "context_lens")
    assert (error.row, error.expected, error.got) == (0, "0, as was launched", CHUNK)


def test_a_chunk_run_twice_from_two_batches_is_refused_the_second_time(runtime: Runtime) -> None:
    row = open_row(runtime)
    first, second = (chunk(runtime, row, 0, CHUNK) for _ in range(2))
    forward(runtime, first)
    error = refused(runtime, second, "context_lens")
    assert (error.expected, error.got) == ("8, as was launched", 0)


def test_a_step_that_another_step_overtook_is_refused_though_it_was_planned_in_time(runtime: Runtime) -> None:
    row = open_row(runtime)
    planned = runtime.planner.plan(chunk(runtime, row, 0, CHUNK))
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    with pytest.raises(BatchError, match="expected context_lens of row 0 to be 8, as was launched, got 0"):
        runtime.runner.forward(planned)


def test_the_same_planned_step_may_run_again(runtime: Runtime, expected: Tensor) -> None:
    row = open_row(runtime)
    planned = runtime.planner.plan(chunk(runtime, row, 0, 13))
    for _ in range(2):
        assert relative_error(runtime.runner.forward(planned)[0], expected[-1]) < TOLERANCE


@pytest.mark.parametrize("wrong", [0, 4, 7, 9])
def test_another_context_is_refused(runtime: Runtime, wrong: int) -> None:
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    batch = chunk(runtime, row, CHUNK, 13)
    changed = replace(batch, work=StepWork.of([replace(batch.work.row(0), context_len=wrong)]))
    assert refused(runtime, changed, "context_lens").got == wrong


def _fields(batch: Batch, other: Batch) -> dict[str, object]:
    """What the found cases replaced, one field at a time."""
    [(key, rows)] = batch.pools.items()
    return {
        "context_lens": replace(batch.context_lens, host=(4, 4), bound=(4, 4), device=torch.tensor([4, 4])),
        "query_lens": replace(batch.query_lens, host=(3, 5), bound=(3, 5), device=torch.tensor([3, 5])),
        "positions": batch.positions + 1,
        "pools": {key: replace(rows, write_slots=rows.write_slots + 1)},
        "logit_indices": batch.logit_indices - 1,
        "logit_rows": batch.logit_rows[::-1],
        "rows": other.rows,
        "table_rows": other.table_rows,
        "tokens": other.tokens,
        "masks": (FULL, FULL),
    }


@pytest.mark.parametrize(
    "field",
    [
        "context_lens",
        "query_lens",
        "positions",
        "pools",
        "logit_indices",
        "logit_rows",
        "rows",
        "table_rows",
        "tokens",
        "masks",
    ],
)
def test_a_field_that_follows_from_others_cannot_be_replaced(runtime: Runtime, field: str) -> None:
    rows = [open_row(runtime) for _ in range(4)]
    batches = [
        assemble([work_of(one, PROMPT[:5], 0), work_of(two, OTHER[:3], 0)], runtime.store)
        for one, two in (rows[:2], rows[2:])
    ]
    with pytest.raises(ValueError, match=f"field {field} is declared with"):
        replace(batches[0], **{field: _fields(*batches)[field]})  # type: ignore[arg-type]


def test_one_rows_tokens_over_another_rows_pages_are_refused_where_their_lengths_differ(runtime: Runtime) -> None:
    one, two = open_row(runtime), open_row(runtime)
    forward(runtime, assemble([work_of(one, PROMPT[:CHUNK], 0), work_of(two, OTHER[:5], 0)], runtime.store))
    swapped = [work_of(two, PROMPT[CHUNK:], CHUNK), work_of(one, OTHER[5:], 5)]
    assert refused(runtime, assemble(swapped, runtime.store), "context_lens").row == 0


def test_pages_that_went_to_another_are_a_stale_plan_and_no_batch_error(runtime: Runtime) -> None:
    row = open_row(runtime)
    batch = chunk(runtime, row, 0, CHUNK)
    runtime.store.close_row(row)
    assert open_row(runtime) == row
    with pytest.raises(StalePlanError, match="page table of pool"):
        forward(runtime, batch)


def test_a_forward_that_raises_has_written_nothing_that_counts(
    runtime: Runtime, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = open_row(runtime)

    def broken(planned: PlannedBatch) -> None:
        raise RuntimeError("the launch failed")

    with monkeypatch.context() as patch:
        patch.setattr(PlannedBatch, "prepare", broken)
        with pytest.raises(RuntimeError, match="the launch failed"):
            forward(runtime, chunk(runtime, row, 0, CHUNK))
    refused(runtime, chunk(runtime, row, CHUNK, 13), "context_lens")
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    assert relative_error(forward(runtime, chunk(runtime, row, CHUNK, 13))[0], expected[-1]) < TOLERANCE


def test_what_was_launched_and_taken_back_is_not_there(runtime: Runtime) -> None:
    row = open_row(runtime)
    planned = runtime.planner.plan(chunk(runtime, row, 0, CHUNK))
    runtime.runner.forward(planned)
    runtime.planner.take_back(planned)
    assert runtime.store.lengths.launched(row) == 0
    refused(runtime, chunk(runtime, row, CHUNK, 13), "context_lens")


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_what_failed_is_not_there_in_whatever_order_steps_are_taken_back(
    runtime: Runtime, order: tuple[int, ...], expected: Tensor
) -> None:
    row, lengths = open_row(runtime), runtime.store.lengths
    steps = []
    for start, stop in ((0, 4), (4, CHUNK), (CHUNK, 13)):
        steps.append(runtime.planner.plan(chunk(runtime, row, start, stop)))
        runtime.runner.forward(steps[-1])
    for step in order:
        runtime.planner.take_back(steps[step])
    assert lengths.launched(row) == 0
    assert relative_error(forward(runtime, chunk(runtime, row, 0, 13)), expected[-1:]) < TOLERANCE


def test_a_step_behind_one_that_failed_is_neither_committed_nor_followed(runtime: Runtime) -> None:
    row, lengths = open_row(runtime), runtime.store.lengths
    first, second = runtime.planner.plan(chunk(runtime, row, 0, 4)), None
    runtime.runner.forward(first)
    second = runtime.planner.plan(chunk(runtime, row, 4, CHUNK))
    runtime.runner.forward(second)
    runtime.planner.take_back(first)
    with pytest.raises(BatchError, match="the step that writes more failed"):
        lengths.commit(row, CHUNK)
    for batch in (chunk(runtime, row, CHUNK, 13), chunk(runtime, row, 4, 13), chunk(runtime, row, 0, 13)):
        refused(runtime, batch, "context_lens")
    runtime.planner.take_back(second)
    forward(runtime, chunk(runtime, row, 0, 13))
    lengths.commit(row, 13)


def test_what_is_missing_of_a_step_that_is_partly_committed_is_not_followed(runtime: Runtime) -> None:
    row, lengths = open_row(runtime), runtime.store.lengths
    first = runtime.planner.plan(chunk(runtime, row, 0, CHUNK))
    runtime.runner.forward(first)
    lengths.commit(row, 4)
    forward(runtime, chunk(runtime, row, CHUNK, 13))
    runtime.planner.take_back(first)
    with pytest.raises(BatchError, match="at most 4: the step that writes more failed"):
        lengths.commit(row, 13)


def test_taking_back_a_step_that_is_committed_changes_nothing(runtime: Runtime) -> None:
    row = open_row(runtime)
    first = runtime.planner.plan(chunk(runtime, row, 0, CHUNK))
    runtime.runner.forward(first)
    runtime.store.lengths.commit(row, CHUNK)
    forward(runtime, chunk(runtime, row, CHUNK, 13))
    runtime.planner.take_back(first)
    assert runtime.store.lengths.launched(row) == 13
    runtime.store.lengths.commit(row, 13)


def test_a_step_may_read_what_is_launched_and_not_committed(runtime: Runtime, expected: Tensor) -> None:
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    assert (runtime.store.lengths.committed(row), runtime.store.lengths.launched(row)) == (0, CHUNK)
    assert relative_error(forward(runtime, chunk(runtime, row, CHUNK, 13))[0], expected[-1]) < TOLERANCE


def test_no_more_is_committed_than_was_launched(runtime: Runtime) -> None:
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    with pytest.raises(BatchError, match="expected committed length to be at most 8, as was launched, got 9"):
        runtime.store.lengths.commit(row, 9)
    runtime.store.lengths.commit(row, CHUNK)
    with pytest.raises(BatchError, match="expected launched length to be at least 8, as is committed, got 7"):
        runtime.store.lengths.settle(row, 7)


def test_a_page_is_shared_once_its_entries_are_committed(runtime: Runtime) -> None:
    row, store = open_row(runtime), runtime.store
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    with pytest.raises(ValueError, match=r"expected 4 committed entries in row .* to share its page 0, got 0"):
        store.committed_bundle(row, 0)
    store.lengths.commit(row, 7)
    store.committed_bundle(row, 0)
    with pytest.raises(ValueError, match="expected 8 committed entries"):
        store.committed_bundle(row, 1)


def test_a_prefix_that_was_adopted_may_be_read_and_no_more(runtime: Runtime, expected: Tensor) -> None:
    store, prefixes = runtime.store, PrefixCache(runtime.store)
    first = open_row(runtime)
    forward(runtime, chunk(runtime, first, 0, CHUNK))
    store.lengths.commit(first, CHUNK)
    node = prefixes.lock("", prefixes.find("", []))
    for index in range(2):
        node = prefixes.extend(node, PROMPT[4 * index : 4 * index + 4], store.committed_bundle(first, index))
    second = store.open_row()
    store.adopt(second, prefixes.find("", PROMPT).bundles)
    store.grow_row(second, 16)
    refused(runtime, chunk(runtime, second, 9, 13), "context_lens")
    assert relative_error(forward(runtime, chunk(runtime, second, CHUNK, 13))[0], expected[-1]) < TOLERANCE


def committed_row(runtime: Runtime, num_tokens: int = CHUNK) -> int:
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, num_tokens))
    runtime.store.lengths.commit(row, num_tokens)
    return row


def test_pages_that_were_freed_and_handed_out_again_are_not_adopted(runtime: Runtime) -> None:
    store, row = runtime.store, committed_row(runtime)
    bundles = [store.committed_bundle(row, index) for index in range(2)]
    store.close_row(row)
    with pytest.raises(ValueError, match="0 owners"):
        store.adopt(store.open_row(), bundles)
    other = committed_row(runtime)
    assert {store.pages_at(other, index) for index in range(2)} == {bundle.pages for bundle in bundles}
    uses: list[Callable[[], None]] = [
        lambda: store.adopt(store.open_row(), bundles),
        lambda: store.share(bundles[0], "another"),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="expected a bundle whose pages still hold its entries"):
            use()
    prefixes = PrefixCache(store)
    with pytest.raises(ValueError, match="freed or written anew since"):
        prefixes.extend(prefixes.lock("", prefixes.find("", [])), PROMPT[:4], bundles[0])
    assert prefixes.num_pages == 0


def test_pages_of_another_store_are_not_adopted(folder: Path, runtime: Runtime) -> None:
    config = EngineConfig(cache_tokens=256, max_num_batched_tokens=64, page_size=4)
    other = load_runtime(folder, config)
    bundle = other.store.committed_bundle(committed_row(other), 0)
    committed_row(runtime)
    with pytest.raises(ValueError, match="of another store"):
        runtime.store.adopt(runtime.store.open_row(), [bundle])


def test_pages_that_their_row_writes_anew_are_not_adopted(runtime: Runtime) -> None:
    store, row = runtime.store, committed_row(runtime)
    kept, lost = store.committed_bundle(row, 0), store.committed_bundle(row, 1)
    store.fill_row(row, 5)
    store.adopt(store.open_row(), [kept])
    with pytest.raises(ValueError, match="written anew since"):
        store.adopt(store.open_row(), [kept, lost])


def test_pages_are_adopted_in_the_places_that_they_had(runtime: Runtime) -> None:
    store, row = runtime.store, committed_row(runtime)
    first, second = (store.committed_bundle(row, index) for index in range(2))
    for bundles, indices in (([second], [1]), ([second, first], [1, 0]), ([first, first], [0, 0])):
        with pytest.raises(ValueError, match=rf"pages of a row, in order, got those at \{indices}"):
            store.adopt(store.open_row(), bundles)
    store.adopt(store.open_row(), [first, second])
    prefixes = PrefixCache(store)
    node = prefixes.lock("", prefixes.find("", []))
    with pytest.raises(ValueError, match="expected page 0 of a row behind as many others, got 1"):
        prefixes.extend(node, PROMPT[4:8], second)
    prefixes.extend(prefixes.extend(node, PROMPT[:4], first), PROMPT[4:8], second)


def test_pages_are_released_by_their_owners_alone(runtime: Runtime) -> None:
    store, row = runtime.store, committed_row(runtime)
    bundle, prefixes = store.committed_bundle(row, 0), PrefixCache(store)
    prefixes.unlock(prefixes.extend(prefixes.lock("", prefixes.find("", [])), PROMPT[:4], bundle))
    with pytest.raises(ValueError, match="expected an owner of pages"):
        store.release(bundle, "a stranger")
    store.share(bundle, "another")
    store.release(bundle, "another")
    with pytest.raises(ValueError, match="expected an owner of pages"):
        store.release(bundle, "another")
    assert store.owners(bundle.pages) == 2
    assert prefixes.clear() == 1
    assert store.owners(bundle.pages) == 1


def test_entries_that_are_not_committed_are_not_followed_by_copies(runtime: Runtime) -> None:
    store, source, target = runtime.store, committed_row(runtime), open_row(runtime)
    first = runtime.planner.plan(chunk(runtime, target, 0, 4))
    runtime.runner.forward(first)
    with pytest.raises(ValueError, match=r"and 4 in row .*, got 8 and 0, with 4 launched"):
        store.copy_page(source, target, 1, 2)
    store.lengths.commit(target, 4)
    store.copy_page(source, target, 1, 2)


def test_pages_are_not_given_away_while_another_lane_writes_them() -> None:
    bench = cases.bench([PLAIN], lanes=(MAIN_LANE, Lane(1)))
    planner, store, row = bench.planner, bench.store, bench.store.open_row()
    store.grow_row(row, 32)
    planned = planner.plan(assemble([work_of(row, PROMPT[:CHUNK], 0)], store), lane=Lane(1))
    planner.launch(planned)
    ways: list[Callable[[], None]] = [lambda: store.close_row(row), lambda: store.trim_row(row, CHUNK)]
    for give in ways:
        with pytest.raises(BatchError, match="to be committed before its pages go"):
            give()
    store.lengths.commit(row, CHUNK)
    store.trim_row(row, CHUNK)
    planner.launch(planner.plan(assemble([work_of(row, PROMPT[CHUNK:], CHUNK)], store), lane=Lane(1)))
    store.lengths.settle(row, CHUNK)
    store.close_row(row)


def test_a_fork_copies_committed_entries_behind_its_own(runtime: Runtime) -> None:
    store, first = runtime.store, open_row(runtime)
    forward(runtime, chunk(runtime, first, 0, 6))
    second = open_row(runtime)
    with pytest.raises(ValueError, match="expected 2 committed entries in row"):
        store.copy_page(first, second, 0, 2)
    store.lengths.commit(first, 6)
    with pytest.raises(ValueError, match="and 4 in row"):
        store.copy_page(first, second, 1, 2)
    store.copy_page(first, second, 0, 2)
    assert store.lengths.launched(second) == 2


def test_a_token_that_is_still_being_chosen_is_taken_from_the_device(runtime: Runtime) -> None:
    row = open_row(runtime)
    work = RowWork(row, PROMPT[:2], 0, 1, unread=1)
    with pytest.raises(BatchError, match="expected unread to be among the 0 tokens that are being chosen"):
        assemble([work], runtime.store)
    batch = assemble([work], runtime.store, torch.tensor(PROMPT[1:3]))
    assert torch.equal(batch.tokens, torch.tensor(PROMPT[:3]))
    forward(runtime, batch)


def test_what_is_launched_in_one_lane_is_not_read_in_another_before_it_is_committed() -> None:
    bench = cases.bench([PLAIN], lanes=(MAIN_LANE, Lane(1)))
    planner, store, row = bench.planner, bench.store, bench.store.open_row()
    store.grow_row(row, 16)
    planner.launch(planner.plan(assemble([work_of(row, PROMPT[:CHUNK], 0)], store), lane=Lane(1)))
    following = assemble([work_of(row, PROMPT[CHUNK:], CHUNK)], store)
    with pytest.raises(BatchError, match="expected lane of row 0 to be 1, where its last step was launched, got 0"):
        planner.plan(following)
    planner.plan(following, lane=Lane(1))
    store.lengths.commit(row, CHUNK)
    planner.plan(following)


CHANGES_IN_PLACE: dict[str, Callable[[Batch], object]] = {
    "positions": lambda batch: batch.positions.add_(1),
    "context_lens": lambda batch: batch.context_lens.device.sub_(1),
    "query_lens": lambda batch: batch.query_lens.device.add_(1),
    "table_rows": lambda batch: batch.table_rows.add_(1),
    "logit_indices": lambda batch: batch.logit_indices.sub_(1),
    "write_slots": lambda batch: next(iter(batch.pools.values())).write_slots.add_(1),
    "tokens": lambda batch: batch.tokens.add_(1),
}


@pytest.mark.parametrize("field", CHANGES_IN_PLACE)
def test_paranoid_finds_a_tensor_of_the_batch_that_was_changed_in_place(folder: Path, field: str) -> None:
    config = EngineConfig(cache_tokens=256, max_num_batched_tokens=64, page_size=4, paranoid=True)
    runtime = load_runtime(folder, config)
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    batch = chunk(runtime, row, CHUNK, 13)
    runtime.planner.plan(batch)
    CHANGES_IN_PLACE[field](batch)
    with pytest.raises(BatchError, match=rf"expected {field}.*on the device to be"):
        runtime.planner.plan(batch)


def test_paranoid_finds_a_page_table_that_differs_from_the_hosts(folder: Path) -> None:
    config = EngineConfig(cache_tokens=256, max_num_batched_tokens=64, page_size=4, paranoid=True)
    runtime = load_runtime(folder, config)
    row = open_row(runtime)
    batch = chunk(runtime, row, 0, CHUNK)
    runtime.store.pools[0].table.pages[row, 0] += 1
    with pytest.raises(BatchError, match=r"pages in pool group0\.kv on the device of row 0"):
        runtime.planner.plan(batch)


def test_a_tree_of_another_size_is_refused(runtime: Runtime) -> None:
    row = open_row(runtime)
    mask = RowMask(MaskKind.TREE, torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(BatchError, match="expected masks of row 0 to be a tree of 2 × 2 booleans"):
        assemble([RowWork(row, PROMPT[:2], 0, 1, mask)], runtime.store)


@pytest.mark.parametrize("length", [-1, 17])
def test_a_row_is_filled_as_far_as_it_has_pages(runtime: Runtime, length: int) -> None:
    with pytest.raises(ValueError, match=f"expected an open row with pages for {length} tokens"):
        runtime.store.fill_row(open_row(runtime), length)


def test_lengths_of_contexts_that_only_the_device_knows_are_bounded_from_above(runtime: Runtime) -> None:
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    lengths: RowLengths = runtime.store.lengths
    batch = chunk(runtime, row, CHUNK, 13)
    lengths.check(batch.bounded((5,), (9,), known=False), MAIN_LANE)
    early = chunk(runtime, row, 4, 13).bounded((9,), (7,), known=False)
    with pytest.raises(BatchError, match=r"expected context_lens\.bound of row 0 to be at least 8"):
        lengths.check(early, MAIN_LANE)


@pytest.mark.parametrize("count", [-3, 0, 5])
def test_a_copy_stays_within_one_page(runtime: Runtime, count: int) -> None:
    store, first = runtime.store, open_row(runtime)
    forward(runtime, chunk(runtime, first, 0, CHUNK))
    store.lengths.commit(first, CHUNK)
    with pytest.raises(ValueError, match=f"expected 1 to 4 entries, what a page holds, got {count}"):
        store.copy_page(first, open_row(runtime), 0, count)


def test_a_row_is_not_set_back_into_pages_that_others_read(runtime: Runtime) -> None:
    store, first = runtime.store, open_row(runtime)
    forward(runtime, chunk(runtime, first, 0, CHUNK))
    store.lengths.commit(first, CHUNK)
    store.share(store.committed_bundle(first, 1), "another")
    with pytest.raises(ValueError, match=r"expected pages of row .*'s own behind 4 tokens, got shared"):
        store.fill_row(first, 4)
    store.fill_row(first, CHUNK)


def test_settling_adds_nothing(runtime: Runtime) -> None:
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    runtime.store.lengths.settle(row, 12)
    assert runtime.store.lengths.launched(row) == CHUNK


def test_a_step_that_was_overtaken_is_not_launched_by_hand(runtime: Runtime) -> None:
    row = open_row(runtime)
    planned = runtime.planner.plan(chunk(runtime, row, 0, 4))
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    with pytest.raises(BatchError, match="expected context_lens of row 0 to be 8, as was launched, got 0"):
        runtime.planner.launch(planned)


def test_the_branches_of_a_tree_are_no_context_until_they_are_settled(runtime: Runtime) -> None:
    row = open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, 4))
    tree = RowMask(MaskKind.TREE, torch.tensor([[True, False, False], [True, True, False], [True, False, True]]))
    forward(runtime, assemble([RowWork(row, PROMPT[4:7], 4, 1, tree, (4, 5, 5))], runtime.store))
    assert runtime.store.lengths.launched(row) == 4
    refused(runtime, chunk(runtime, row, 7, 9), "context_lens")


def test_a_prefix_that_was_evicted_since_it_was_found_is_not_locked(runtime: Runtime) -> None:
    store, prefixes, row = runtime.store, PrefixCache(runtime.store), open_row(runtime)
    forward(runtime, chunk(runtime, row, 0, CHUNK))
    store.lengths.commit(row, CHUNK)
    node = prefixes.extend(prefixes.lock("", prefixes.find("", [])), PROMPT[:4], store.committed_bundle(row, 0))
    store.close_row(row)
    found = prefixes.find("", PROMPT)
    prefixes.unlock(node)
    prefixes.clear()
    with pytest.raises(ValueError, match="got one that was evicted since"):
        prefixes.lock("", found)


@pytest.mark.parametrize("field", ["tokens", "logit_indices"])
def test_paranoid_finds_what_changed_between_planning_and_running(folder: Path, field: str) -> None:
    config = EngineConfig(cache_tokens=256, max_num_batched_tokens=64, page_size=4, paranoid=True)
    runtime = load_runtime(folder, config)
    batch = chunk(runtime, open_row(runtime), 0, CHUNK)
    planned = runtime.planner.plan(batch)
    CHANGES_IN_PLACE[field](batch)
    with pytest.raises(StalePlanError, match=f"contents of batch {field} changed in place"):
        runtime.runner.forward(planned)
