"""What a layer's attention is, as data. Layers with equal specs form a group.

Knows the mathematics that a layer asks for. Does not know who computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """What a spec, a batch or a caller may need beyond plain causal attention."""

    WINDOW = "window"
    SOFTCAP = "softcap"
    SINKS = "sinks"
    NON_CAUSAL = "non-causal"
    TREE_MASK = "tree-mask"
    LSE = "lse"
    DETERMINISTIC = "deterministic"
    """The same step gives the same bits."""
    BATCH_INVARIANT = "batch-invariant"
    """A row's bits do not depend on the rows beside it."""


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
    """Each head has a learned logit that takes weight and gives no value."""

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
        """Of a head's key and value, as they are cached."""
        return self.head_dim, self.head_dim

    @property
    def label(self) -> str:
        """For a person."""
        return "full attention" if self.window is None else f"window {self.window} attention"

    @property
    def out_dim(self) -> int:
        """What a head gives."""
        return self.head_dim

    @property
    def features(self) -> frozenset[Feature]:
        """What a backend must have to compute this at all."""
        needed = {
            Feature.WINDOW: self.window is not None,
            Feature.SOFTCAP: self.softcap is not None,
            Feature.SINKS: self.sinks,
        }
        return frozenset(feature for feature, wanted in needed.items() if wanted)

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """The cache that `num_layers` layers of this spec need; `dtype` is the cache's, `scales` are these layers'."""
        entry = (self.num_kv_heads, self.head_dim)
        planes = tuple(PlaneSpec.scaled(name, entry, dtype, scales) for name in ("k", "v"))
        return (PoolSpec("kv", planes, num_layers),)


@dataclass(frozen=True)
class LatentSpec:
    """Attention over one latent vector a token, from which every head's key and value are projected (DeepSeek's MLA).

    query   [ nope_dim | rope_dim ]            a head's
    key     [ latent @ key_up | rope ]         nope_dim a head | rope_dim that all heads share
    value   [ latent @ value_up ]              value_dim a head
    cached  [ latent_dim | rope_dim ]          a token's, normalised and rotated
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
        """Of what is cached, which is what a query meets when it is taken into the latent's space."""
        return self.latent_dim + self.rope_dim

    @property
    def group_size(self) -> int:
        """All query heads read the one entry of a token."""
        return self.num_q_heads

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """Of a head's key and value, made from an entry."""
        return self.nope_dim + self.rope_dim, self.value_dim

    @property
    def label(self) -> str:
        """For a person."""
        return "latent attention"

    @property
    def window(self) -> None:
        """A query sees every key before it."""

    @property
    def out_dim(self) -> int:
        return self.value_dim

    @property
    def features(self) -> frozenset[Feature]:
        """Nothing beyond the kind."""
        return frozenset()

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """One row [latent | rope] a token and layer; `dtype` is the cache's, `scales` are these layers'."""
        return (PoolSpec("latent", (PlaneSpec.scaled("entry", (self.head_dim,), dtype, scales),), num_layers),)


AttentionSpec: TypeAlias = SoftmaxSpec | LatentSpec


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same spec: they share pools, a backend and a plan."""

    name: str
    spec: AttentionSpec
    layers: tuple[int, ...]
    """Model layer indices, in order; a layer's place in here is its index in the pools."""

    def cache_spec(self, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> GroupCacheSpec:
        """`dtype` is the cache's; `scales` are those of all the model's layers."""
        own = None if scales is None else {name: [of[layer] for layer in self.layers] for name, of in scales.items()}
        return GroupCacheSpec(self.name, self.spec.pools(len(self.layers), dtype, own))


def group_layers(specs: Sequence[AttentionSpec]) -> tuple[LayerGroup, ...]:
    """Groups layers by equal spec, in order of first appearance."""
    members: dict[AttentionSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        members.setdefault(spec, []).append(layer)
    return tuple(
        LayerGroup(f"group{index}", spec, tuple(layers)) for index, (spec, layers) in enumerate(members.items())
    )
