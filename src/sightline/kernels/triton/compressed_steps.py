"""Keeps the tokens of a step of compressed attention, in one launch: states, entries, and where chosen entries are.

    of a token   sums and entry | part of the ring | ... | part of the ring | slots of what it chose | ...

The softmax over a window's tokens is per channel, so a window is kept as running sums: for each channel the maximum of
the gates, the sum of exp(gate - maximum), and that sum weighted with values. A program computes the sums behind one
token from the state behind the row's context and the step's tokens in the same window, so that tokens of a prompt do
not wait for each other; it returns at once unless the token completes a window or its state is kept.

Knows tensors and slots. Does not know specs, batches or plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.compressed_tokens import CompressedTokens, EntryPages, entry_slots
from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

_NOTHING = tl.constexpr(float("-inf"))
_FEW_TOKENS = 512
"""Up to this many tokens, several programs copy a ring. In longer steps, few of the tokens keep a state."""
_RING_NUMBERS = 8192
"""About how many numbers of a ring a program copies."""
_CHOICES = 1024
"""How many chosen entries a program finds."""


@dataclass(frozen=True)
class CompressionRule:
    """How tokens become entries; see `attention.compressed.spec.Compression`."""

    ratio: int
    overlap: bool
    rope_dim: int
    norm_eps: float


@dataclass(frozen=True, eq=False)
class NewEntries:
    """What becomes entries, and where they and the sums of open windows are kept."""

    values: Tensor
    """[num_tokens, width], the numbers of a token contiguous; with overlap [for the next entry | for its own]."""
    gates: Tensor
    """[num_tokens, width]."""
    norm: Tensor
    """[head_dim]."""
    cos: Tensor
    """[num_tokens, rope_dim / 2] fp32, the numbers of a token contiguous."""
    sin: Tensor
    sums: Tensor | None
    """[num_slots, 1 or 3, 3, head_dim] fp32, each slot contiguous; None: rows begin without, and none are kept."""
    entries: Tensor
    """[num_slots, head_dim]."""
    slots: Tensor | None
    """[num_tokens] int64: where the entry that a token completes goes; 0: nowhere. None: to the index of the row's
    first token in the step + the number of the entry."""


@dataclass(frozen=True, eq=False)
class NewKeys:
    """The keys of a step, and the rings of states that have the last ones."""

    key: Tensor
    """[num_tokens, head_dim]."""
    window: Tensor
    """[num_slots, window, head_dim]: the key at position p is at p % window. Each slot is contiguous."""


@dataclass(frozen=True, eq=False)
class NewChoice:
    """What queries chose, and where that is."""

    chosen: Tensor
    """[num_tokens, top_k] int32, -1 behind the last."""
    places: EntryPages
    slots: Tensor
    """[num_tokens, top_k] int32: written as far as something is chosen."""


def keep_tokens(
    tokens: CompressedTokens,
    rule: CompressionRule | None,
    new: NewEntries | None,
    keys: NewKeys | None,
    choice: NewChoice | None,
    *,
    overlaps: bool = False,
) -> None:
    """Writes the states that are kept, the entries that are completed, and the slots of chosen entries.

    `rule` and `new` are given together. Reads nothing that it writes.
    """
    num_tokens, slots = tokens.num_tokens, tokens.slots
    keys = None if slots is None else keys
    rings, rows = (0, 1) if keys is None else _ring_parts(num_tokens, *keys.window.shape[1:])
    choices, top_k = (
        (0, 1) if choice is None else (triton.cdiv(choice.chosen.shape[1], _CHOICES), choice.slots.shape[1])
    )
    parts = int(new is not None) + rings + choices
    if num_tokens == 0 or parts == 0:
        return
    ratio, rope_dim = (1, 0) if rule is None else (rule.ratio, rule.rope_dim)
    dim = new.entries.shape[1] if new is not None else 1 if keys is None else keys.window.shape[2]
    places = None if choice is None else choice.places
    _keep_tokens[(num_tokens, parts)](
        *((None,) * 8 if new is None else _tensors_of(new)),
        *((None, None) if keys is None else (keys.key, keys.window)),
        *((None, None) if choice is None else (choice.chosen, choice.slots)),
        *((None, None) if places is None else (places.pages, places.table_rows)),
        tokens.rows.rows, tokens.rows.offsets, tokens.context_lens, *((None, None) if slots is None else slots),
        0.0 if rule is None else rule.norm_eps,
        *((0,) * 6 if new is None else _strides_of(new)),
        *((0, 0) if keys is None else (keys.key.stride(0), keys.window.stride(0))),
        0 if choice is None else choice.chosen.stride(0), 0 if places is None else places.max_pages,
        WINDOW=1 if keys is None else keys.window.shape[1], DIM=dim, DIMS=max(2, triton.next_power_of_2(dim)),
        RATIO=ratio, OVERLAP=rule is not None and rule.overlap, ROPE_DIM=rope_dim, AT_ONCE=4 if ratio <= 4 else 8,
        SLOTTED=new is not None and new.slots is not None, CONTEXT=tokens.context_lens is not None,
        KEEPS=slots is not None, ENTRIES=int(new is not None), RINGS=rings, RING_ROWS=rows, CHOICES=choices,
        TOP_K=top_k, CHOICE_BLOCK=_CHOICES, PAGED=places is not None and places.pages is not None,
        IN_PAGE=1 if places is None else places.in_page, APART=1 if places is None else places.apart,
        num_warps=4, **overlap_settings(overlaps),
    )  # fmt: skip


def _ring_parts(num_tokens: int, window: int, dim: int) -> tuple[int, int]:
    """How many programs copy a ring, and how many of its keys at a time."""
    rows = max(1, min(triton.next_power_of_2(window), _RING_NUMBERS // triton.next_power_of_2(dim)))
    return (triton.cdiv(window, rows) if num_tokens <= _FEW_TOKENS else 1), rows


def _tensors_of(new: NewEntries) -> tuple[Tensor | None, ...]:
    return new.values, new.gates, new.norm, new.cos, new.sin, new.sums, new.entries, new.slots


def _strides_of(new: NewEntries) -> tuple[int, ...]:
    sums = 0 if new.sums is None else new.sums.stride(0)
    return *(each.stride(0) for each in (new.values, new.gates, new.cos, new.sin, new.entries)), sums


@triton.jit
def _kept_sums(sums, triple, wanted, channel, DIM: tl.constexpr):
    """A triple of a state: the maximum, the sum, and the weighted sum; nothing unless it is wanted."""
    place = sums + triple * 3 * DIM + channel
    # The interpreter refuses masks made of a scalar and a block.
    mask = channel < tl.where(wanted, DIM, 0)
    total = tl.load(place + DIM, mask=mask, other=0.0)
    # A sum of 0 means no token, whatever the other numbers are.
    is_there = total > 0.0
    largest = tl.where(is_there, tl.load(place, mask=mask, other=0.0), _NOTHING)
    weighted = tl.where(is_there, tl.load(place + 2 * DIM, mask=mask, other=0.0), 0.0)
    return largest, tl.where(is_there, total, 0.0), weighted


@triton.jit
def _store_sums(sums, triple, largest, total, weighted, channel, in_channel, DIM: tl.constexpr):
    place = sums + triple * 3 * DIM + channel
    tl.store(place, tl.where(total > 0.0, largest, 0.0), mask=in_channel)
    tl.store(place + DIM, total, mask=in_channel)
    tl.store(place + 2 * DIM, weighted, mask=in_channel)


@triton.jit
def _finite(largest):
    """What is subtracted from exponents: -inf minus itself would be NaN."""
    return tl.where(largest == _NOTHING, 0.0, largest)


@triton.jit
def _joined(largest, total, weighted, other_largest, other_total, other_weighted):
    """The sums over the tokens of both."""
    higher = tl.maximum(largest, other_largest)
    base = _finite(higher)
    shrink, other_shrink = tl.exp(largest - base), tl.exp(other_largest - base)
    total = total * shrink + other_total * other_shrink
    return higher, total, weighted * shrink + other_weighted * other_shrink


@triton.jit
def _with_tokens(
    values, gates, values_stride, gates_stride, first, stop, largest, total, weighted, channel, in_channel,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Adds the tokens from `first` to `stop` of the step to sums. `channel` is the place of each channel's number."""
    for start in range(first, stop, AT_ONCE):
        token = start + tl.arange(0, AT_ONCE)
        mask = (token < stop)[:, None] & in_channel[None, :]
        gate = tl.load(gates + (token * gates_stride)[:, None] + channel[None, :], mask=mask, other=_NOTHING)
        value = tl.load(values + (token * values_stride)[:, None] + channel[None, :], mask=mask, other=0.0)
        gate = gate.to(tl.float32)
        higher = tl.maximum(largest, tl.max(gate, 0))
        base = _finite(higher)
        shrink, weight = tl.exp(largest - base), tl.exp(gate - base[None, :])
        total = total * shrink + tl.sum(weight, 0)
        weighted = weighted * shrink + tl.sum(weight * value.to(tl.float32), 0)
        largest = higher
    return largest, total, weighted


@triton.jit
def _write_entry(
    entry, total, weighted, norm, norm_eps, cos, sin, channel, in_channel,
    DIM: tl.constexpr, DIMS: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates what a window mixes, and writes it."""
    mixed = weighted / tl.where(in_channel, total, 1.0)
    factor = tl.rsqrt(tl.sum(mixed * mixed, 0) / DIM + norm_eps)
    result = mixed * factor * tl.load(norm + channel, mask=in_channel, other=0.0).to(tl.float32)
    if ROPE_DIM > 0:
        pair = tl.arange(0, DIMS // 2)
        turn = pair - (DIM - ROPE_DIM) // 2
        is_turned = (turn >= 0) & (pair < DIM // 2)
        cosine = tl.load(cos + turn, mask=is_turned, other=1.0)
        sine = tl.load(sin + turn, mask=is_turned, other=0.0)
        even, odd = tl.split(tl.reshape(result, (DIMS // 2, 2)))
        result = tl.reshape(tl.join(even * cosine - odd * sine, odd * cosine + even * sine), (DIMS,))
    tl.store(entry + channel, result.to(entry.dtype.element_ty), mask=in_channel)


@triton.jit(
    do_not_specialize=["max_pages", "chosen_stride"],
    do_not_specialize_on_alignment=[
        "entry_slots_of", "token_rows", "offsets", "context_lens", "read_slots", "write_slots", "table_rows", "chosen",
    ],
)  # fmt: skip
def _keep_tokens(
    values, gates, norm, cos, sin, sums, entries, entry_slots_of, key, window, chosen, chosen_slots, pages, table_rows,
    token_rows, offsets, context_lens, read_slots, write_slots, norm_eps,
    values_stride, gates_stride, cos_stride, sin_stride, entries_stride, sums_stride, key_stride, window_stride,
    chosen_stride, max_pages,
    WINDOW: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
    ROPE_DIM: tl.constexpr, AT_ONCE: tl.constexpr, SLOTTED: tl.constexpr, CONTEXT: tl.constexpr, KEEPS: tl.constexpr,
    ENTRIES: tl.constexpr, RINGS: tl.constexpr, RING_ROWS: tl.constexpr, CHOICES: tl.constexpr, TOP_K: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr, PAGED: tl.constexpr, IN_PAGE: tl.constexpr, APART: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program does a part of the work for one token."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(OVERLAPS)
    row = tl.load(token_rows + token)
    if row < 0:
        return
    first = tl.load(offsets + row)
    context = tl.zeros([], tl.int64)
    if CONTEXT:
        context = tl.load(context_lens + row)
    position = context + token - first
    slot, kept = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if KEEPS:
        slot, kept = tl.load(read_slots + row), tl.load(write_slots + token)
    channel = tl.arange(0, DIMS)
    in_channel = channel < DIM
    if ENTRIES and part == 0:
        completes = (position + 1) % RATIO == 0
        if completes | (kept != 0):
            # The step's tokens of the row, as if their index were their position.
            at = token - position
            begin = position // RATIO * RATIO
            own_first = at + tl.maximum(begin, context)
            continues = begin < context
            state = sums
            if KEEPS:
                state = sums + slot * sums_stride
            largest = tl.full([DIMS], _NOTHING, tl.float32)
            total = tl.zeros([DIMS], tl.float32)
            weighted = tl.zeros([DIMS], tl.float32)
            own = channel
            if OVERLAP:
                own = channel + DIM
            if KEEPS:
                largest, total, weighted = _kept_sums(state, 0, continues, channel, DIM)
            largest, total, weighted = _with_tokens(
                values, gates, values_stride, gates_stride, own_first, token + 1, largest, total, weighted,
                own, in_channel, AT_ONCE,
            )  # fmt: skip
            largest_b, total_b, weighted_b = tl.full([DIMS], _NOTHING, tl.float32), total * 0.0, total * 0.0
            if OVERLAP:
                if KEEPS:
                    # Behind the context, the window before this one is the one before, the open one or a later one.
                    triple = tl.where(context >= begin, 2, 1)
                    wanted = context > begin - RATIO
                    largest_b, total_b, weighted_b = _kept_sums(state, triple, wanted, channel, DIM)
                largest_b, total_b, weighted_b = _with_tokens(
                    values, gates, values_stride, gates_stride, at + tl.maximum(begin - RATIO, context), at + begin,
                    largest_b, total_b, weighted_b, channel, in_channel, AT_ONCE,
                )  # fmt: skip
            if completes:
                target = first + position // RATIO
                if SLOTTED:
                    target = tl.load(entry_slots_of + token)
                if (target != 0) | (not SLOTTED):
                    _, total_e, weighted_e = _joined(largest, total, weighted, largest_b, total_b, weighted_b)
                    _write_entry(
                        entries + target * entries_stride, total_e, weighted_e, norm, norm_eps,
                        cos + token * cos_stride, sin + token * sin_stride, channel, in_channel, DIM, DIMS, ROPE_DIM,
                    )  # fmt: skip
            if KEEPS and kept != 0:
                behind = sums + kept * sums_stride
                # Behind the last token of a window, the open one is empty.
                total, weighted = tl.where(completes, 0.0, total), tl.where(completes, 0.0, weighted)
                _store_sums(behind, 0, largest, total, weighted, channel, in_channel, DIM)
                if OVERLAP:
                    largest, total, weighted = tl.full([DIMS], _NOTHING, tl.float32), total * 0.0, total * 0.0
                    largest, total, weighted = _kept_sums(state, 1, continues, channel, DIM)
                    largest, total, weighted = _with_tokens(
                        values, gates, values_stride, gates_stride, own_first, token + 1, largest, total, weighted,
                        channel, in_channel, AT_ONCE,
                    )  # fmt: skip
                    _store_sums(
                        behind, 2, tl.where(completes, largest, largest_b), tl.where(completes, total, total_b),
                        tl.where(completes, weighted, weighted_b), channel, in_channel, DIM,
                    )  # fmt: skip
                    total, weighted = tl.where(completes, 0.0, total), tl.where(completes, 0.0, weighted)
                    _store_sums(behind, 1, largest, total, weighted, channel, in_channel, DIM)
    elif part < ENTRIES + RINGS:
        if KEEPS and RINGS > 0 and kept != 0:
            for start in range((part - ENTRIES) * RING_ROWS, WINDOW, RINGS * RING_ROWS):
                place = start + tl.arange(0, RING_ROWS)
                # The last position at each place of the ring.
                behind = position - (position + WINDOW - place) % WINDOW
                exists = (place < WINDOW)[:, None] & in_channel[None, :]
                offset = place[:, None] * DIM + channel[None, :]
                is_new = (behind >= context)[:, None]
                is_old = (behind >= 0)[:, None] & (behind < context)[:, None]
                source = key + ((first + behind - context) * key_stride)[:, None] + channel[None, :]
                old = tl.load(window + slot * window_stride + offset, mask=exists & is_old, other=0.0)
                new = tl.load(source, mask=exists & is_new, other=0.0).to(old.dtype)
                tl.store(window + kept * window_stride + offset, tl.where(is_new, new, old), mask=exists)
    elif CHOICES > 0:
        index = (part - ENTRIES - RINGS) * CHOICE_BLOCK + tl.arange(0, CHOICE_BLOCK)
        entry = tl.load(chosen + token * chosen_stride + index, mask=index < TOP_K, other=-1).to(tl.int64)
        is_chosen = entry >= 0
        if PAGED:
            found = entry_slots(pages + tl.load(table_rows + row) * max_pages, entry, is_chosen, IN_PAGE, APART)
        else:
            found = first + entry
        tl.store(chosen_slots + token * TOP_K + index, found.to(tl.int32), mask=is_chosen)
