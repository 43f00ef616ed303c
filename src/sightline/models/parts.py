"""A rank's part of a network: a smaller definition, and how each stored tensor is cut for it.

Layers do not know ranks. A definition of fewer heads, features or experts loads tensors of its own sizes from a
checkpoint that shows them so (`loading/part.py`); the results of a cut layer are summed over the ranks
(`layers/summed.py`). A tensor without a cut is whole on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from sightline.distributed.ranks import Rank

DefinitionT = TypeVar("DefinitionT", covariant=True)


class TensorCut(ABC):
    """What a rank takes of a stored tensor."""

    is_shown: ClassVar[bool] = True
    """False if the rank takes nothing, so that its checkpoint does not have the tensor."""

    def keeps_form(self, stored: tuple[int, ...]) -> bool:
        """True if codes and scales of a tensor of this shape, if it is packed, are cut alike."""
        del stored
        return False

    @abstractmethod
    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part."""

    @abstractmethod
    def of(self, stored: Tensor) -> Tensor:
        """The part, which may share memory with the stored tensor."""


@dataclass(frozen=True)
class Slices(TensorCut):
    """Some ranges of one dimension, side by side."""

    dim: int
    ranges: tuple[range, ...]

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        size = sum(len(each) for each in self.ranges)
        return (*stored[: self.dim], size, *stored[self.dim + 1 :])

    def keeps_form(self, stored: tuple[int, ...]) -> bool:
        """True for whole experts of a tensor that holds several."""
        return self.dim == 0 and len(stored) == 3

    def of(self, stored: Tensor) -> Tensor:
        parts = [stored.narrow(self.dim, each.start, len(each)) for each in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)


@dataclass(frozen=True)
class Zeros(TensorCut):
    """Zeros in the stored shape: a bias of a result that is summed counts once, on the first rank."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored

    def of(self, stored: Tensor) -> Tensor:
        return stored.new_zeros(stored.shape)


@dataclass(frozen=True)
class Nothing(TensorCut):
    """No part: the tensor belongs to other ranks."""

    is_shown = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        del stored
        raise AssertionError("a tensor of other ranks has no shape here")

    def of(self, stored: Tensor) -> Tensor:
        del stored
        raise AssertionError("a tensor of other ranks is not loaded here")


@dataclass(frozen=True)
class RankPart(Generic[DefinitionT]):
    """The part of a layer, or of a network."""

    definition: DefinitionT
    cuts: Mapping[str, TensorCut] = field(default_factory=dict)
    """By the name of the tensor; those that are not here are whole."""
    is_summed: bool = False
    """True if the layer's result is a summand of the whole one."""
    whole: tuple[str, ...] = ()
    """Why a layer, or some layers, are computed whole by every rank."""


def rows(names: Iterable[str], *ranges: range) -> dict[str, TensorCut]:
    """Cuts of the outputs of projections: of their weights and biases."""
    return {f"{name}.{kind}": Slices(0, ranges) for name in names for kind in ("weight", "bias")}


def columns(name: str, rank: Rank, *ranges: range) -> dict[str, TensorCut]:
    """Cuts of the inputs of a projection whose result is summed."""
    cuts: dict[str, TensorCut] = {f"{name}.weight": Slices(1, ranges)}
    if not rank.leads:
        cuts[f"{name}.bias"] = Zeros()
    return cuts


def scaled(part: range, factor: int) -> range:
    """The elements of a range of things that have `factor` elements each."""
    return range(part.start * factor, part.stop * factor)


def moved(part: range, offset: int) -> range:
    """The range behind `offset` other elements."""
    return range(part.start + offset, part.stop + offset)
