"""Several residual streams: what a part of the network reads of them, and how its result is added, in one launch each.

The oracle is `kernels.residual_streams`. Arithmetic is fp32. Streams of a token are contiguous.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

_BLOCK = 512
"""Features of each stream that a program holds at once."""


@dataclass(frozen=True)
class StreamNumbers:
    """The numbers by which streams are read."""

    num_rounds: int
    """The divisions of the mixing by sums of its columns."""
    epsilon: float
    norm_epsilon: float


def collapse_streams(
    streams: Tensor,
    logits: Tensor,
    scale: Tensor,
    base: Tensor,
    numbers: StreamNumbers,
    writing: Tensor | None,
    mixing: Tensor | None,
    out: Tensor,
    *,
    overlaps: bool = False,
) -> None:
    """Writes the weighted sum of streams [num_tokens, count, size] to `out` [num_tokens, size].

    `logits` [num_tokens, num_logits] fp32 are those of the streams as they are. Fills the shares `writing` [num_tokens,
    count] and `mixing` [num_tokens, count, count] fp32, contiguous, unless both are None: then the logits are shares of
    reading alone.
    """
    num_tokens, count, size = streams.shape
    if num_tokens == 0:
        return
    _collapse_kernel[(num_tokens,)](
        streams,
        logits,
        scale,
        base,
        writing,
        mixing,
        out,
        numbers.epsilon,
        numbers.norm_epsilon,
        streams.stride(0),
        logits.stride(0),
        out.stride(0),
        ROUNDS=numbers.num_rounds,
        COUNT=count,
        SIZE=size,
        WIDE=triton.next_power_of_2(count),
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
        **overlap_settings(overlaps),
    )


def expand_streams(result: Tensor, writing: Tensor, mixing: Tensor, streams: Tensor, *, overlaps: bool = False) -> None:
    """Mixes the streams [num_tokens, count, size] in place, and adds shares of the result [num_tokens, size]."""
    num_tokens, count, size = streams.shape
    if num_tokens == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(size))
    _expand_kernel[(num_tokens, triton.cdiv(size, block))](
        result,
        writing,
        mixing,
        streams,
        result.stride(0),
        streams.stride(0),
        COUNT=count,
        SIZE=size,
        WIDE=triton.next_power_of_2(count),
        BLOCK=block,
        **overlap_settings(overlaps),
    )


@triton.jit
def _collapse_kernel(
    streams, logits, scale, base, writing, mixing, out, epsilon, norm_epsilon,
    streams_token, logits_token, out_token,
    ROUNDS: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program reads the streams of one token twice: for their norm, and for the sum."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, WIDE)
    feature = tl.arange(0, BLOCK)
    rows = streams + token * streams_token + stream[:, None] * SIZE
    squares = tl.zeros([WIDE, BLOCK], tl.float32)
    for first in range(0, SIZE, BLOCK):
        held = (stream < COUNT)[:, None] & (first + feature < SIZE)[None, :]
        x = tl.load(rows + first + feature[None, :], mask=held, other=0.0).to(tl.float32)
        squares += x * x
    factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (COUNT * SIZE) + norm_epsilon)
    given = logits + token * logits_token
    is_stream = stream < COUNT
    reading = _share(given + stream, factor, scale, base + stream, is_stream) + epsilon
    reading = tl.where(is_stream, reading, 0.0)
    if mixing is not None:
        kept = 2.0 * _share(given + COUNT + stream, factor, scale + 1, base + COUNT + stream, is_stream)
        tl.store(writing + token * COUNT + stream, kept, mask=is_stream)
        place = stream[:, None] * COUNT + stream[None, :]
        inside = is_stream[:, None] & is_stream[None, :]
        logit = tl.load(given + 2 * COUNT + place, mask=inside, other=0.0) * factor * tl.load(scale + 2)
        logit += tl.load(base + 2 * COUNT + place, mask=inside, other=0.0)
        shares = _doubly_stochastic(logit, inside, epsilon, ROUNDS)
        tl.store(mixing + token * COUNT * COUNT + place, shares, mask=inside)
    for first in range(0, SIZE, BLOCK):
        held = (stream < COUNT)[:, None] & (first + feature < SIZE)[None, :]
        x = tl.load(rows + first + feature[None, :], mask=held, other=0.0).to(tl.float32)
        total = tl.sum(x * reading[:, None], axis=0)
        tl.store(out + token * out_token + first + feature, total.to(out.dtype.element_ty), mask=first + feature < SIZE)


@triton.jit
def _share(logits, factor, scale, base, mask):
    """The sigmoid of logits that are normalised, scaled and shifted."""
    x = tl.load(logits, mask=mask, other=0.0) * factor * tl.load(scale) + tl.load(base, mask=mask, other=0.0)
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def _doubly_stochastic(logits, inside, epsilon, ROUNDS: tl.constexpr):
    """The softmax of each row, whose columns and rows are then divided by their sums in turn."""
    logits = tl.where(inside, logits, float("-inf"))
    # Rows outside have no largest number.
    largest = tl.max(logits, axis=1)[:, None]
    powers = tl.where(inside, tl.exp(logits - tl.where(largest > float("-inf"), largest, 0.0)), 0.0)
    total = tl.sum(powers, axis=1)[:, None]
    mixed = tl.where(inside, powers / tl.where(total > 0.0, total, 1.0) + epsilon, 0.0)
    mixed = mixed / (tl.sum(mixed, axis=0)[None, :] + epsilon)
    for _ in range(ROUNDS - 1):
        mixed = mixed / (tl.sum(mixed, axis=1)[:, None] + epsilon)
        mixed = mixed / (tl.sum(mixed, axis=0)[None, :] + epsilon)
    return mixed


@triton.jit
def _expand_kernel(
    result, writing, mixing, streams, result_token, streams_token,
    COUNT: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program updates some features of all streams of one token."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, WIDE)
    is_feature, is_stream = feature < SIZE, stream < COUNT
    added = tl.load(result + token * result_token + feature, mask=is_feature, other=0.0).to(tl.float32)
    shares = tl.load(writing + token * COUNT + stream, mask=is_stream, other=0.0)
    total = shares[:, None] * added[None, :]
    rows = streams + token * streams_token + feature
    for other in tl.static_range(COUNT):
        x = tl.load(rows + other * SIZE, mask=is_feature, other=0.0).to(tl.float32)
        share = tl.load(mixing + token * COUNT * COUNT + other * COUNT + stream, mask=is_stream, other=0.0)
        total += share[:, None] * x[None, :]
    # Other threads of the program read what is written here.
    tl.debug_barrier()
    held = is_stream[:, None] & is_feature[None, :]
    tl.store(rows[None, :] + stream[:, None] * SIZE, total.to(streams.dtype.element_ty), mask=held)
