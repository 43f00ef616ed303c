"""Every backend gives the oracle's answer, whatever the lengths, pages, masks and features."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.attention import tiles
from sightline.attention.backends.torch_backend import MIN_KEYS_IN_PLACE
from sightline.attention.spec import Feature, SoftmaxSpec
from sightline.core.batch import FULL, MaskKind, RowMask
from sightline.testing.bench import Layout, Row
from sightline.testing.steps import Answer, Step, map_inputs
from sightline.testing.trial import ragged_rows
from support import attention_cases as cases
from support.attention_cases import BACKENDS

PLAIN = SoftmaxSpec(num_q_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
SPECS = {
    "plain": PLAIN,
    "multi-head": replace(PLAIN, num_kv_heads=6),
    "multi-query": replace(PLAIN, num_kv_heads=1),
    "window": replace(PLAIN, window=9),
    "window of one": replace(PLAIN, window=1),
    "softcap": replace(PLAIN, softcap=2.0),
    "sinks": replace(PLAIN, sinks=True),
    "everything": replace(PLAIN, window=20, softcap=3.0, sinks=True),
    "odd head": replace(PLAIN, head_dim=24, scale=0.3),
}
TOLERANCE = 3e-5
LSE = frozenset({Feature.LSE})

all_backends = pytest.mark.parametrize("backend", BACKENDS)
all_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def assert_right(step: Step, answer: Answer) -> None:
    """The oracle's output, and its LSE where there is one."""
    expected = step.expected()
    torch.testing.assert_close(answer.out, expected.out, atol=TOLERANCE, rtol=TOLERANCE)
    if answer.lse is not None:
        torch.testing.assert_close(answer.lse, expected.lse, atol=TOLERANCE, rtol=TOLERANCE)


@all_backends
@all_specs
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_ragged_mixed_rows_equal_the_oracle(backend: str, spec: SoftmaxSpec, page_size: int) -> None:
    step = Step(cases.bench([spec], backend, page_size=page_size), ragged_rows(page_size))
    answer = step.run()
    assert_right(step, answer)
    assert answer.lse is None


@all_backends
@all_specs
def test_lse_is_the_natural_log_of_the_weights_sum(backend: str, spec: SoftmaxSpec) -> None:
    step = Step(cases.bench([spec], backend), ragged_rows(16))
    answer = step.run(LSE)
    assert answer.lse is not None
    assert_right(step, answer)


@all_backends
@all_specs
@pytest.mark.parametrize("transient", [False, True], ids=["paged", "transient"])
def test_full_masks_see_every_new_token(backend: str, spec: SoftmaxSpec, transient: bool) -> None:
    contexts = [0, 0, 0] if transient else [5, 0, 17]
    rows = [Row(context, query, FULL) for context, query in zip(contexts, [12, 30, 1], strict=True)]
    step = Step(cases.bench([spec], backend), rows, transient=transient)
    assert_right(step, step.run())


@all_backends
@all_specs
def test_tree_rows_follow_the_tree_and_its_positions(backend: str, spec: SoftmaxSpec) -> None:
    # 0 ─┬─ 1 ── 3      depth is the position: 2 is 1's sibling, 4 is 2's child.
    #    └─ 2 ── 4
    parents = [None, 0, 0, 1, 2]
    tree = torch.eye(5, dtype=torch.bool)
    for child, parent in enumerate(parents):
        if parent is not None:
            tree[child] |= tree[parent]
    mask = RowMask(MaskKind.TREE, tree)
    rows = [Row(20, 5, mask, (20, 21, 21, 22, 22)), Row(3, 1), Row(0, 5, mask, (0, 1, 1, 2, 2))]
    step = Step(cases.bench([spec], backend), rows)
    assert_right(step, step.run())


@all_specs
@pytest.mark.parametrize("needs", [frozenset(), LSE], ids=["fused", "lse"])
def test_rows_cut_by_query_to_bound_their_masks_equal_the_oracle(
    spec: SoftmaxSpec, needs: frozenset[Feature], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "MAX_BIAS_ELEMENTS", 60)
    step = Step(cases.bench([spec], page_size=4), [*ragged_rows(4), Row(30, 13)])
    assert_right(step, step.run(needs))


@all_backends
def test_a_very_long_row_beside_short_ones(backend: str) -> None:
    bench = cases.bench([PLAIN], backend, max_seq_len=6000, max_rows=4)
    step = Step(bench, [Row(2, 1), Row(5999, 1), Row(40, 1), Row(0, 3)])
    assert_right(step, step.run())


@all_backends
@all_specs
@pytest.mark.parametrize("needs", [frozenset(), LSE], ids=["fused", "lse"])
def test_long_contexts_side_by_side_in_the_pool_equal_the_oracle(
    backend: str, spec: SoftmaxSpec, needs: frozenset[Feature]
) -> None:
    bench = cases.bench([spec], backend, page_size=4, layout=Layout.IN_ORDER, max_seq_len=1200)
    rows = [Row(1100, 1), Row(5, 1), Row(MIN_KEYS_IN_PLACE, 9), Row(1025, 6, FULL), Row(0, 40)]
    step = Step(bench, rows)
    assert bench.store.pools[0].table.run(step.table_rows[0], 0, 1101, 4) is not None
    assert_right(step, step.run(needs))


@all_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_its_rounding(backend: str, dtype: torch.dtype) -> None:
    step = Step(cases.bench([SPECS["everything"], PLAIN], backend, dtype=dtype), ragged_rows(16))
    torch.testing.assert_close(step.run().out.float(), step.expected().out, atol=2e-2, rtol=2e-2)


@all_backends
def test_padding_changes_no_row_and_its_output_is_left_alone(backend: str) -> None:
    step = Step(cases.bench([PLAIN], backend), ragged_rows(16))
    real = step.batch.num_tokens
    step.batch = step.batch.pad(step.batch.num_rows + 3, real + 5)
    expected = step.expected().out
    extra = torch.full((5, 6, 16), torch.nan)
    step.inputs = map_inputs(step.inputs, lambda t: torch.cat([t, extra[:, : t.shape[1]]]))
    out = step.run().out
    torch.testing.assert_close(out[:real], expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert out[real:].isnan().all()


@all_backends
def test_an_idle_batch_runs_and_does_nothing(backend: str) -> None:
    step = Step(cases.bench([PLAIN], backend), [Row(3, 2)])
    step.batch = step.batch.idle()
    step.inputs = map_inputs(step.inputs, lambda t: t[:0])
    out = step.run().out
    assert out.shape == (0, 6, 16)


@all_backends
def test_rows_that_share_pages_read_the_same_context(backend: str) -> None:
    bench = cases.bench([PLAIN], backend)
    step = Step(bench, [Row(32, 1)])
    twin = bench.store.open_row()
    shared = step.pool.table.owned(step.table_rows[0])[:2]
    step.pool.allocator.share(shared)
    step.pool.table.append(twin, shared)
    bench.store.grow_row(twin, 33)
    rows = [Row(32, 1), Row(32, 1)]
    step.batch = bench.batch(rows, [step.table_rows[0], twin])
    step.inputs = map_inputs(step.inputs, lambda t: t.repeat(2, 1, 1))
    out = step.run().out
    torch.testing.assert_close(out[0], out[1])
    step.rows = tuple(rows[:1])
    torch.testing.assert_close(out[:1], step.expected().out, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_nan_in_one_row_reaches_no_other_row() -> None:
    step = Step(cases.bench([PLAIN]), [Row(20, 1), Row(25, 1), Row(30, 1)])
    step.inputs.k[1] = torch.nan
    expected = step.expected().out
    out = step.run().out
    assert out[1].isnan().any()
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], atol=TOLERANCE, rtol=TOLERANCE)


@all_backends
def test_rows_that_are_computed_in_another_order_come_back_in_their_own(backend: str) -> None:
    """Rows are put together by their numbers of keys, here every other one."""
    step = Step(cases.bench([PLAIN], backend), [Row(40, 1), Row(3, 1), Row(33, 1), Row(2, 1)])
    assert_right(step, step.run())
