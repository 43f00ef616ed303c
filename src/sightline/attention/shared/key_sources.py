"""Sources of the keys and values of a tile of rows: the step itself, the pool in place, or a gather.

Composed by backends that compute dense tiles. Does not know masks or kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import SoftmaxInputs
from sightline.attention.shared.entry_planes import EntryPlane
from sightline.attention.shared.tiles import RowSpan


@dataclass(frozen=True, eq=False)
class GatherScratch:
    """A lane's buffers for gathered keys and values: [max_keys, num_kv_heads, head_dim] each."""

    k: Tensor
    v: Tensor


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


class LayerEntries(NamedTuple):
    """The entries that a layer may read."""

    layer: int
    """Index within its group."""
    keys: EntryPlane
    """[num_slots, num_kv_heads, head_dim]."""
    values: EntryPlane
    new: SoftmaxInputs | None
    """The step's own entries; None if the layer borrows."""


class KeySource(ABC):
    """Source of a tile's keys and values."""

    @abstractmethod
    def read(self, entries: LayerEntries) -> tuple[Tensor, Tensor]:
        """Both [num_rows, num_kv_heads, num_keys, head_dim]; contiguous in head_dim only."""


@dataclass(frozen=True, eq=False)
class FromStep(KeySource):
    """Keys and values of the step itself; reads no pool."""

    tokens: TileTokens

    def read(self, entries: LayerEntries) -> tuple[Tensor, Tensor]:
        assert entries.new is not None, "a layer that borrows reads nothing from the step"
        k, v = self.tokens.of(entries.new.k), self.tokens.of(entries.new.v)
        return k.transpose(1, 2), v.transpose(1, 2)


class InPlace(KeySource):
    """Adjacent entries of one row, in an unscaled pool. Creates the views of all layers at once."""

    def __init__(self, slots: slice, keys: Tensor, values: Tensor) -> None:
        """Keys and values [num_layers, num_slots, num_kv_heads, head_dim]."""
        self._k, self._v = (plane[:, slots].transpose(1, 2).unsqueeze(1).unbind(0) for plane in (keys, values))

    def read(self, entries: LayerEntries) -> tuple[Tensor, Tensor]:
        return self._k[entries.layer], self._v[entries.layer]


class Gathered(KeySource):
    """Entries copied into contiguous scratch memory."""

    def __init__(self, slots: Tensor, scratch: GatherScratch) -> None:
        """Slots [num_rows, num_keys] int64."""
        self._slots = slots.view(-1)
        self._k, self._v = scratch.k[: slots.numel()], scratch.v[: slots.numel()]
        self._k_by_row, self._v_by_row = (
            part.view(*slots.shape, *part.shape[1:]).transpose(1, 2) for part in (self._k, self._v)
        )

    def read(self, entries: LayerEntries) -> tuple[Tensor, Tensor]:
        entries.keys.gather(self._slots, self._k)
        entries.values.gather(self._slots, self._v)
        return self._k_by_row, self._v_by_row
