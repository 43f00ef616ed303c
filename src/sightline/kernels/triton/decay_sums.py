"""Sums of decays within the chunks of segments, in one launch, for libraries that compute chunks from such sums.

Knows tensors. Does not know specs, batches or plans.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def decay_sums(
    decay: Tensor, borders: Tensor, chunks: Tensor, out: Tensor, *, chunk: int, scale: float, least: float
) -> None:
    """Writes `scale` times the sum of decays from the beginning of each token's chunk to the token.

    decay [num_tokens, heads, size] fp32, each head contiguous; numbers below `least` count as `least`. borders
    [segments + 1] int64 are the tokens at which segments begin and end. chunks [num_chunks, 2] int64 are a segment, and
    the number of a chunk of `chunk` tokens in it. `out` is fp32, contiguous and of decay's shape.
    """
    _, heads, size = decay.shape
    if chunks.shape[0] == 0:
        return
    _decay_sums[(chunks.shape[0], heads)](
        decay, borders, chunks, out, scale, least, *decay.stride()[:2], out.stride(0),
        SIZE=size, CHUNK=chunk, BLOCK=triton.next_power_of_2(size), num_warps=8,
    )  # fmt: skip


@triton.jit
def _decay_sums(
    decay, borders, chunks, out, scale, least, token_stride, head_stride, out_stride,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program computes a head of a chunk."""
    segment = tl.load(chunks + tl.program_id(0) * 2)
    first = tl.load(borders + segment) + tl.load(chunks + tl.program_id(0) * 2 + 1) * CHUNK
    token, head, place = first + tl.arange(0, CHUNK), tl.program_id(1), tl.arange(0, BLOCK)
    inside = (token < tl.load(borders + segment + 1))[:, None] & (place < SIZE)[None, :]
    given = tl.load(decay + token[:, None] * token_stride + head * head_stride + place[None, :], mask=inside, other=0.0)
    # tl.maximum would drop NaN.
    sums = tl.cumsum(tl.where(given < least, least, given), axis=0) * scale
    tl.store(out + token[:, None] * out_stride + head * SIZE + place[None, :], sums, mask=inside)
