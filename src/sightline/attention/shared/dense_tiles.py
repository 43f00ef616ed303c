"""Planning of dense tiles: rows computed in one call, where their entries are read, and their masks.

A row whose entries are adjacent in an unscaled pool may be read in place, in a call of its own; the others are read
from the step or gathered, together. Composed by torch backends. Does not know kernels, nor what an entry holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import StepView
from sightline.attention.shared.entry_planes import is_scaled
from sightline.attention.shared.tile_tokens import TileTokens
from sightline.attention.shared.tiles import (
    RowSpan,
    fill_bias,
    fill_slots,
    is_plain_causal,
    needs_bias,
    pack_tiles,
    split_long,
)
from sightline.attention.spec import AttentionSpec
from sightline.attention.workspace import Lane
from sightline.cache.pools import Pool
from sightline.core.batch import MaskKind

SourceT = TypeVar("SourceT")


class Sources(NamedTuple, Generic[SourceT]):
    """How a backend reads entries."""

    in_place: Callable[[slice], SourceT]
    """Given adjacent slots of the pool."""
    from_step: Callable[[TileTokens], SourceT]
    gathered: Callable[[Tensor, Lane], SourceT]
    """Given slots [num_rows, num_keys] int64."""


class DenseTile(NamedTuple, Generic[SourceT]):
    """Rows of equal query length and mask."""

    kind: MaskKind
    tokens: TileTokens
    source: SourceT
    bias: Tensor | None
    """[num_rows, 1, query_len, num_keys]; None if every query sees every key, or the kernel knows the mask."""
    causal: bool
    """True if the kernel applies a causal mask by itself."""


@dataclass(frozen=True, eq=False)
class TilePlanner(Generic[SourceT]):
    """Plans the tiles of one group."""

    pool: Pool
    spec: AttentionSpec
    dtype: torch.dtype
    max_keys: int
    """Keys that fit the memory that a tile gathers into."""
    min_keys_in_place: int
    """Keys from which a row is worth a call of its own; a row alone has one anyway."""
    max_scores: int
    """Elements of a row's mask; rows with more are split by query."""
    sources: Sources[SourceT]

    def plan(
        self,
        spans: Sequence[RowSpan],
        step: StepView,
        buffers: PlanBuffers,
        *,
        knows_causal: bool = False,
        min_unmasked_keys: int = 0,
    ) -> Iterator[DenseTile[SourceT]]:
        """The tiles of some rows. `knows_causal`: the kernel needs no mask for a fresh prompt.

        Tiles of fewer than `min_unmasked_keys` always get a mask.
        """
        if not step.is_transient:
            spans = split_long(spans, self.spec, knows_causal=knows_causal, most=self.max_scores)
        least = self.min_keys_in_place if len(spans) > 1 else 1
        alone = {
            span: self.sources.in_place(run)
            for span in spans
            if span.num_keys >= least and (run := self._run(span, step)) is not None
        }
        together = pack_tiles([span for span in spans if span not in alone], self.max_keys, transient=step.is_transient)
        for index, rows in enumerate([*((span,) for span in alone), *together]):
            name, num_keys = f"tile{index}", max(span.num_keys for span in rows)
            tokens = TileTokens.planned(name, rows, buffers)
            source = alone.get(rows[0])
            if source is None and self._comes_from_step(rows[0], step):
                source = self.sources.from_step(tokens)
            elif source is None:
                slots = buffers.take(f"{name}.slots", (len(rows), num_keys), torch.int64)
                fill_slots(rows, self.pool.table, step.batch.rows, self.pool.page_size, slots)
                source = self.sources.gathered(slots, step.lane)
            masked = num_keys < min_unmasked_keys
            causal = not masked and knows_causal and is_plain_causal(rows, self.spec)
            bias = None
            if masked or (not causal and needs_bias(rows, self.spec)):
                bias = buffers.take(f"{name}.bias", (len(rows), 1, rows[0].query_len, num_keys), self.dtype)
                fill_bias(rows, self.spec, step.batch, bias)
            yield DenseTile(rows[0].kind, tokens, source, bias, causal)

    def _run(self, span: RowSpan, step: StepView) -> slice | None:
        """The slots of a row that is read in place, otherwise None."""
        if is_scaled(self.pool) or self._comes_from_step(span, step):
            return None
        return self.pool.table.run(step.batch.rows[span.row], span.first_key, span.stop_key, self.pool.page_size)

    def _comes_from_step(self, span: RowSpan, step: StepView) -> bool:
        """True if the row reads only the step's own entries, and any cache stores them unchanged."""
        return step.is_transient or (span.is_fresh and not is_scaled(self.pool) and not step.is_borrowed)
