"""The likeliest token of each row of logits, and whether all its logits are numbers, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.norms import row_stride

_BLOCK = 8192


def best_tokens(logits: Tensor, out: Tensor) -> None:
    """Does what `kernels.greedy.best_tokens` does, by one launch. Rows of the logits may be strided."""
    num_rows, size = logits.shape
    if num_rows == 0:
        return
    # A program reads its row alone: enough elements at a time keep the memory busy while it does.
    block = min(_BLOCK, triton.next_power_of_2(size))
    _best_tokens_kernel[(num_rows,)](
        logits, out, row_stride(logits), row_stride(out), SIZE=size, BLOCK=block, num_warps=max(1, block // 512)
    )


# The distance is the number of rows: one compilation serves them all.
@triton.jit(do_not_specialize=["out_stride"])
def _best_tokens_kernel(logits, out, logits_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program reads a row. Each lane keeps the first of its largest logits, so that equal ones need no order.

    Logits are compared as integers in their order, above which is NaN, and below which is what is not in the row.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -2147483648, tl.int32)
    token = lane
    worst = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, SIZE, BLOCK):
        place = start + lane
        inside = place < SIZE
        value = tl.load(logits + row * logits_stride + place, mask=inside, other=0.0)
        # Both zeros are equal.
        bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        worst = tl.maximum(worst, magnitude)
        key = tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        is_better = inside & (key > best)
        best = tl.where(is_better, key, best)
        token = tl.where(is_better, place, token)
    largest = tl.max(best, axis=0)
    first = tl.min(tl.where(best == largest, token, SIZE), axis=0)
    is_finite = tl.max(worst, axis=0) < 0x7F800000
    tl.store(out + row, first.to(tl.int64))
    tl.store(out + out_stride + row, is_finite.to(tl.int64))
