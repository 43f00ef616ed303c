"""Attention specs: what a layer computes, as data. Layers with equal specs form a group.

Knows the mathematics of a layer. Does not know who computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch

from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec, ScalesByPlane


class SpecKind(Enum):
    """Families of attention; each has its own inputs and pools."""

    SOFTMAX = "softmax"
    LATENT = "latent"


class Feature(Enum):
    """Features that a spec, a batch or a caller may need beyond plain causal attention."""

    WINDOW = "window"
    SOFTCAP = "softcap"
    SINKS = "sinks"
    NON_CAUSAL = "non-causal"
    TREE_MASK = "tree-mask"
    LSE = "lse"
    SHARED_CACHE = "shared-cache"
    """Layers read entries that another layer wrote, and write none (`CachePolicy.BORROWED`); new tokens may see the
    context alone (`MaskKind.CONTEXT`)."""
    DETERMINISTIC = "deterministic"
    """The same step gives bitwise equal results."""
    BATCH_INVARIANT = "batch-invariant"
    """A row's result does not depend, bit for bit, on the other rows."""
    SEVERAL_PLANS = "several-plans"
    """Several plans of one lane may be alive at once: all that they derive is in their own plan buffers."""


SOFTMAX_ONLY = frozenset({Feature.WINDOW, Feature.SOFTCAP, Feature.SINKS, Feature.SHARED_CACHE})
"""Features that latent attention does not have."""


@dataclass(frozen=True)
class SoftmaxSpec:
    """Softmax attention over keys and values with grouped queries."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """A query sees keys less than `window` positions away (itself counts); None sees all."""
    softcap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    sinks: bool = False
    """Each head has a learned logit that adds to the softmax denominator and contributes no value."""

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"expected q heads in whole groups, got {self.num_q_heads} q heads on {self.num_kv_heads} kv heads"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"expected a window of at least 1, got {self.window}")
        if self.softcap is not None and not self.softcap > 0.0:
            raise ValueError(f"expected a softcap above 0, got {self.softcap}")

    @property
    def kind(self) -> SpecKind:
        return SpecKind.SOFTMAX

    @property
    def group_size(self) -> int:
        """Query heads that share a key head: head h reads key head h // group_size."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """Key and value dimensions of a head, as cached."""
        return self.head_dim, self.head_dim

    @property
    def label(self) -> str:
        """Human-readable name."""
        return "full attention" if self.window is None else f"window {self.window} attention"

    @property
    def out_dim(self) -> int:
        """Output dimension of a head."""
        return self.head_dim

    @property
    def features(self) -> frozenset[Feature]:
        """Features that a backend must have to compute this spec."""
        needed = {
            Feature.WINDOW: self.window is not None,
            Feature.SOFTCAP: self.softcap is not None,
            Feature.SINKS: self.sinks,
        }
        return frozenset(feature for feature, wanted in needed.items() if wanted)

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """The cache that `num_layers` layers of this spec need; `dtype` is the cache's, `scales` are for these
        layers."""
        entry = (self.num_kv_heads, self.head_dim)
        planes = tuple(PlaneSpec.scaled(name, entry, dtype, scales) for name in ("k", "v"))
        return (PoolSpec("kv", planes, num_layers),)


@dataclass(frozen=True)
class LatentSpec:
    """Attention over one latent vector per token, from which every head's key and value are projected (DeepSeek's MLA).

    query   [ nope_dim | rope_dim ]            per head
    key     [ latent @ key_up | rope ]         nope_dim per head | rope_dim shared by all heads
    value   [ latent @ value_up ]              value_dim per head
    cached  [ latent_dim | rope_dim ]          per token, normalised and rotated
    """

    num_q_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float

    @property
    def kind(self) -> SpecKind:
        return SpecKind.LATENT

    @property
    def head_dim(self) -> int:
        """Dimension of a cached entry, which is also that of a query projected into latent space."""
        return self.latent_dim + self.rope_dim

    @property
    def group_size(self) -> int:
        """All query heads share the one entry of a token."""
        return self.num_q_heads

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """Key and value dimensions of a head, expanded from an entry."""
        return self.nope_dim + self.rope_dim, self.value_dim

    @property
    def label(self) -> str:
        """Human-readable name."""
        return "latent attention"

    @property
    def window(self) -> None:
        """None: a query sees every key before it."""

    @property
    def out_dim(self) -> int:
        return self.value_dim

    @property
    def features(self) -> frozenset[Feature]:
        """Empty: nothing beyond the kind is needed."""
        return frozenset()

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """One row [latent | rope] per token and layer; `dtype` is the cache's, `scales` are for these layers."""
        return (PoolSpec("latent", (PlaneSpec.scaled("entry", (self.head_dim,), dtype, scales),), num_layers),)


AttentionSpec: TypeAlias = SoftmaxSpec | LatentSpec


@dataclass(frozen=True)
class Loan:
    """Whose entries the layers of a group read."""

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
    def pool_layers(self) -> tuple[int, ...]:
        """For each layer, the index of its entries in the pools."""
        return tuple(range(len(self.layers))) if self.loan is None else self.loan.layers

    @property
    def needs(self) -> frozenset[Feature]:
        """Features that every step of the group needs in addition to those of the spec."""
        return frozenset() if self.loan is None else frozenset({Feature.SHARED_CACHE})

    def cache_spec(self, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> GroupCacheSpec:
        """The pools that the group owns. `dtype` is the cache's; `scales` cover all layers of the model."""
        if self.loan is not None:
            return GroupCacheSpec(self.name, ())
        own = None if scales is None else {name: [of[layer] for layer in self.layers] for name, of in scales.items()}
        return GroupCacheSpec(self.name, self.spec.pools(len(self.layers), dtype, own))


Lenders: TypeAlias = Mapping[int, int]
"""For each layer that borrows, the layer whose entries it reads. Others have entries of their own."""


def group_layers(
    specs: Sequence[AttentionSpec], network: str = "", lenders: Lenders | None = None
) -> tuple[LayerGroup, ...]:
    """Groups layers by equal spec, in order of first appearance. The names of groups begin with that of the network.

    Layers that borrow are in groups of their own, one for each group that lends to them.
    """
    lenders = lenders or {}
    for layer, lender in lenders.items():
        if not 0 <= lender < layer or lender in lenders:
            raise ValueError(f"expected layer {layer} to borrow from an earlier one with its own entries, got {lender}")
    members: dict[AttentionSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if layer not in lenders:
            members.setdefault(spec, []).append(layer)
    owners = tuple(
        LayerGroup(f"{network}group{index}", spec, tuple(layers))
        for index, (spec, layers) in enumerate(members.items())
    )
    return owners + borrow_layers({layer: specs[layer] for layer in sorted(lenders)}, lenders, owners)


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
