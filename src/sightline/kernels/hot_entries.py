"""A buffer of hot entries for each row and layer, in front of entries in host memory, with torch.

    held   [rows, buffer]   the place in its row of each entry that is hot, -1 where nothing is
    order  [rows, buffer]   the buffer's slots, the one that was chosen longest ago first
    places [rows, length]   where each place may be hot; valid only if `held` agrees, so it is never cleared

Knows tensors. Does not know pools, plans or what an entry means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, eq=False)
class HotBuffer:
    """The tensors of one group of layers. Row 0 is the padding row: nothing of it is ever fetched."""

    plane: Tensor
    """[num_slots, width]: on the device, entries as words; slot (layer * rows + row) * buffer + i is hot slot i."""
    host: Tensor
    """[num_layers, num_host_slots, width]: every entry, as words."""
    pages: Tensor
    """[rows, max_pages] int64, of any strides: the pages that have the entries of each row in `host`."""
    page_size: int
    """Entries of a page."""
    apart: int
    """Slots from one new entry of a row to the next: the tokens of an entry."""
    held: Tensor
    """[num_layers, rows, buffer] int32."""
    order: Tensor
    """[num_layers, rows, buffer] int32: a permutation of the buffer's slots for each row."""
    places: Tensor
    """[rows, length + 1] int32, uninitialized; the last column takes what has no place."""
    counts: Tensor
    """[2] int64: entries that were chosen, and those of them that were copied from the host."""
    work: Tensor
    """[2, most rows of a turn, buffer] int32: scratch memory for kernels."""
    sources: Tensor
    """[most tokens of a turn, top_k] int64: scratch memory for kernels."""


class TurnRows(NamedTuple):
    """Rows whose chosen entries are fetched together, each row once, except row 0."""

    rows: Tensor
    """[n] int64."""
    contexts: Tensor
    """[n] int64: entries of the row that are in `host` before the step."""
    firsts: Tensor
    """[n] int64: the slot of `plane` that has the row's first new entry; the others follow, `apart` slots each."""


class FetchEntries(Protocol):
    """Makes chosen entries hot, and says where they are."""

    def __call__(self, buffer: HotBuffer, layer: int, turn: TurnRows, chosen: Tensor, slots: Tensor) -> None:
        """Fills `slots` [n * m, top_k] int64 for `chosen` [n, m, top_k] int32; m * top_k is at most the buffer.

        Copies what is not hot, in place of what was chosen longest ago and is not chosen by these tokens. Behind the
        last entry of a token, whose choice is -1, its first is repeated.
        """


def as_words(entries: Tensor) -> Tensor:
    """A view of entries [..., size] as whole words, the widest that fit: copies need not know the dtype."""
    num_bytes = entries.shape[-1] * entries.dtype.itemsize
    return entries.view(next(word for word in _WORDS if num_bytes % word.itemsize == 0))


def drop_entries(held: Tensor, owners: Tensor, rows: Tensor, stamps: Tensor, contexts: Tensor) -> None:
    """Forgets hot entries of rows that have another owner, and those at or behind a row's context in all layers.

    `held` [num_layers, all rows, buffer]; `owners` [all rows] int64 becomes `stamps` for `rows`; `rows`, `stamps` and
    `contexts` are [n] int64.
    """
    before = held.index_select(1, rows)
    is_same = (owners.index_select(0, rows) == stamps).view(1, -1, 1)
    held.index_copy_(1, rows, before.masked_fill(~is_same | (before >= contexts.view(1, -1, 1)), -1))
    owners.index_copy_(0, rows, stamps)


def fetch_entries(buffer: HotBuffer, layer: int, turn: TurnRows, chosen: Tensor, slots: Tensor) -> None:
    """See `FetchEntries`. Waits for the device, to copy no more than what is missing."""
    count, size = chosen.shape[0], buffer.held.shape[2]
    rows, contexts = turn.rows.view(-1, 1), turn.contexts.view(-1, 1)
    wanted = torch.where(rows > 0, chosen.view(count, -1).to(torch.int64), -1)
    is_old = (wanted >= 0) & (wanted < contexts)
    found = _find(buffer, layer, turn.rows, torch.where(is_old, wanted, -1))
    row, column = found.is_first.nonzero(as_tuple=True)
    place, its_row = wanted[row, column], turn.rows[row]
    page = buffer.pages[its_row, place // buffer.page_size]
    sources = page * buffer.page_size + place % buffer.page_size
    base = (layer * buffer.held.shape[1] + rows) * size
    buffer.plane[(base + found.hot)[row, column]] = buffer.host[layer][sources]
    buffer.held[layer].index_copy_(0, turn.rows, found.held)
    buffer.order[layer].index_copy_(0, turn.rows, found.order)
    buffer.counts.add_(torch.stack((is_old.sum(), found.is_first.sum())))
    fresh = turn.firsts.view(-1, 1) + (wanted - contexts) * buffer.apart
    where = torch.where(is_old, base + found.hot, fresh).view(-1, chosen.shape[2])
    there = wanted.view(-1, chosen.shape[2]) >= 0
    slots.copy_(torch.where(there, where, where[:, :1]).masked_fill_(~there[:, :1], 0))


class _Found(NamedTuple):
    hot: Tensor
    """[n, k] int64: the slot in its row's buffer of each wanted place."""
    is_first: Tensor
    """[n, k] bool: True if the place has to be copied there, once for each place."""
    held: Tensor
    """[n, buffer] int32: the rows' `held` after the copy."""
    order: Tensor
    """[n, buffer] int32: the rows' `order` after the copy."""


def _find(buffer: HotBuffer, layer: int, rows: Tensor, wanted: Tensor) -> _Found:
    """Finds wanted places [n, k] int64, -1 for none, and gives slots to those that are not hot."""
    places, size = buffer.places, buffer.held.shape[2]
    nowhere, row = places.shape[1] - 1, rows.view(-1, 1)
    held, order = buffer.held[layer][rows], buffer.order[layer][rows].to(torch.int64)
    place = torch.where(wanted < 0, nowhere, wanted)
    slot = torch.arange(size, dtype=torch.int32, device=held.device).expand_as(held)
    places[row, torch.where(held < 0, nowhere, held).long()] = slot
    guess = places[row, place].long().clamp_(0, size - 1)
    is_hot = (wanted >= 0) & (held.gather(1, guess) == wanted)
    # Several tokens may miss the same place: only the one whose number is stored there copies it.
    number = torch.arange(size, size + wanted.shape[1], dtype=torch.int32, device=held.device).expand(wanted.shape)
    missing = (wanted >= 0) & ~is_hot
    places[row, torch.where(missing, wanted, nowhere)] = number
    is_first = missing & (places[row, place] == number)
    chosen = torch.zeros(held.shape[0], size + 1, dtype=torch.bool, device=held.device)
    chosen.scatter_(1, torch.where(is_hot, guess, size), True)
    given, order = _give(held.gather(1, order) < 0, chosen.gather(1, order), order, is_first.sum(1, keepdim=True))
    target = given.gather(1, torch.where(is_first, is_first.cumsum(1) - 1, size))
    spare = held.new_full((held.shape[0], 1), -1)
    new_held = torch.cat((held, spare), dim=1)
    new_held.scatter_(1, torch.where(is_first, target, size), wanted.to(torch.int32))
    places[row, torch.where(is_first, wanted, nowhere)] = target.to(torch.int32)
    hot = torch.where(is_hot, guess, places[row, place].long()).clamp_(0, size - 1)
    return _Found(hot, is_first, new_held[:, :size], order.to(torch.int32))


def _give(is_empty: Tensor, is_chosen: Tensor, order: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Gives up `count` [n, 1] slots of each row: empty ones, then those chosen longest ago, and none that is chosen.

    All others are [n, size] and in order. Returns the slots that are given, [n, size + 1], and the next order.
    """
    size = order.shape[1]
    is_free = ~is_empty & ~is_chosen
    num_empty, num_free = (each.sum(1, keepdim=True) for each in (is_empty, is_free))
    rank = torch.where(is_empty, is_empty.cumsum(1) - 1, num_empty + is_free.cumsum(1) - 1)
    is_given = (rank < count) & ~is_chosen
    given = torch.zeros(order.shape[0], size + 1, dtype=order.dtype, device=order.device)
    given.scatter_(1, torch.where(is_given, rank, size), order)
    # Oldest first: slots that stay, then those that are chosen, then those that are given.
    stays = rank - count
    was_chosen = num_empty + num_free - count + is_chosen.cumsum(1) - 1
    position = torch.where(is_given, size - count + rank, torch.where(is_chosen, was_chosen, stays))
    return given, torch.empty_like(order).scatter_(1, position, order)
