"""Where a model layer is in the groups: which group serves it, and which of the group's layers it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sightline.attention.bindings import GroupBinding


class LayerPlace(NamedTuple):
    """The position of a model layer."""

    group: int
    layer: int
    """Index in the pools of the group's cache."""


def layer_places(bindings: Sequence[GroupBinding], *, chooses: bool) -> dict[int, LayerPlace]:
    """The position of each model layer in the groups of indexers, or in the others."""
    return {
        layer: LayerPlace(number, index)
        for number, binding in enumerate(bindings)
        if binding.group.chooses == chooses
        for layer, index in zip(binding.group.layers, binding.group.pool_layers, strict=True)
    }


def last_before(indexers: Mapping[int, LayerPlace], layers: Iterable[int]) -> dict[int, LayerPlace]:
    """Returns, for each layer and each indexer's own layer, the last indexer at or before it. Others are left out."""
    every = sorted({*layers, *indexers})
    found = {layer: max((each for each in indexers if each <= layer), default=None) for layer in every}
    return {layer: indexers[last] for layer, last in found.items() if last is not None}
