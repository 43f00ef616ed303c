"""Sources of the keys and values of a tile of rows: the step itself, the pool in place, or a gather.

Composed by backends that compute dense tiles. Does not know masks or kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sightline.attention.contract import SoftmaxInputs
from sightline.attention.shared.entry_planes import EntryPlane
from sightline.attention.shared.tile_tokens import TileTokens


@dataclass(frozen=True, eq=False)
class GatherScratch:
    """A lane's buffers for gathered keys and values: [max_keys, num_kv_heads, head_dim] each."""

    k: Tensor
    v: Tensor


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
