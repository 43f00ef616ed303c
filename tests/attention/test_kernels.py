"""The two ways of computing attention agree with each other and with a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sightline.kernels.paging import gather_entries, gather_scaled_entries, write_entries, write_scaled_entries
from sightline.kernels.softmax_attention import composed_attention, fused_attention

SCALE = 0.3
HEADS = [(4, 4), (6, 2), (4, 1)]


def inputs(q_heads: int, kv_heads: int, query_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(q_heads + kv_heads + query_len + kv_len)
    return (
        torch.randn(3, query_len, q_heads, 8, generator=generator) * 2,
        torch.randn(3, kv_len, kv_heads, 8, generator=generator).transpose(1, 2),
        torch.randn(3, kv_len, kv_heads, 8, generator=generator).transpose(1, 2),
    )


def ragged_bias(query_len: int, kv_len: int) -> Tensor:
    """Row r sees all but its last r keys; later queries see one key more."""
    visible = torch.zeros(3, 1, query_len, kv_len, dtype=torch.bool)
    for row in range(3):
        for query in range(query_len):
            visible[row, 0, query, : max(1, kv_len - row - query_len + 1 + query)] = True
    return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)


def looped(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One query and one head at a time, in plain numbers."""
    rows, query_len, q_heads, _ = q.shape
    out, lse = torch.zeros(q.shape), torch.zeros(rows, query_len, q_heads)
    for row in range(rows):
        for query in range(query_len):
            for head in range(q_heads):
                kv_head = head // (q_heads // k.shape[1])
                total = 0.0 if sinks is None else math.exp(float(sinks[head]))
                for key in range(k.shape[2]):
                    score = float(q[row, query, head] @ k[row, kv_head, key]) * SCALE
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    weight = math.exp(score + (0.0 if bias is None else float(bias[row, 0, query, key])))
                    out[row, query, head] += weight * v[row, kv_head, key]
                    total += weight
                out[row, query, head] /= total or 1.0
                lse[row, query, head] = math.log(total) if total else -math.inf
    return out, lse


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("query_len", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_and_composed_agree(heads: tuple[int, int], query_len: int, masked: bool) -> None:
    q, k, v = inputs(*heads, query_len, 9)
    bias = ragged_bias(query_len, 9) if masked else None
    fused = fused_attention(q, k, v, bias, scale=SCALE, causal=False)
    composed, _ = composed_attention(q, k, v, bias, scale=SCALE, softcap=None, sinks=None)
    torch.testing.assert_close(fused, composed, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_causal_is_the_bias_of_a_triangle(heads: tuple[int, int]) -> None:
    q, k, v = inputs(*heads, 7, 7)
    triangle = torch.full((7, 7), -torch.inf).triu(1).expand(3, 1, 7, 7)
    fused = fused_attention(q, k, v, None, scale=SCALE, causal=True)
    composed, _ = composed_attention(q, k, v, triangle, scale=SCALE, softcap=None, sinks=None)
    torch.testing.assert_close(fused, composed, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_composed_is_the_plain_loop(
    heads: tuple[int, int], query_len: int, masked: bool, softcap: float | None, with_sinks: bool
) -> None:
    q, k, v = inputs(*heads, query_len, 5)
    bias = ragged_bias(query_len, 5) if masked else None
    sinks = torch.linspace(-1.0, 2.0, heads[0]) if with_sinks else None
    out, lse = composed_attention(q, k, v, bias, scale=SCALE, softcap=softcap, sinks=sinks)
    expected, expected_lse = looped(q, k, v, bias, softcap, sinks)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity() -> None:
    q, k, v = inputs(4, 2, 2, 5)
    bias = torch.zeros(3, 1, 2, 5)
    bias[1, 0, 0] = -torch.inf
    out, lse = composed_attention(q, k, v, bias, scale=SCALE, softcap=None, sinks=None)
    assert out[1, 0].count_nonzero() == 0
    assert lse[1, 0].isneginf().all()
    assert out[1, 1].isfinite().all()
    assert lse[[0, 2]].isfinite().all()


def test_a_query_that_sees_only_its_sink_gives_zero_and_the_sinks_logit() -> None:
    q, k, v = inputs(4, 2, 1, 5)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    bias = torch.full((3, 1, 1, 5), -torch.inf)
    out, lse = composed_attention(q, k, v, bias, scale=SCALE, softcap=None, sinks=sinks)
    assert out.count_nonzero() == 0
    torch.testing.assert_close(lse, sinks.expand(3, 1, 4))


def test_inputs_are_left_as_they_were() -> None:
    q, k, v = inputs(4, 2, 3, 5)
    bias, sinks = ragged_bias(3, 5), torch.ones(4)
    before = [tensor.clone() for tensor in (q, k, v, bias, sinks)]
    composed_attention(q, k, v, bias, scale=SCALE, softcap=1.0, sinks=sinks)
    fused_attention(q, k, v, bias, scale=SCALE, causal=False)
    assert all(torch.equal(now, was) for now, was in zip((q, k, v, bias, sinks), before, strict=True))


def test_low_precision_is_computed_in_fp32_and_returned_as_it_came() -> None:
    q, k, v = (tensor.bfloat16() for tensor in inputs(4, 2, 3, 5))
    out, lse = composed_attention(q, k, v, None, scale=SCALE, softcap=None, sinks=None)
    exact, exact_lse = composed_attention(q.float(), k.float(), v.float(), None, scale=SCALE, softcap=None, sinks=None)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, exact.bfloat16())
    assert torch.equal(lse, exact_lse)


def test_entries_are_written_where_the_slots_say_and_nowhere_else() -> None:
    plane = torch.full((10, 2, 3), torch.nan)
    values = torch.arange(18.0).view(3, 2, 3)
    write_entries(plane, torch.tensor([7, 0, 4]), values)
    assert torch.equal(plane[[7, 0, 4]], values)
    assert plane[[1, 2, 3, 5, 6, 8, 9]].isnan().all()


def test_gathered_entries_come_in_the_order_of_the_slots_repeated_where_named_twice() -> None:
    plane = torch.arange(60.0).view(10, 2, 3)
    out = torch.full((4, 2, 3), torch.nan)
    gather_entries(plane, torch.tensor([9, 2, 2, 0]), out)
    assert torch.equal(out, torch.stack([plane[9], plane[2], plane[2], plane[0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.3])
def test_scaled_entries_are_divided_rounded_and_multiplied_again(dtype: torch.dtype, scale: float) -> None:
    plane = torch.full((10, 2, 3), torch.nan).to(torch.float8_e4m3fn)
    values = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = values.clone()
    write_scaled_entries(plane, torch.tensor([7, 0, 4]), values, scale)
    assert torch.equal(values, before)
    assert torch.equal(plane.float()[[7, 0, 4]], (values.float() / scale).to(torch.float8_e4m3fn).float())
    assert plane.float()[[1, 2, 3, 5, 6, 8, 9]].isnan().all()
    out = torch.full((2, 2, 3), torch.nan, dtype=dtype)
    gather_scaled_entries(plane, torch.tensor([4, 7]), scale, out)
    # Three binary digits after the first are kept: half of the last of them is lost at most.
    torch.testing.assert_close(out, values[[2, 0]], rtol=2.0**-4 + 2.0**-8, atol=2.0**-9 * scale)


def test_what_is_beyond_the_range_of_8_bits_is_saturated_and_nan_stays_nan() -> None:
    plane = torch.zeros(4, 2).to(torch.float8_e4m3fn)
    values = torch.tensor([[448.0, -449.0], [1e30, -torch.inf], [torch.nan, 464.1]])
    write_scaled_entries(plane, torch.tensor([0, 1, 3]), values, 1.0)
    expected = torch.tensor([[448.0, -448.0], [448.0, -448.0], [0.0, 0.0], [torch.nan, 448.0]])
    torch.testing.assert_close(plane.float(), expected, equal_nan=True)
