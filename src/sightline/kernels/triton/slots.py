"""Where chosen entries are: from places in a row to slots of a pool, so that decode reads them as pages of one token.

A choice names entries by their place in the row. Each query token becomes a row of its own, whose page table is the
slots of what it chose. Does not know who chooses, nor what an entry holds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.extend_tiles import FIELDS, Tiles

_BLOCK = 1024
"""How many entries or tokens a program handles."""


def count_choices(tiles: Tiles, top_k: int, counts: Tensor, lens: Tensor) -> None:
    """Writes how much every token of a step chooses under a causal mask, and whether it is real.

    `tiles` have one query each, and there are as many as tokens. `counts` [num_tokens] int64 becomes min(top_k, keys
    that a token sees), and `lens` [num_tokens] int64 becomes 1; both are 0 for padding.
    """
    num_tokens = counts.shape[0]
    if num_tokens == 0:
        return
    tiles.require_size(1)
    _count_choices[(triton.cdiv(num_tokens, _BLOCK),)](
        tiles.records, counts, lens, num_tokens, top_k, FIELDS=FIELDS, BLOCK=_BLOCK, num_warps=4
    )


def find_slots(chosen: Tensor, rows: Tensor, pages: Tensor | None, page_size: int) -> Tensor:
    """A `FindSlots` in one launch. Tokens whose places do not exist, as padding may hold them, get slot 0."""
    num_tokens, top_k = chosen.shape
    slots = torch.empty((num_tokens, top_k), dtype=torch.int64, device=chosen.device)
    if num_tokens == 0:
        return slots
    block = min(_BLOCK, triton.next_power_of_2(top_k))
    _find_slots[(num_tokens, triton.cdiv(top_k, block))](
        chosen, rows, pages, slots,
        chosen.stride(0), *((0, 0) if pages is None else (pages.stride(0), pages.shape[1])),
        TOP_K=top_k, PAGE_SIZE=page_size, PAGED=pages is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return slots


def list_slots(slots: Tensor, rows: Tensor, out: Tensor) -> None:
    """Copies the slots of tokens into one list `out` int32, as kernels of other libraries need them.

    `rows` [2, n] int64 has, for each token, how many slots it has, and where they begin in `out`. `slots` [num_tokens,
    top_k] int64 may have fewer tokens: those behind them have slot 0.
    """
    count, (num_tokens, top_k) = rows.shape[1], slots.shape
    if count == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(top_k))
    _list_slots[(count, triton.cdiv(top_k, block))](
        slots, rows, out, count, num_tokens, slots.stride(0), BLOCK=block, num_warps=4
    )


@triton.jit(do_not_specialize=["num_tokens", "top_k"])
def _count_choices(records, counts, lens, num_tokens, top_k, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """A program counts for some tokens. Tiles without a row come last, like padding tokens, which they stand for."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = tile < num_tokens
    record = records + tile * FIELDS
    is_real = tl.load(record, mask=exists, other=-1) >= 0
    query, first_token = tl.load(record + 1, mask=exists, other=0), tl.load(record + 2, mask=exists, other=0)
    query_len, num_keys = tl.load(record + 3, mask=exists, other=0), tl.load(record + 4, mask=exists, other=0)
    token = tl.where(is_real, first_token + query, tile)
    count = tl.minimum(num_keys - query_len + query + 1, top_k)
    tl.store(counts + token, tl.where(is_real, count, 0).to(tl.int64), mask=exists)
    tl.store(lens + token, is_real.to(tl.int64), mask=exists)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _find_slots(
    chosen, rows, pages, slots, chosen_stride, pages_stride, num_pages,
    TOP_K: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program finds some slots of one token."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = chosen + token * chosen_stride
    first = tl.maximum(tl.load(here), 0).to(tl.int64)
    place = tl.load(here + index, mask=index < TOP_K, other=-1).to(tl.int64)
    place = tl.where(place < 0, first, place)
    if PAGED:
        # Nothing is read behind the page table, whatever the places of padding are.
        is_place = place // PAGE_SIZE < num_pages
        page = tl.load(pages + row * pages_stride + place // PAGE_SIZE, mask=is_place, other=0)
        slot = tl.where(is_place, page * PAGE_SIZE + place % PAGE_SIZE, 0)
    else:
        slot = row + place
    tl.store(slots + token * TOP_K + index, slot, mask=index < TOP_K)


@triton.jit(do_not_specialize=["count", "num_tokens"])
def _list_slots(slots, rows, out, count, num_tokens, slots_stride, BLOCK: tl.constexpr):
    """A program copies some slots of one token."""
    token = tl.program_id(0).to(tl.int64)
    size, start = tl.load(rows + token), tl.load(rows + count + token)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = tl.where(token < num_tokens, size, 0)
    slot = tl.load(slots + token * slots_stride + index, mask=index < known, other=0)
    tl.store(out + start + index, slot.to(tl.int32), mask=index < size)
