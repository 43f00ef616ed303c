"""Layer groups: the layers of a model with equal specs, which share pools, a backend and a plan.

Knows specs and who reads whose entries. Does not know backends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sightline.attention.kinds import CHOOSING_KINDS, STATE_KINDS, Feature
from sightline.attention.spec import AttentionSpec, IndexingSpec
from sightline.cache.spec import NO_STATES, GroupCacheSpec, ScalesByPlane


@dataclass(frozen=True)
class Loan:
    """The pools that a group borrows: its layers read entries of another group's layers."""

    lender: str
    """The group that owns the pools."""
    layers: tuple[int, ...]
    """For each layer that borrows, the index of its lender in these pools."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same spec, which share pools, a backend and a plan."""

    name: str
    spec: AttentionSpec
    layers: tuple[int, ...]
    """Model layer indices, in order."""
    loan: Loan | None = None
    """None if the group has pools of its own."""

    @property
    def owner(self) -> str:
        """The group whose pools are read."""
        return self.name if self.loan is None else self.loan.lender

    @property
    def is_recurrent(self) -> bool:
        """True if it keeps a state per sequence, beside or instead of entries in pages."""
        return bool(self.spec.states(len(self.layers), torch.float32).planes)

    @property
    def chooses(self) -> bool:
        """True if its layers are indexers: what they give is a choice of tokens, not an output of attention."""
        return self.spec.kind in CHOOSING_KINDS

    @property
    def reads_choice(self) -> bool:
        """True if its layers attend to entries that an indexer chose, and to no others."""
        return self.spec.top_k is not None and not self.chooses

    @property
    def may_be_on_host(self) -> bool:
        """True if its entries can be in host memory: those which an indexer chooses. Windows and states cannot."""
        return self.reads_choice

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a backend keeps keys; `dtype` is the cache's. States of recurrent layers are fp32."""
        return torch.float32 if self.spec.kind in STATE_KINDS else dtype

    @property
    def pool_layers(self) -> tuple[int, ...]:
        """For each layer, the index of its entries in the pools."""
        return tuple(range(len(self.layers))) if self.loan is None else self.loan.layers

    @property
    def needs(self) -> frozenset[Feature]:
        """Features that every step of the group needs in addition to those of the spec."""
        return frozenset() if self.loan is None else frozenset({Feature.SHARED_CACHE})

    def cache_spec(
        self, dtype: torch.dtype, scales: ScalesByPlane | None = None, *, with_hot_entries: bool = False
    ) -> GroupCacheSpec:
        """The pools that the group owns. `dtype` is the cache's; `scales` cover all layers of the model.

        `with_hot_entries` keeps entries in host memory if an indexer chooses among them.
        """
        if self.loan is not None:
            return GroupCacheSpec(self.name, (), NO_STATES)
        own = None if scales is None else {name: [of[layer] for layer in self.layers] for name, of in scales.items()}
        count = len(self.layers)
        on_host = with_hot_entries and self.may_be_on_host
        return GroupCacheSpec(self.name, self.spec.pools(count, dtype, own), self.spec.states(count, dtype), on_host)


Lenders: TypeAlias = Mapping[int, int]
"""For each layer that borrows, the layer whose entries it reads. Others have entries of their own."""


def group_layers(
    specs: Sequence[AttentionSpec | None],
    network: str = "",
    lenders: Lenders | None = None,
    indexers: Mapping[int, IndexingSpec] | None = None,
) -> tuple[LayerGroup, ...]:
    """Groups layers by equal spec, in order of first appearance. The names of groups begin with that of the network.

    Layers without a spec are in no group. Layers that borrow are in groups of their own, one for each group that lends
    to them. `indexers` are those of layers that have one beside their attention; the last groups are theirs.
    """
    lenders = lenders or {}
    for layer, lender in lenders.items():
        if not 0 <= lender < layer or lender in lenders:
            raise ValueError(f"expected layer {layer} to borrow from an earlier one with its own entries, got {lender}")
    members: dict[AttentionSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec is not None and layer not in lenders:
            members.setdefault(spec, []).append(layer)
    owners = tuple(
        LayerGroup(f"{network}group{index}", spec, tuple(layers))
        for index, (spec, layers) in enumerate(members.items())
    )
    borrowing = {layer: spec for layer, spec in enumerate(specs) if spec is not None and layer in lenders}
    return owners + borrow_layers(borrowing, lenders, owners) + _index_layers(specs, indexers or {}, network)


def _index_layers(
    specs: Sequence[AttentionSpec | None], indexers: Mapping[int, IndexingSpec], network: str
) -> tuple[LayerGroup, ...]:
    """Groups indexers by equal spec, and checks that every layer that reads a choice has one at or before it."""
    last: IndexingSpec | None = None
    for layer, spec in enumerate(specs):
        last = indexers.get(layer, last)
        if spec is None or spec.top_k is None:
            continue
        if last is None or (last.top_k, last.tokens_per_entry) != (spec.top_k, spec.tokens_per_entry):
            raise ValueError(
                f"expected an indexer that chooses {_choice(spec)} for layer {layer}, in it or before it, got "
                f"{'none' if last is None else f'one that chooses {_choice(last)}'}"
            )
    members: dict[IndexingSpec, list[int]] = {}
    for layer in sorted(indexers):
        members.setdefault(indexers[layer], []).append(layer)
    return tuple(
        LayerGroup(f"{network}index{number}", spec, tuple(layers))
        for number, (spec, layers) in enumerate(members.items())
    )


def _choice(spec: AttentionSpec) -> str:
    ratio = spec.tokens_per_entry
    return f"{spec.top_k} tokens" if ratio == 1 else f"{spec.top_k} entries of {ratio} tokens"


def borrow_layers(
    specs: Mapping[int, AttentionSpec], lenders: Lenders, owners: Sequence[LayerGroup], network: str = ""
) -> tuple[LayerGroup, ...]:
    """Groups layers that borrow from layers of `owners`, which may be another network's."""
    places = {layer: (group, index) for group in owners for index, layer in enumerate(group.layers)}
    members: dict[tuple[AttentionSpec, str], list[int]] = {}
    for layer, spec in specs.items():
        owner, _ = places[lenders[layer]]
        read, written = (each.pools(1, torch.float32) for each in (spec, owner.spec))
        if read != written:
            raise ValueError(
                f"expected layer {layer} to read entries of the shape that layer {lenders[layer]} writes, got "
                f"{read} and {written}"
            )
        members.setdefault((spec, owner.name), []).append(layer)
    groups = []
    for number, ((spec, lender), layers) in enumerate(members.items()):
        loan = Loan(lender, tuple(places[lenders[layer]][1] for layer in layers))
        groups.append(LayerGroup(f"{network}{lender}.borrowed{number}", spec, tuple(layers), loan))
    return tuple(groups)
