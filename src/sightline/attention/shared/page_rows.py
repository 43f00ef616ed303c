"""A page table for the rows of one kernel call, and the number of entries of each.

Composed by backends whose kernels take [num_rows, width] pages instead of slots. Does not know what a row is for: a
sequence, or a single token of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.cache.pools import Pool
from sightline.core.batch import PADDING_ROW, Batch


class PageRows(NamedTuple):
    """Where the entries of a call's rows are."""

    pages: Tensor
    """[num_rows, width] int32, contiguous. Pages beyond a row's own are the padding page."""
    lens: Tensor
    """[num_rows] int32: entries per row, new ones included, at least 1."""
    longest: int
    """An upper bound of `lens` on the host."""

    def part(self, rows: slice) -> PageRows:
        """A view of some rows."""
        return PageRows(self.pages[rows], self.lens[rows], self.longest)

    @staticmethod
    def planned(
        name: str,
        pool: Pool,
        table_rows: Sequence[int],
        lens: Sequence[int],
        longest: int,
        buffers: PlanBuffers,
        *,
        per_tile: int = 1,
    ) -> PageRows:
        """The pages of `table_rows`, as many as `longest` entries need, rounded up to a multiple of `per_tile`."""
        table = pool.table
        most = min(-(-longest // pool.page_size), table.max_pages)
        staged = buffers.take(f"{name}.rows", (len(lens),), torch.int64)
        staged.copy_(torch.tensor(table_rows, dtype=torch.int64), non_blocking=True)
        pages = buffers.take(f"{name}.pages", (len(lens), -(-most // per_tile) * per_tile), torch.int32)
        pages[:, :most] = table.pages[:, :most].index_select(0, staged)
        pages[:, most:] = table.pages[PADDING_ROW, 0]
        return PageRows(pages, filled(f"{name}.lens", lens, buffers), longest)


class TokenQueries(NamedTuple):
    """The rows of a step in which none has more than one new token: one per new token, then padding."""

    table_rows: tuple[int, ...]
    lens: tuple[int, ...]
    """Padding has one entry, of the padding page."""
    num_real: int

    @staticmethod
    def of(batch: Batch) -> TokenQueries:
        """Pads the queries to as many as the batch has room for, so that launches depend on its size only."""
        contexts = batch.context_lens.exact()
        new = [row for row, count in enumerate(batch.query_lens.exact()) if count]
        padding = min(batch.num_rows, batch.num_tokens) - len(new)
        return TokenQueries(
            (*(batch.rows[row] for row in new), *(PADDING_ROW,) * padding),
            (*(contexts[row] + 1 for row in new), *(1,) * padding),
            len(new),
        )


def filled(name: str, values: Sequence[int], buffers: PlanBuffers) -> Tensor:
    """Returns a plan buffer filled with `values`: [len(values)] int32."""
    buffer = buffers.take(name, (len(values),), torch.int32)
    buffer.copy_(torch.tensor(values, dtype=torch.int32), non_blocking=True)
    return buffer
