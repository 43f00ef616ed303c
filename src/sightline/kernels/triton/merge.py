"""Merges the attention results of the same queries over two sets of keys, by their log-sum-exps."""

import triton
import triton.language as tl
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Merges part b into part a, in place: outs [num_tokens, heads, dim], LSEs [num_tokens, heads] fp32.

    LSEs are natural logarithms, -inf if a part saw nothing: its out is then ignored, whatever it holds. If neither saw
    anything, out becomes 0 and the LSE -inf. The last dimension of the outs is contiguous; their dtypes may differ.
    """
    num_tokens, num_heads, dim = out_a.shape
    if num_tokens == 0:
        return
    block_dim = triton.next_power_of_2(dim)
    block_heads = max(1, 2048 // block_dim)
    num_token_heads = num_tokens * num_heads
    _merge_states[(triton.cdiv(num_token_heads, block_heads),)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        num_token_heads,
        *(stride for out, lse in ((out_a, lse_a), (out_b, lse_b)) for stride in (*out.stride()[:2], *lse.stride())),
        NUM_HEADS=num_heads,
        DIM=dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_token_heads"])
def _merge_states(
    out_a: tl.tensor,
    lse_a: tl.tensor,
    out_b: tl.tensor,
    lse_b: tl.tensor,
    num_token_heads: tl.tensor,
    out_a_token_stride: tl.tensor,
    out_a_head_stride: tl.tensor,
    lse_a_token_stride: tl.tensor,
    lse_a_head_stride: tl.tensor,
    out_b_token_stride: tl.tensor,
    out_b_head_stride: tl.tensor,
    lse_b_token_stride: tl.tensor,
    lse_b_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """A program merges some heads of one or several tokens."""
    token_head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = token_head < num_token_heads
    token = (token_head // NUM_HEADS).to(tl.int64)
    head = token_head % NUM_HEADS
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    inside = is_head[:, None] & (dim < DIM)
    at_lse_a = lse_a + token * lse_a_token_stride + head * lse_a_head_stride
    at_lse_b = lse_b + token * lse_b_token_stride + head * lse_b_head_stride
    seen_a = tl.load(at_lse_a, mask=is_head, other=0.0)
    seen_b = tl.load(at_lse_b, mask=is_head, other=0.0)
    largest = tl.maximum(seen_a, seen_b)
    # If neither saw anything, both weights must be exp(-inf) = 0; -inf minus itself would be NaN.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a = tl.exp(seen_a - base)
    weight_b = tl.exp(seen_b - base)
    total = weight_a + weight_b
    total = tl.where(total == 0.0, 1.0, total)
    share_a = (weight_a / total)[:, None]
    share_b = (weight_b / total)[:, None]
    at_a = out_a + (token * out_a_token_stride + head * out_a_head_stride)[:, None] + dim
    at_b = out_b + (token * out_b_token_stride + head * out_b_head_stride)[:, None] + dim
    # A part with weight 0 is not read: 0 times its contents could be NaN.
    part_a = tl.load(at_a, mask=inside & (share_a > 0.0), other=0.0).to(tl.float32)
    part_b = tl.load(at_b, mask=inside & (share_b > 0.0), other=0.0).to(tl.float32)
    tl.store(at_a, (part_a * share_a + part_b * share_b).to(out_a.dtype.element_ty), mask=inside)
    tl.store(at_lse_a, largest + tl.log(total), mask=is_head)
