"""The definition of LFM2's short convolution, and how checkpoints store it.

prefix.in_proj has the rows of the input gate, the output gate and the values. Owns the tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from sightline.attention.contract import ConvWeights
from sightline.attention.spec import ConvolutionSpec
from sightline.distributed.ranks import Rank
from sightline.layers.recurrent.short_convolution import ShortConvolution
from sightline.models.parts import RankPart, columns, moved, rows
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class ShortConvolutionDefinition:
    """A convolution over a few tokens between two gates."""

    stored_as: ClassVar[str] = "conv"
    indexer: ClassVar[None] = None
    spec: ConvolutionSpec
    bias: bool = False
    """True if the convolution and both projections have biases."""

    def num_weights(self, hidden_size: int) -> int:
        return 4 * hidden_size * self.spec.channels

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[ShortConvolutionDefinition]:
        """Some of the channels, and of the outputs that they add to."""
        count = self.spec.channels
        if count % rank.size:
            return RankPart(self, whole=(f"{count} channels cannot be divided among {rank.size} ranks",))
        own = rank.share(count)
        cuts = {
            **rows([f"{prefix}.in_proj"], own, moved(own, count), moved(own, 2 * count)),
            **rows([f"{prefix}.conv"], own),
            **columns(f"{prefix}.out_proj", rank, own),
        }
        return RankPart(replace(self, spec=replace(self.spec, channels=len(own))), cuts, is_summed=True)

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> ShortConvolution:
        """Loads the layer. `in_features` is the width of its input, if that is not the hidden size."""
        channels = self.spec.channels
        weight = weights.take(f"{prefix}.conv.weight", (channels, 1, self.spec.width)).squeeze(1)
        bias = weights.take(f"{prefix}.conv.bias", (channels,)) if self.bias else None
        return ShortConvolution(
            layer=layer,
            spec=self.spec,
            inputs=weights.projection({f"{prefix}.in_proj": 3 * channels}, in_features or hidden_size, bias=self.bias),
            conv=ConvWeights(weight, bias),
            output=weights.projection({f"{prefix}.out_proj": hidden_size}, channels, bias=self.bias),
        )
