"""Tokens of a step that are computed together: which they are, how they are read, and how results are put back.

Knows indices. Does not know what a token attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.shared.tiles import RowSpan


@dataclass(frozen=True, eq=False)
class TileTokens:
    """The new tokens of a tile's rows."""

    num_rows: int
    query_len: int
    indices: Tensor
    """[num_rows * query_len] int64."""
    contiguous: slice | None
    """The same tokens as a slice if they are contiguous, so that no copy is needed."""

    @staticmethod
    def planned(name: str, rows: Sequence[RowSpan], buffers: PlanBuffers) -> TileTokens:
        """Tokens of rows of equal query length, in a plan's buffers."""
        query_len = rows[0].query_len
        indices = buffers.take(f"{name}.tokens", (len(rows) * query_len,), torch.int64)
        first = torch.tensor([span.first_token for span in rows], device=indices.device).unsqueeze(1)
        indices.view(len(rows), query_len).copy_(first + torch.arange(query_len, device=indices.device))
        stops = [span.first_token + query_len for span in rows]
        side_by_side = [span.first_token for span in rows[1:]] == stops[:-1]
        contiguous = slice(rows[0].first_token, stops[-1]) if side_by_side else None
        return TileTokens(len(rows), query_len, indices, contiguous)

    def part(self, places: slice) -> TileTokens:
        """Some of the tokens, each as a row of its own."""
        indices, contiguous = self.indices[places], None
        if self.contiguous is not None:
            first = self.contiguous.start
            contiguous = slice(first + places.start, first + places.stop)
        return TileTokens(indices.shape[0], 1, indices, contiguous)

    def of(self, values: Tensor) -> Tensor:
        """[num_rows, query_len, ...]."""
        if self.contiguous == slice(0, values.shape[0]):
            return values.view(self.num_rows, self.query_len, *values.shape[1:])
        chosen = values[self.contiguous] if self.contiguous is not None else values.index_select(0, self.indices)
        return chosen.view(self.num_rows, self.query_len, *values.shape[1:])

    def put(self, out: Tensor, result: Tensor) -> None:
        flat = result.reshape(self.num_rows * self.query_len, *out.shape[1:])
        if self.contiguous == slice(0, out.shape[0]):
            out.copy_(flat)
        elif self.contiguous is not None:
            out[self.contiguous] = flat
        else:
            out.index_copy_(0, self.indices, flat)
