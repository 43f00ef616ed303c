"""Makes chosen entries hot on a GPU: one launch finds them and gives slots to those that are missing, one copies these.

The second launch reads host memory over the bus, in stream order. The host waits for nothing, and shapes depend on the
sizes of the step alone, so that both can be captured. `kernels/hot_entries.py` says what is computed.
"""

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.hot_entries import HotBuffer, TurnRows

_ENTRIES = 4
"""The number of entries that a program looks at to copy them."""


def fetch_entries(buffer: HotBuffer, layer: int, turn: TurnRows, chosen: Tensor, slots: Tensor) -> None:
    """See `FetchEntries`."""
    count, tokens, top_k = chosen.shape
    if not count:
        return
    size, wanted = buffer.held.shape[2], tokens * top_k
    sources = buffer.sources.view(-1)
    _find_kernel[(count,)](
        buffer.held[layer],
        buffer.order[layer],
        buffer.places,
        buffer.work[0],
        buffer.work[1],
        turn.rows,
        turn.contexts,
        turn.firsts,
        chosen.contiguous(),
        buffer.pages,
        slots,
        sources,
        buffer.counts,
        layer * buffer.held.shape[1],
        buffer.places.stride(0),
        *buffer.pages.stride(),
        SIZE=size,
        TOP_K=top_k,
        WANTED=wanted,
        PAGE_SIZE=buffer.page_size,
        APART=buffer.apart,
        BLOCK_SIZE=triton.next_power_of_2(size),
        BLOCK_WANTED=triton.next_power_of_2(wanted),
        num_warps=8,
    )
    width = buffer.plane.shape[1]
    _copy_kernel[(triton.cdiv(count * wanted, _ENTRIES),)](
        buffer.host[layer],
        buffer.plane,
        sources,
        slots,
        count * wanted,
        WIDTH=width,
        ENTRIES=_ENTRIES,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )


@triton.jit
def _slot_of(place, places, row_base, context, first, APART: tl.constexpr):
    """The slot of a place of the row in the plane: hot, or among the step's own entries."""
    is_old = (place >= 0) & (place < context)
    found = tl.load(places + place, mask=is_old, other=0).to(tl.int64)
    return tl.where(is_old, row_base + found, tl.where(place < 0, 0, first + (place - context) * APART))


@triton.jit(do_not_specialize=["first_row"])
def _find_kernel(
    held,
    order,
    places,
    marks,
    given,
    rows,
    contexts,
    firsts,
    chosen,
    pages,
    slots,
    sources,
    counts,
    first_row,
    places_stride,
    pages_stride,
    page_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    WANTED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_WANTED: tl.constexpr,
):
    """A program serves one row. What other threads wrote to memory is read behind a barrier."""
    turn_row = tl.program_id(0)
    row, context, first = tl.load(rows + turn_row), tl.load(contexts + turn_row), tl.load(firsts + turn_row)
    held += row * SIZE
    order += row * SIZE
    places += row * places_stride
    marks += turn_row * SIZE
    given += turn_row * SIZE
    slot = tl.arange(0, BLOCK_SIZE)
    exists = slot < SIZE
    place = tl.load(held + slot, mask=exists, other=-1)
    tl.store(places + place, slot, mask=exists & (place >= 0))
    tl.store(marks + slot, 0, mask=exists)
    tl.debug_barrier()
    number = tl.arange(0, BLOCK_WANTED)
    chosen += turn_row * WANTED
    num_wanted = tl.where(row > 0, WANTED, 0)
    wanted = tl.load(chosen + number, mask=number < num_wanted, other=-1)
    is_old = (wanted >= 0) & (wanted < context)
    guess = tl.load(places + wanted, mask=is_old, other=-1)
    may_be = is_old & (guess >= 0) & (guess < SIZE)
    is_hot = may_be & (tl.load(held + guess, mask=may_be, other=-1) == wanted)
    tl.store(marks + guess, 1, mask=is_hot)
    # Several tokens may miss the same place: only the one whose number is stored there copies it.
    missing = is_old & ~is_hot
    tl.debug_barrier()
    tl.store(places + wanted, SIZE + number, mask=missing)
    tl.debug_barrier()
    is_first = missing & (tl.load(places + wanted, mask=missing, other=-1) == SIZE + number)
    count = tl.sum(is_first.to(tl.int32), 0)
    its_slot = tl.load(order + slot, mask=exists, other=0)
    is_empty = exists & (tl.load(held + its_slot, mask=exists, other=0) < 0)
    is_chosen = exists & (tl.load(marks + its_slot, mask=exists, other=0) == 1)
    is_free = exists & ~is_empty & ~is_chosen
    num_empty, num_free = tl.sum(is_empty.to(tl.int32), 0), tl.sum(is_free.to(tl.int32), 0)
    free_rank = num_empty + tl.cumsum(is_free.to(tl.int32), 0) - 1
    rank = tl.where(is_empty, tl.cumsum(is_empty.to(tl.int32), 0) - 1, free_rank)
    is_given = (is_empty | is_free) & (rank < count)
    tl.store(given + rank, its_slot, mask=is_given)
    was_chosen = num_empty + num_free - count + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    position = tl.where(is_given, SIZE - count + rank, tl.where(is_chosen, was_chosen, rank - count))
    tl.debug_barrier()
    tl.store(order + position, its_slot, mask=exists)
    target = tl.load(given + tl.cumsum(is_first.to(tl.int32), 0) - 1, mask=is_first, other=0)
    tl.store(held + target, wanted, mask=is_first)
    tl.store(places + wanted, target, mask=is_first)
    tl.debug_barrier()
    row_base = (first_row + row) * SIZE
    lead = tl.load(chosen + number // TOP_K * TOP_K, mask=number < num_wanted, other=-1)
    own = _slot_of(wanted, places, row_base, context, first, APART)
    found = tl.where(wanted < 0, _slot_of(lead, places, row_base, context, first, APART), own)
    out = turn_row * WANTED + number
    tl.store(slots + out, found, mask=number < WANTED)
    page_place = pages + row * pages_stride + wanted // PAGE_SIZE * page_stride
    page = tl.load(page_place, mask=is_first, other=0)
    source = tl.where(is_first, page * PAGE_SIZE + wanted % PAGE_SIZE, -1)
    tl.store(sources + out, source, mask=number < WANTED)
    tl.atomic_add(counts, tl.sum(is_old.to(tl.int64), 0))
    tl.atomic_add(counts + 1, count.to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def _copy_kernel(host, plane, sources, slots, count, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):
    """A program copies those of a few entries that have a source."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    source = tl.load(sources + entry, mask=entry < count, other=-1)
    target = tl.load(slots + entry, mask=entry < count, other=0)
    word = tl.arange(0, BLOCK)
    is_copied = (source >= 0)[:, None] & (word < WIDTH)[None, :]
    values = tl.load(host + source[:, None] * WIDTH + word[None, :], mask=is_copied)
    tl.store(plane + target[:, None] * WIDTH + word[None, :], values, mask=is_copied)
