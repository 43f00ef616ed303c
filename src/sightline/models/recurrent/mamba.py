"""The definition of a Mamba-2 layer, and how checkpoints store it.

    prefix.in_proj                     gate | values | B | C | times
    prefix.conv1d                             values | B | C
    prefix.A_log, dt_bias, D           one number per head
    prefix.norm, out_proj

Owns the tensor names, and the order in which the rows of weights are kept. Does not know model families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.contract import ConvWeights
from sightline.attention.spec import RecurrentSpec
from sightline.distributed.ranks import Rank
from sightline.layers.linear import Linear
from sightline.layers.norm import GroupNorm
from sightline.layers.recurrent.mamba import Mamba
from sightline.layers.time_steps import TimeSteps
from sightline.models.parts import RankPart, Slices, columns, moved, rows, scaled
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class MambaDefinition:
    """A state per head whose decay is the time that a token takes."""

    stored_as: ClassVar[str] = "mamba"
    indexer: ClassVar[None] = None
    spec: RecurrentSpec
    norm_epsilon: float
    norm_groups: int
    """The number of groups of features that are normalised on their own."""
    time_limits: tuple[float, float]
    """The least and the most time of a token."""
    bias: bool = False
    """True if the input and output projections have biases."""
    conv_bias: bool = True

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (self.spec.channels + 2 * self._size + self.spec.num_heads)

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[MambaDefinition]:
        """Some of the groups of heads, and of the outputs that they add to."""
        spec = self.spec
        if spec.num_key_heads % rank.size or self.norm_groups % rank.size:
            return RankPart(self, whole=(f"{spec.num_key_heads} groups cannot be divided among {rank.size} ranks",))
        groups, heads = rank.share(spec.num_key_heads), rank.share(spec.num_heads)
        keys, values, all_keys = scaled(groups, spec.key_dim), scaled(heads, spec.value_dim), self._num_key_rows
        mixed = (values, moved(keys, self._size), moved(keys, self._size + all_keys))
        gates, times = values, moved(heads, self._size + spec.channels)
        cuts = {
            **rows([f"{prefix}.in_proj"], gates, *(moved(each, self._size) for each in mixed), times),
            **rows([f"{prefix}.conv1d"], *mixed),
            **{f"{prefix}.{name}": Slices(0, (heads,)) for name in ("A_log", "dt_bias", "D")},
            f"{prefix}.norm.weight": Slices(0, (values,)),
            **columns(f"{prefix}.out_proj", rank, values),
        }
        part = replace(
            self,
            spec=replace(spec, num_heads=len(heads), num_key_heads=len(groups)),
            norm_groups=self.norm_groups // rank.size,
        )
        return RankPart(part, cuts, is_summed=True)

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> Mamba:
        """Loads the layer. `in_features` is the width of its input, if that is not the hidden size."""
        heads, size = (self.spec.num_heads,), self._size
        bias, log_rates, skip = (
            weights.take(f"{prefix}.{name}", heads, dtype=torch.float32) for name in ("dt_bias", "A_log", "D")
        )
        norm = weights.take(f"{prefix}.norm.weight", (size,), dtype=torch.float32)
        return Mamba(
            layer=layer,
            spec=self.spec,
            inputs=self._load_inputs(weights, f"{prefix}.in_proj", in_features or hidden_size),
            conv=self._load_conv(weights, f"{prefix}.conv1d"),
            steps=TimeSteps(bias, log_rates, *self.time_limits),
            skip=skip,
            norm=GroupNorm(norm.view(self.norm_groups, -1), self.norm_epsilon),
            output=weights.projection({f"{prefix}.out_proj": hidden_size}, size, bias=self.bias),
        )

    @property
    def _size(self) -> int:
        """Values of all heads."""
        return self.spec.num_heads * self.spec.value_dim

    @property
    def _num_key_rows(self) -> int:
        return self.spec.num_key_heads * self.spec.key_dim

    def _load_inputs(self, weights: WeightReader, name: str, in_features: int) -> Linear:
        num_rows = self._size + self.spec.channels + self.spec.num_heads
        stored = weights.matrix(f"{name}.weight", (num_rows, in_features), "rows in another order")
        bias = weights.take(f"{name}.bias", (num_rows,)) if self.bias else None
        return weights.make_linear(self._reordered(stored), None if bias is None else self._reordered(bias))

    def _reordered(self, stored: Tensor) -> Tensor:
        """Reorders rows (gate, values, B, C, times) to (C, B, values, gate, times)."""
        first, behind = self._size, self._size + self.spec.channels
        return torch.cat((self._mixed(stored[first:behind]), stored[:first], stored[behind:]))

    def _load_conv(self, weights: WeightReader, name: str) -> ConvWeights:
        channels = self.spec.channels
        weight = weights.take(f"{name}.weight", (channels, 1, self.spec.conv_width)).squeeze(1)
        bias = self._mixed(weights.take(f"{name}.bias", (channels,))) if self.conv_bias else None
        return ConvWeights(self._mixed(weight), bias)

    def _mixed(self, stored: Tensor) -> Tensor:
        """Reorders rows (values, B, C) to (C, B, values)."""
        first, behind = self._size, self._size + self._num_key_rows
        return torch.cat((stored[behind:], stored[first:behind], stored[:first]))
