"""The definition of Kimi delta attention (KDA), and how checkpoints store it.

    prefix.q_proj, k_proj, v_proj, b_proj             queries, keys, values, shares
    prefix.q_conv1d, k_conv1d, v_conv1d               the convolution of each
    prefix.f_a_proj and f_b_proj, or f_proj           decays
    prefix.g_a_proj and g_b_proj, or g_proj           gates
    prefix.A_log, dt_bias, o_norm, o_proj

Owns the tensor names. Does not know model families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.contract import ConvWeights
from sightline.attention.spec import RecurrentSpec
from sightline.distributed.ranks import Rank
from sightline.layers.recurrent.kimi_delta import KimiDelta, SecondProducts
from sightline.models.norms import NormDefinition
from sightline.models.parts import RankPart, Slices, columns, rows, scaled
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class KimiDeltaDefinition:
    """The delta rule with a decay per channel, and a convolution over queries, keys and values."""

    stored_as: ClassVar[str] = "self_attn"
    indexer: ClassVar[None] = None
    spec: RecurrentSpec
    rank: int | None
    """The rank of the projections to decays and gates; None if they are projected from the input directly."""
    rates_shape: tuple[int, ...]
    """The shape in which the rate of each head is stored."""
    decay_bound: float | None
    """The least decay, which is negative, if decays are bounded."""
    norms: NormDefinition
    """The norm of each head of the output."""

    def num_weights(self, hidden_size: int) -> int:
        size, heads = self._size, self.spec.num_heads
        side = hidden_size * size if self.rank is None else self.rank * (hidden_size + size)
        return hidden_size * (4 * size + heads) + 2 * side

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[KimiDeltaDefinition]:
        """Some of the heads, and of the outputs that they add to."""
        spec, shape = self.spec, self.rates_shape
        if spec.num_heads % rank.size or spec.num_key_heads != spec.num_heads:
            return RankPart(self, whole=(f"{spec.num_heads} heads cannot be divided among {rank.size} ranks",))
        heads, axis = rank.share(spec.num_heads), shape.index(spec.num_heads)
        size = scaled(heads, spec.key_dim)
        projections = [*"qkv", *(("f_b", "g_b") if self.rank is not None else "fg")]
        cuts = {
            **rows([f"{prefix}.{name}_proj" for name in projections], size),
            **rows([f"{prefix}.b_proj"], heads),
            **rows([f"{prefix}.{name}_conv1d" for name in "qkv"], size),
            f"{prefix}.A_log": Slices(axis, (heads,)),
            f"{prefix}.dt_bias": Slices(0, (size,)),
            **columns(f"{prefix}.o_proj", rank, size),
        }
        part = replace(
            self,
            spec=replace(spec, num_heads=len(heads), num_key_heads=len(heads)),
            rates_shape=(*shape[:axis], len(heads), *shape[axis + 1 :]),
        )
        return RankPart(part, cuts, is_summed=True)

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> KimiDelta:
        """Loads the layer. `in_features` is the width of its input, if that is not the hidden size."""
        spec, size = self.spec, self._size
        names = ("f_proj", "g_proj") if self.rank is None else ("f_a_proj", "g_a_proj")
        parts = {"q_proj": size, "k_proj": size, "v_proj": size, "b_proj": spec.num_heads}
        sizes = parts | dict.fromkeys(names, self.rank or size)
        return KimiDelta(
            layer=layer,
            spec=spec,
            inputs=weights.projection(
                {f"{prefix}.{name}": rows for name, rows in sizes.items()}, in_features or hidden_size, bias=False
            ),
            second=self._load_second(weights, prefix),
            conv=ConvWeights(self._load_conv(weights, prefix), None),
            log_rates=weights.take(f"{prefix}.A_log", self.rates_shape, dtype=torch.float32).flatten(),
            decay_bias=weights.take(f"{prefix}.dt_bias", (size,), dtype=torch.float32).view(-1, spec.key_dim),
            decay_bound=self.decay_bound,
            norm=self.norms.load(weights, f"{prefix}.o_norm", spec.value_dim),
            output=weights.projection({f"{prefix}.o_proj": hidden_size}, size, bias=False),
        )

    @property
    def _size(self) -> int:
        """Features of all heads."""
        return self.spec.num_heads * self.spec.key_dim

    def _load_second(self, weights: WeightReader, prefix: str) -> SecondProducts | None:
        if self.rank is None:
            return None
        decay, gate = (
            weights.projection({f"{prefix}.{name}_b_proj": self._size}, self.rank, bias=False) for name in ("f", "g")
        )
        return SecondProducts(decay, gate)

    def _load_conv(self, weights: WeightReader, prefix: str) -> Tensor:
        """[3 * size, conv_width]: the weights for queries, keys and values."""
        shape = (self._size, 1, self.spec.conv_width)
        return torch.cat([weights.take(f"{prefix}.{name}_conv1d.weight", shape) for name in "qkv"]).squeeze(1)
