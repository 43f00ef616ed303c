"""Where the keys and values of a tile of rows come from: the step itself, the pool in place, or a gather.

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
    """Where a lane gathers keys and values: [max_keys, num_kv_heads, head_dim] each."""

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
    """The same tokens where they lie side by side: no copy is needed then."""

    @staticmethod
    def planned(name: str, rows: Sequence[RowSpan], buffers: PlanBuffers) -> TileTokens:
        """Of rows of equal query length, in a plan's buffers."""
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
    """What a layer has to read from."""

    layer: int
    """In its group."""
    keys: EntryPlane
    """[num_slots, num_kv_heads, head_dim]."""
    values: EntryPlane
    inputs: SoftmaxInputs


class KeySource(ABC):
    """Where a tile's keys and values come from."""

    @abstractmethod
    def read(self, entries: LayerEntries) -> tuple[Tensor, Tensor]:
        """Both [num_rows, num_kv_heads, num_keys, head_dim], in any memory order but for head_dim."""


@dataclass(frozen=True, eq=False)
class FromStep(KeySource):
    """They are the step's own: no pool is read."""

    tokens: TileTokens

    def read(self, entries: LayerEntries) -> tuple[Tensor, Tensor]:
        k, v = self.tokens.of(entries.inputs.k), self.tokens.of(entries.inputs.v)
        return k.transpose(1, 2), v.transpose(1, 2)


class InPlace(KeySource):
    """They are one row's, side by side in a pool that holds values themselves. All layers' views are made at once."""

    def __init__(self, slots: slice, keys: Tensor, values: Tensor) -> None:
        """Keys and values [num_layers, num_slots, num_kv_heads, head_dim]."""
        self._k, self._v = (plane[:, slots].transpose(1, 2).unsqueeze(1).unbind(0) for plane in (keys, values))

    def read(self, entries: LayerEntries) -> tuple[Tensor, Tensor]:
        return self._k[entries.layer], self._v[entries.layer]


class Gathered(KeySource):
    """They are copied side by side into scratch memory."""

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
