"""Attention over parts of the keys, merged, is attention over all of them, whatever each part saw."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sightline.attention.oracle.attention import attend_row
from sightline.attention.shared.merge import merge_parts
from sightline.attention.spec import SoftmaxSpec

SPEC = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)
TOLERANCE = 2e-5
Parts = tuple[Tensor, Tensor]
"""Outputs and log-sum-exps, part by part."""


def tensors(num_queries: int, num_keys: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_queries, 4, 8, generator=generator) * 3,
        torch.randn(num_keys, 2, 8, generator=generator),
        torch.randn(num_keys, 2, 8, generator=generator),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, spec: SoftmaxSpec = SPEC) -> Parts:
    return attend_row(spec, q, k, v, torch.ones(q.shape[0], k.shape[0], dtype=torch.bool), None)


def in_parts(q: Tensor, k: Tensor, v: Tensor, sizes: list[int]) -> Parts:
    """Attention over runs of the keys; where a run is empty its output is NaN, which nobody may look at."""
    parts = []
    for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True):
        out, lse = attend(q, k[stop - size : stop], v[stop - size : stop])
        parts.append((out if size else torch.full_like(out, torch.nan), lse))
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def assert_same(got: Parts, expected: Parts) -> None:
    for each, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(each, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("sizes", [[12], [6, 6], [1, 11], [3, 4, 5], [1] * 12])
def test_merged_parts_are_attention_over_all_keys(sizes: list[int]) -> None:
    q, k, v = tensors(5, 12)
    assert_same(merge_parts(*in_parts(q, k, v, sizes)), attend(q, k, v))


@pytest.mark.parametrize("sizes", [[0, 12], [12, 0], [5, 0, 7], [0, 0, 12, 0]])
def test_a_part_that_saw_nothing_adds_nothing_though_its_output_is_nan(sizes: list[int]) -> None:
    q, k, v = tensors(5, 12)
    assert_same(merge_parts(*in_parts(q, k, v, sizes)), attend(q, k, v))


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_where_no_part_saw_a_key_the_output_is_zero_and_the_lse_minus_infinity(num_parts: int) -> None:
    out, lse = merge_parts(torch.full((num_parts, 3, 4, 8), torch.nan), torch.full((num_parts, 3, 4), -torch.inf))
    assert torch.equal(out, torch.zeros(3, 4, 8))
    assert torch.equal(lse, torch.full((3, 4), -torch.inf))


def test_queries_that_saw_nothing_do_not_touch_queries_that_did() -> None:
    q, k, v = tensors(4, 10)
    outs, lses = in_parts(q, k, v, [4, 6])
    outs[:, 1], lses[:, 1] = torch.nan, -torch.inf
    outs[0, 2], lses[0, 2] = torch.nan, -torch.inf
    out, lse = merge_parts(outs, lses)
    assert torch.equal(out[1], torch.zeros(4, 8))
    assert lse[1].isneginf().all()
    assert_same((out[[0, 3]], lse[[0, 3]]), attend(q[[0, 3]], k, v))
    assert_same((out[2:3], lse[2:3]), attend(q[2:3], k[4:], v[4:]))


def test_the_order_of_the_parts_does_not_matter() -> None:
    q, k, v = tensors(3, 12)
    outs, lses = in_parts(q, k, v, [1, 0, 5, 6])
    expected = attend(q, k, v)
    for order in itertools.permutations(range(4)):
        assert_same(merge_parts(outs[list(order)], lses[list(order)]), expected)


def test_merging_what_was_merged_is_merging_all_at_once() -> None:
    q, k, v = tensors(3, 12)
    outs, lses = in_parts(q, k, v, [3, 4, 5])
    first = merge_parts(outs[:2], lses[:2])
    both = merge_parts(torch.stack([first[0], outs[2]]), torch.stack([first[1], lses[2]]))
    assert_same(both, attend(q, k, v))


@pytest.mark.parametrize("scale", [30.0, -30.0])
def test_scores_far_from_zero_neither_overflow_nor_vanish(scale: float) -> None:
    q, k, v = tensors(3, 12)
    spec = replace(SPEC, scale=scale)
    parts = [attend(q, k[part], v[part], spec) for part in (slice(0, 5), slice(5, 12))]
    out, lse = merge_parts(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    expected = attend(q, k, v, spec)
    assert expected[1].abs().max() > 100, "exp would overflow"
    torch.testing.assert_close((out, lse), expected, atol=1e-3, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    num_queries=st.integers(0, 3),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_any_cut_in_any_order_gives_attention_over_all_keys(
    sizes: list[int], num_queries: int, seed: int, data: st.DataObject
) -> None:
    q, k, v = tensors(num_queries, sum(sizes), seed)
    outs, lses = in_parts(q, k, v, sizes)
    order = data.draw(st.permutations(range(len(sizes))))
    assert_same(merge_parts(outs[order], lses[order]), attend(q, k, v))
