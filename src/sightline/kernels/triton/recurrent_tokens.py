"""What kernels of recurrent layers share: where a step's tokens and states are, and inputs behind a convolution.

    tokens   | row 0 | row 1 ... | row n | of no row |
    slots    read_slots[row]: the state that a row begins with; slot 0 always holds zeros
             write_slots[token]: where the state behind a token is kept; 0: nowhere

No slot that a step writes is one that it reads. Does not know specs, batches or plans.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_FILL_BLOCK = 256


class TokenSlots(NamedTuple):
    """Where a step reads and keeps states."""

    read: Tensor
    """[num_rows] int64."""
    write: Tensor
    """[num_tokens] int64; 0: not kept."""


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Which tokens belong to which row; `find_tokens` fills both tensors."""

    offsets: Tensor
    """[num_rows + 1] int64: the first token of each row, and the end of the last."""
    rows: Tensor
    """[num_tokens] int32: the row of each token; -1 for tokens of no row."""


def find_tokens(query_lens: Tensor, tokens: TokenRows) -> None:
    """Derives the places of tokens from query_lens [num_rows] int64, in one launch."""
    num_rows = query_lens.shape[0]
    _find_tokens[(num_rows + 1,)](
        query_lens,
        tokens.offsets,
        tokens.rows,
        num_rows,
        tokens.rows.shape[0],
        BLOCK_ROWS=triton.next_power_of_2(max(num_rows, 1)),
        BLOCK=_FILL_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=["query_lens"])
def _find_tokens(
    query_lens, offsets, rows, num_rows, num_tokens, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program finds the tokens of a row; the last one, those of no row."""
    row = tl.program_id(0)
    other = tl.arange(0, BLOCK_ROWS)
    lens = tl.load(query_lens + other, mask=other < tl.minimum(row, num_rows), other=0)
    start = tl.sum(lens, axis=0)
    tl.store(offsets + row, start)
    is_row = row < num_rows
    end = start + tl.load(query_lens + row, mask=is_row, other=0)
    end = tl.where(is_row, end, num_tokens)
    name = tl.where(is_row, row, -1)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        tl.store(rows + token, tl.zeros([BLOCK], tl.int32) + name, mask=token < end)


@triton.jit
def input_at(mixed, tail, mixed_stride, first, place, channel, inside, TAILS: tl.constexpr, WIDTH: tl.constexpr):
    """The inputs of channels at a place of a row, whose first token is `first`: before it, those that the tail keeps.

    `tail` points to the row's own. Places and channels have shapes that broadcast.
    """
    # The interpreter refuses masks made of a scalar and a block.
    at = place + tl.zeros_like(channel)
    x = tl.load(mixed + (first + place) * mixed_stride + channel, mask=inside & (at >= 0), other=0.0).to(tl.float32)
    if TAILS:
        kept = tl.load(tail + channel * (WIDTH - 1) + at + (WIDTH - 1), mask=inside & (at < 0), other=0.0)
        x = tl.where(at >= 0, x, kept)
    return x
