"""The extend kernel against the oracle: rows of any length, in pages of any size, under every mask."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sightline.attention.oracle.attention import attend_row, visible_keys
from sightline.attention.spec import SoftmaxSpec
from sightline.core.batch import CAUSAL, FULL, RowMask
from sightline.core.batch import MaskKind as RowKind
from sightline.kernels.triton.extend import extend_contiguous, extend_paged
from sightline.kernels.triton.extend_rules import CAUSAL_ROWS, FULL_ROWS, ExtendMasks, LaunchMask, ScoreRule
from sightline.kernels.triton.extend_tiles import ExtendConfig, choose_config, prepare_ragged_tiles
from support.case_marks import routine
from support.extend_cases import (
    DEVICE,
    Case,
    empty_tiles,
    expected,
    make_masks,
    make_outputs,
    make_step,
    require_equal,
    run_paged,
    run_transient,
)

WIDE = ExtendConfig(block_m=32, block_n=32, num_warps=4, num_stages=2)
BF16 = torch.bfloat16

PAGED = {
    "page-1": Case(page_size=1, group_size=1),
    "page-7": Case(page_size=7, group_size=3, head_dim=64),
    "page-16": Case(page_size=16, group_size=4, num_kv_heads=1, head_dim=80),
    "page-64": Case(page_size=64, group_size=8, num_kv_heads=1, head_dim=128, config=WIDE),
    "window-1": Case(page_size=7, window=1),
    "window-in-a-block": Case(page_size=7, window=5, group_size=3),
    "window-over-blocks": Case((3, 40), (50, 0), page_size=16, window=19),
    "window-longer-than-rows": Case(page_size=16, window=1000),
    "softcap": Case(softcap=1.5, group_size=1),
    "sinks": Case(sinks=True, group_size=4, num_kv_heads=1),
    "everything": Case(page_size=7, head_dim=80, group_size=3, window=9, softcap=2.0, sinks=True),
    "bf16": Case(page_size=1, dtype=BF16, head_dim=64),
    "bf16-everything": Case(page_size=64, dtype=BF16, window=11, softcap=2.0, sinks=True, group_size=8, config=WIDE),
    "fp16": Case(dtype=torch.float16, group_size=3),
    "more-heads-than-a-tile": Case((3, 1), (4, 20), group_size=20, num_kv_heads=1, sinks=True),
    "small-heads": Case(head_dim=8),
    "rows-of-one-token": Case((1,) * 5, (0, 1, 15, 16, 33), group_size=4),
    "only-empty-rows": Case((0, 0), (0, 0)),
}


@pytest.mark.parametrize(
    "case",
    routine(
        PAGED,
        "page-7",
        "page-64",
        "window-over-blocks",
        "everything",
        "bf16-everything",
        "fp16",
        "more-heads-than-a-tile",
        "rows-of-one-token",
        "only-empty-rows",
    ),
)
def test_paged_rows_equal_the_oracle(case: Case) -> None:
    step = make_step(case)
    require_equal(step, run_paged(step), expected(step, step.k, step.v))


@pytest.mark.parametrize("case", ["page-7", "window-in-a-block", "sinks", "bf16-everything"])
def test_transient_rows_equal_the_oracle(case: str) -> None:
    step = make_step(replace(PAGED[case], context_lens=(0, 0, 0, 0)))
    require_equal(step, run_transient(step), expected(step, step.k, step.v))


@pytest.mark.parametrize("window", [None, 4, 18])
def test_rows_have_masks_of_their_own(window: int | None) -> None:
    step = make_step(Case(masks=(FULL, CAUSAL, CAUSAL, FULL), window=window, page_size=7))
    require_equal(step, run_paged(step), expected(step, step.k, step.v))


TREE = RowMask(
    RowKind.TREE,
    torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool
    ),
)
DEPTHS = (0, 1, 1, 2, 2)


@pytest.mark.parametrize("window", [None, 3, *(pytest.param(size, marks=pytest.mark.prove) for size in (2, 12))])
@pytest.mark.parametrize("context_len", [0, 16, *(pytest.param(size, marks=pytest.mark.prove) for size in (9, 37))])
def test_trees_stand_beside_other_rows(window: int | None, context_len: int) -> None:
    case = Case(
        (5, 0, 5, 18), (context_len, 0, 3, 2), masks=(TREE, CAUSAL, TREE, FULL), positions=(DEPTHS, DEPTHS),
        window=window, page_size=7, group_size=1, num_kv_heads=1,
    )  # fmt: skip
    step = make_step(case)
    require_equal(step, run_paged(step), expected(step, step.k, step.v))


def test_a_tree_may_reach_over_several_tiles() -> None:
    generator = torch.Generator().manual_seed(3)
    tree = (torch.rand(21, 21, generator=generator) < 0.5) | torch.eye(21, dtype=torch.bool)
    depths = tuple(torch.randint(0, 9, (21,), generator=generator).tolist())
    masks = (CAUSAL, CAUSAL, FULL, RowMask(RowKind.TREE, tree))
    for window in (None, 5):
        step = make_step(Case(context_lens=(9, 0, 38, 6), masks=masks, positions=(depths,), window=window))
        require_equal(step, run_paged(step), expected(step, step.k, step.v))


def stored(values: Tensor, scale: float) -> Tensor:
    """What is read again of what was written in e4m3."""
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_fp8_entries_are_read_with_their_scales(dtype: torch.dtype, softcap: float | None) -> None:
    case = Case(dtype=dtype, cache_dtype=torch.float8_e4m3fn, scales=(0.02, 3.0), softcap=softcap)
    step = make_step(case)
    k, v = ([stored(row, scale) for row in each] for each, scale in zip((step.k, step.v), case.scales, strict=True))
    require_equal(step, run_paged(step), expected(step, k, v))


@pytest.mark.parametrize(("masks", "kind"), [(CAUSAL_ROWS, CAUSAL), (FULL_ROWS, FULL)], ids=["causal", "full"])
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(48, 32), (16, 16)])
def test_ragged_keys_are_aligned_to_the_queries_end(masks: ExtendMasks, kind: RowMask, qk_dim: int, v_dim: int) -> None:
    query_lens, key_lens, heads = (3, 0, 20, 2, 4), (3, 5, 37, 0, 30 if masks is FULL_ROWS else 4), 3
    if masks is FULL_ROWS:
        query_lens = (3, 0, 20, 2, 9)
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(sum(query_lens), heads, qk_dim, generator=generator)
    k = torch.randn(sum(key_lens), heads, qk_dim, generator=generator)
    v = torch.randn(sum(key_lens), heads, v_dim, generator=generator)
    query_offsets, key_offsets = ([0, *itertools.accumulate(lens)] for lens in (query_lens, key_lens))
    config = ExtendConfig(16, 16, num_warps=4, num_stages=1)
    tiles = empty_tiles(5, q.shape[0], config.tile_tokens(1))
    at = [torch.tensor(offsets, dtype=torch.int32, device=DEVICE) for offsets in (query_offsets, key_offsets)]
    prepare_ragged_tiles(at[0], at[1], q.shape[0], tiles)
    out, lse = torch.full((q.shape[0], heads, v_dim), 7.0, device=DEVICE), torch.zeros(q.shape[:2], device=DEVICE)
    extend_contiguous(
        q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), tiles, out, rule=ScoreRule(0.3), masks=masks, config=config, lse=lse
    )
    spec = SoftmaxSpec(heads, heads, qk_dim, 0.3)
    padded = torch.nn.functional.pad(v, (0, qk_dim - v_dim))
    for row, (query_len, key_len) in enumerate(zip(query_lens, key_lens, strict=True)):
        queries = slice(query_offsets[row], query_offsets[row + 1])
        keys = slice(key_offsets[row], key_offsets[row + 1])
        visible = torch.ones(query_len, key_len, dtype=torch.bool)
        if kind is CAUSAL:
            visible = visible.tril(key_len - query_len)
        wanted, wanted_lse = attend_row(spec, q[queries], k[keys], padded[keys], visible, None)
        torch.testing.assert_close(out[queries].cpu(), wanted[..., :v_dim], atol=2e-5, rtol=0.0)
        torch.testing.assert_close(lse[queries].cpu(), wanted_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("longest_query", [1, 24])
def test_chosen_configurations_compute(dtype: torch.dtype, longest_query: int) -> None:
    config = choose_config(dtype, 16, 16, 4, longest_query, shared_bytes=1 << 17)
    case = Case((longest_query, 1), (20, 70), num_kv_heads=1, group_size=4, dtype=dtype, page_size=64, config=config)
    step = make_step(case)
    require_equal(step, run_paged(step), expected(step, step.k, step.v))


def test_the_oracle_tells_a_window_one_too_wide() -> None:
    step = make_step(Case(page_size=7, window=5))
    wrong = make_step(Case(page_size=7, window=6))
    with pytest.raises(AssertionError):
        require_equal(step, run_paged(wrong), expected(step, step.k, step.v))


def test_visibility_of_the_oracle_is_what_the_case_asks() -> None:
    case = Case(window=2)
    assert visible_keys(case.spec, CAUSAL, 2, torch.tensor([2, 3])).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_tiles_of_another_size_are_refused() -> None:
    step = make_step(Case())
    out, _ = make_outputs(step)
    tiles = empty_tiles(4, step.case.num_tokens, 3)
    with pytest.raises(ValueError, match="expected tiles of 8 tokens"):
        extend_contiguous(
            step.q, step.k[0], step.v[0], tiles, out, rule=step.case.rule, masks=CAUSAL_ROWS, config=step.case.config
        )


def test_scales_are_for_fp8_entries() -> None:
    step = make_step(Case())
    out, _ = make_outputs(step)
    tiles, pages = empty_tiles(4, step.case.num_tokens, 8), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected scales exactly for float8_e4m3fn"):
        extend_paged(
            step.q, step.k[0], step.v[0], pages, 16, tiles, out, rule=step.case.rule, masks=make_masks(step),
            config=step.case.config, k_scale=torch.ones(()),
        )  # fmt: skip


def test_masks_and_rules_are_complete() -> None:
    kinds = torch.zeros(1, dtype=torch.int8)
    with pytest.raises(ValueError, match="row_kinds exactly for BY_ROW"):
        ExtendMasks(LaunchMask.BY_ROW)
    with pytest.raises(ValueError, match="got TREE"):
        ExtendMasks(LaunchMask.TREE, kinds)
    with pytest.raises(ValueError, match="together"):
        ExtendMasks(LaunchMask.BY_ROW, kinds, trees=kinds)
    with pytest.raises(ValueError, match="above 0"):
        ScoreRule(0.0)
