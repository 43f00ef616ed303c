"""Where chosen entries are, with torch: from places in a row to slots of a pool. Does not know who chooses."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class FindSlots(Protocol):
    """Finds the slots [n, top_k] int64 of what tokens chose: `chosen` [n, top_k] int32 are places in their rows.

    `rows` [n] int64 are the rows of the tokens in `pages` [num_table_rows, max_pages] int64; without pages, entries are
    those of the step, and `rows` the first tokens of the tokens' rows. Behind the last entry of a token its first is
    repeated, or the first of its row if it has none, so that what is read there was written.
    """

    def __call__(self, chosen: Tensor, rows: Tensor, pages: Tensor | None, page_size: int) -> Tensor: ...


def chosen_slots(chosen: Tensor, rows: Tensor, pages: Tensor | None, page_size: int) -> Tensor:
    """See `FindSlots`."""
    places = torch.where(chosen < 0, chosen[:, :1], chosen).clamp(min=0).to(torch.int64)
    if pages is None:
        return rows.unsqueeze(1) + places
    # Padding tokens may hold any number.
    places.clamp_(max=pages.shape[1] * page_size - 1)
    return pages[rows.unsqueeze(1), places // page_size] * page_size + places % page_size
