"""What a layer group needs from the cache, as data.

Knows shapes and dtypes. Does not know which attention uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PlaneSpec:
    """One tensor of a pool's entries, such as the keys."""

    name: str
    shape: tuple[int, ...]
    """Of one entry in one layer."""
    dtype: torch.dtype


@dataclass(frozen=True)
class PoolSpec:
    """Entries that are written and freed together and so share one page table."""

    name: str
    planes: tuple[PlaneSpec, ...]
    num_layers: int

    @property
    def elements_per_token(self) -> int:
        """Over all planes and layers."""
        return self.num_layers * sum(math.prod(plane.shape) for plane in self.planes)


@dataclass(frozen=True)
class GroupCacheSpec:
    """The pools of one layer group."""

    group: str
    pools: tuple[PoolSpec, ...]
