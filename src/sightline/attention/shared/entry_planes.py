"""Access to one layer's entries in a pool plane for torch backends: unscaled or scaled.

Which of the two is decided once, when a backend is built. Does not know which entries are moved, nor what they mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from sightline.cache.pools import Pool
from sightline.cache.spec import SCALED_DTYPES
from sightline.kernels.paging import gather_entries, gather_scaled_entries, write_entries, write_scaled_entries


class EntryPlane(ABC):
    """One layer's plane, [num_slots, ...]."""

    @abstractmethod
    def write(self, slots: Tensor, values: Tensor) -> None:
        """Writes `values` [n, ...] to `slots` [n]."""

    @abstractmethod
    def gather(self, slots: Tensor, out: Tensor) -> None:
        """Fills `out` [n, ...], in the compute dtype, with the entries at `slots` [n]."""


class PlainPlane(EntryPlane):
    """Stores the values themselves, in the dtype of the plane."""

    def __init__(self, plane: Tensor) -> None:
        self._plane = plane

    def write(self, slots: Tensor, values: Tensor) -> None:
        write_entries(self._plane, slots, values)

    def gather(self, slots: Tensor, out: Tensor) -> None:
        gather_entries(self._plane, slots, out)


class ScaledPlane(EntryPlane):
    """Stores 8-bit floats; multiplied by the layer's scale they give the values."""

    def __init__(self, plane: Tensor, scale: float) -> None:
        self._plane = plane
        self._scale = scale

    def write(self, slots: Tensor, values: Tensor) -> None:
        write_scaled_entries(self._plane, slots, values, self._scale)

    def gather(self, slots: Tensor, out: Tensor) -> None:
        gather_scaled_entries(self._plane, slots, self._scale, out)


def is_scaled(pool: Pool) -> bool:
    """True if stored entries must be rescaled when read, so that they cannot be used in place."""
    return any(plane.dtype in SCALED_DTYPES for plane in pool.spec.planes)


def entry_planes(pool: Pool, name: str) -> tuple[EntryPlane, ...]:
    """A plane of a pool, per layer."""
    return accessors(pool.plane(name).unbind(0), pool, name)


def accessors(layers: Sequence[Tensor], pool: Pool, name: str) -> tuple[EntryPlane, ...]:
    """Accessors for tensors [num_slots, ...] that hold entries as a plane of the pool does, per layer."""
    if not is_scaled(pool):
        return tuple(PlainPlane(plane) for plane in layers)
    return tuple(ScaledPlane(plane, scale) for plane, scale in zip(layers, pool.scales(name), strict=True))
