"""Where chosen entries are: from places in a row to slots of a pool.

A choice names entries by their place in the row (`LatentInputs.chosen`), so that it holds for every pool that has the
row. Slots are found in the forward, because only the device knows the choice, by operations that can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import EntryTurn, StepView
from sightline.cache.pools import Pool
from sightline.kernels.chosen_slots import FindSlots


@dataclass(frozen=True, eq=False)
class ChosenSlots:
    """Finds the slots of what each token of a step chose."""

    pages: Tensor | None
    """[num_table_rows + 1, max_pages]; None if entries are those of the step, in the order of its tokens."""
    page_size: int
    rows: Tensor
    """[num_tokens] int64: the row of each token in the page table, or the first token of its row in the step."""

    find: FindSlots

    def of(self, chosen: Tensor, tokens: slice) -> Tensor:
        """[num_tokens, top_k] int64 for `chosen` [num_tokens, top_k] of these tokens; see `FindSlots`."""
        return self.find(chosen, self.rows[tokens], self.pages, self.page_size)


def plan_slots(step: StepView, pool: Pool, buffers: PlanBuffers, find: FindSlots) -> ChosenSlots:
    """Finds slots in the pool, or in the step itself if it has no cache. Lengths may be known to the device alone."""
    batch = step.batch
    rows = buffers.take("rows of tokens", (batch.num_tokens,), torch.int64)
    ends = batch.query_lens.device.cumsum(0)
    tokens = torch.arange(batch.num_tokens, device=rows.device)
    # Padding tokens behind the last row count as its own.
    row = torch.searchsorted(ends, tokens, right=True).clamp_(max=max(batch.num_rows - 1, 0))
    if step.is_transient:
        rows.copy_((ends - batch.query_lens.device)[row])
        return ChosenSlots(None, 1, rows, find)
    rows.copy_(batch.table_rows[row])
    return ChosenSlots(pool.table.pages, pool.page_size, rows, find)


_TOKENS_AT_ONCE = 2048
"""Tokens whose slots are found at once: those of 512 entries take 8 MiB."""


def fetch_slots(turn: EntryTurn, layer: int, chosen: Tensor, out: Tensor) -> None:
    """Fetches what the tokens of a turn chose, and writes where it is to their rows of `out` [num_tokens, top_k].

    `chosen` [num_tokens, top_k] int32 is that of all tokens of the step.
    """
    turn.fetch(layer, chosen)
    count = turn.tokens.indices.shape[0]
    for start in range(0, count, _TOKENS_AT_ONCE):
        part = slice(start, min(start + _TOKENS_AT_ONCE, count))
        turn.tokens.part(part).put(out, turn.slots(chosen, part).to(out.dtype))
