"""A step of compressed attention as the reference backends see it: rows with the slots of their states and entries.

Finds slots by walking the page table itself. Does not know what is done with an entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.compressed.inputs import CompressionInputs
from sightline.attention.compressed.spec import Compression
from sightline.attention.contract import StepView
from sightline.attention.oracle.compressed import TokenSums
from sightline.attention.oracle.rows import StateRow, state_rows
from sightline.cache.pools import GroupCache, Pool


@dataclass(frozen=True, eq=False)
class CompressedRow:
    """One row of a step."""

    states: StateRow
    pool: Pool | None
    """None if the row keeps no entries."""
    slots: tuple[int, ...]
    """The slots of all of its entries behind the step; empty if it keeps none."""
    context: int

    @property
    def positions(self) -> range:
        """The positions of its new tokens."""
        return range(self.context, self.context + self.states.tokens.stop - self.states.tokens.start)


def compressed_rows(step: StepView, pool: Pool | None) -> tuple[CompressedRow, ...]:
    """The rows of a step that have tokens; `pool` is that of the group's entries, None if it has none."""
    contexts, lens = step.batch.context_lens.exact(), step.batch.query_lens.exact()
    facts = [(row, contexts[row], contexts[row] + length) for row, length in enumerate(lens) if length]
    kept = None if step.is_transient else pool
    return tuple(
        CompressedRow(states, kept, () if kept is None else tuple(_walk(kept, step.batch.rows[row], stop)), context)
        for states, (row, context, stop) in zip(state_rows(step), facts, strict=True)
    )


def _walk(pool: Pool, table_row: int, length: int) -> Iterator[int]:
    """The slots of a row's entries, of which the last token is one of the first `length`."""
    pages, ratio = pool.table.pages[table_row].tolist(), pool.spec.tokens_per_entry
    in_page = max(1, pool.page_size // ratio)
    for last in range(ratio - 1, length, ratio):
        yield pages[last // pool.page_size] * in_page + last % pool.page_size // ratio


@dataclass(frozen=True, eq=False)
class RowEntries:
    """The entries of a row that a layer computes token by token."""

    row: CompressedRow
    plane: Tensor | None
    """[num_slots, head_dim]: the layer's; None if the row keeps no entries."""
    entries: list[Tensor]
    """All of them so far, [head_dim] each, as stored."""
    sums: TokenSums

    @staticmethod
    def begin(
        row: CompressedRow, cache: GroupCache, plane: str, layer: int, compression: Compression, like: Tensor
    ) -> RowEntries:
        """The entries of the context, from the pool; `like` has the shape, dtype and device of an entry."""
        empty = torch.zeros(compression.num_sums, 3, *like.shape)
        sums = row.states.read(cache.states, "sums", layer, empty).to(like.device).clone()
        if row.pool is None:
            return RowEntries(row, None, [], TokenSums(compression, sums))
        stored = row.pool.plane(plane)[layer]
        context = row.slots[: row.context // compression.ratio]
        return RowEntries(row, stored, [stored[slot] for slot in context], TokenSums(compression, sums))

    def add(self, raw: CompressionInputs, token: int, position: int, dtype: torch.dtype) -> None:
        """Adds a token of the row, and stores the entry that it completes."""
        entry = self.sums.add(raw, token, position)
        if entry is None:
            return
        if self.plane is not None:
            self.plane[self.row.slots[len(self.entries)]] = entry.to(self.plane.dtype)
        self.entries.append(entry.to(dtype))
