"""The definition of lightning attention, and how checkpoints store it.

Owns the tensor names, the order of the rows of weights, and the rates at which heads forget, which depend on the
layer's place alone. Does not know model families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.spec import RecurrentSpec
from sightline.distributed.ranks import Rank
from sightline.layers.linear import Linear
from sightline.layers.recurrent.lightning import LightningAttention
from sightline.models.norms import NormDefinition
from sightline.models.parts import RankPart
from sightline.models.weights import WeightReader

_DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Tensors that checkpoints store although the config determines them."""
_LEAST = 1e-5
"""Keeps the rate of the last layer above 0, and a division by the number of layers finite."""


@dataclass(frozen=True)
class LightningDefinition:
    """Linear attention with a fixed decay per head, SiLU on queries, keys and values, and a gated norm."""

    stored_as: ClassVar[str] = "self_attn"
    indexer: ClassVar[None] = None
    spec: RecurrentSpec
    depth: float
    """Layers below this one, as a share of all but the last: upper layers forget more slowly."""
    norms: NormDefinition
    """The norm of the output, over all heads together."""

    def num_weights(self, hidden_size: int) -> int:
        return 5 * hidden_size * self._size

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[LightningDefinition]:
        """Everything: the output is normalised over all heads together."""
        del prefix, rank
        return RankPart(self, whole=("the output of lightning attention is normalised over all heads together",))

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> LightningAttention:
        """Loads the layer. `in_features` is the width of its input, if that is not the hidden size."""
        stored = [f"{prefix}.{name}" for name in _DERIVED if f"{prefix}.{name}" in weights.names]
        weights.leave_tensors(stored, f"decays of layer {layer}", "the config determines them, so nothing is lost")
        rates = self.rates()
        return LightningAttention(
            layer=layer,
            spec=self.spec,
            inputs=self._load_inputs(weights, prefix, in_features or hidden_size),
            decay=-rates.to(weights.device),
            beta=torch.ones_like(rates, device=weights.device),
            norm=self.norms.load(weights, f"{prefix}.norm", self._size),
            output=weights.projection({f"{prefix}.out_proj": hidden_size}, self._size, bias=False),
        )

    def rates(self) -> Tensor:
        """[num_heads] fp32: how fast each head forgets, a geometric series as in ALiBi."""
        num_heads = self.spec.num_heads
        series = torch.pow(2.0 ** (-8.0 / num_heads), torch.arange(1, num_heads + 1))
        return series * (1.0 - self.depth + _LEAST)

    @property
    def _size(self) -> int:
        """Features of all heads."""
        return self.spec.num_heads * self.spec.key_dim

    def _load_inputs(self, weights: WeightReader, prefix: str, in_features: int) -> Linear:
        """Joins queries, keys and values, stored head by head, and the output gate."""
        heads, dim = self.spec.num_heads, self.spec.key_dim
        stored = weights.matrix(f"{prefix}.qkv_proj.weight", (3 * self._size, in_features), "rows in another order")
        by_kind = stored.view(heads, 3, dim, in_features).transpose(0, 1).reshape(3 * self._size, in_features)
        gate = weights.matrix(f"{prefix}.output_gate.weight", (self._size, in_features), "a part of a joint projection")
        return weights.make_linear(torch.cat((by_kind, gate)), None)


def depth_of(layer: int, num_layers: int) -> float:
    """The `depth` of a layer."""
    return layer / (num_layers - 1 + _LEAST)
