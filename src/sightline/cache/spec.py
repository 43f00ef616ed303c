"""Cache requirements of a layer group, as data.

Knows shapes, dtypes and scales. Does not know which attention uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sightline.core.page_shape import entries_per_page

SCALED_DTYPES = frozenset({torch.float8_e4m3fn})
"""Cache dtypes with one scale per plane and layer: what is stored is value / scale, saturated."""
ScalesByPlane: TypeAlias = Mapping[str, Sequence[float]]
"""Maps a plane's name to one scale per layer. Missing planes have scales of 1."""


@dataclass(frozen=True)
class PlaneSpec:
    """One tensor of a pool's entries, such as the keys."""

    name: str
    shape: tuple[int, ...]
    """Shape of one entry in one layer."""
    dtype: torch.dtype
    scales: tuple[float, ...] | None = None
    """Per layer: stored = value / scale, value = stored * scale. None: all are 1."""

    def __post_init__(self) -> None:
        if self.scales is None:
            return
        if self.dtype not in SCALED_DTYPES:
            raise ValueError(f"expected no scales of a {self.dtype} plane, which holds values as they are, got some")
        wrong = [scale for scale in self.scales if not (math.isfinite(scale) and scale > 0.0)]
        if wrong:
            raise ValueError(f"expected scales of plane {self.name} above 0 and finite, got {wrong[0]}")

    @staticmethod
    def scaled(name: str, shape: tuple[int, ...], dtype: torch.dtype, scales: ScalesByPlane | None) -> PlaneSpec:
        """A plane with its own entry of `scales`, if there is one."""
        own = None if scales is None else scales.get(name)
        return PlaneSpec(name, shape, dtype, None if own is None else tuple(own))


@dataclass(frozen=True)
class PoolSpec:
    """Entries that are written and freed together and therefore share one page table."""

    name: str
    planes: tuple[PlaneSpec, ...]
    num_layers: int
    tokens_per_entry: int = 1
    """Entry i stands for tokens i * tokens_per_entry up to (i + 1) * tokens_per_entry - 1; the last one writes it."""

    def __post_init__(self) -> None:
        if self.tokens_per_entry < 1:
            raise ValueError(f"expected at least 1 token per entry, got {self.tokens_per_entry}")
        for plane in self.planes:
            if plane.scales is not None and len(plane.scales) != self.num_layers:
                raise ValueError(
                    f"expected a scale of plane {plane.name} for each of {self.num_layers} layers, got "
                    f"{len(plane.scales)}"
                )

    @property
    def entry_elements(self) -> int:
        """Elements of an entry, summed over all planes and layers."""
        return self.num_layers * sum(math.prod(plane.shape) for plane in self.planes)

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry, summed over all planes and layers."""
        return self.num_layers * sum(math.prod(plane.shape) * plane.dtype.itemsize for plane in self.planes)

    @property
    def bytes_per_token(self) -> float:
        """The part of an entry's bytes that a token has."""
        return self.entry_bytes / self.tokens_per_entry

    def entries_per_page(self, page_size: int) -> int:
        """The places for entries in a page. Raises `ConfigError` if entries do not fit pages."""
        return entries_per_page(page_size, self.tokens_per_entry)

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of a page, summed over all planes and layers."""
        return self.entries_per_page(page_size) * self.entry_bytes


@dataclass(frozen=True)
class StateSpec:
    """What a layer group keeps of a whole sequence, whatever its length."""

    planes: tuple[PlaneSpec, ...]
    """Shapes are those of one sequence in one layer. Empty: the group keeps entries per token only."""
    num_layers: int

    @property
    def num_bytes(self) -> int:
        """Size of one sequence's state, over all planes and layers."""
        return self.num_layers * sum(math.prod(plane.shape) * plane.dtype.itemsize for plane in self.planes)


NO_STATES = StateSpec((), 0)


@dataclass(frozen=True)
class GroupCacheSpec:
    """What one layer group caches."""

    group: str
    pools: tuple[PoolSpec, ...]
    states: StateSpec = NO_STATES
    on_host: bool = False
    """Keeps the entries in host memory."""
