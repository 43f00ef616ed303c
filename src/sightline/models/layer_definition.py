"""The definition of one layer of the decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from sightline.distributed.ranks import Division
from sightline.layers.rotary import RotarySpec
from sightline.layers.summed import ExchangedMlp, SummedAttention, SummedMlp
from sightline.models.attention import AttentionDefinition, AttentionLayer
from sightline.models.feed_forward import FeedForward, FeedForwardLayer
from sightline.models.parts import RankPart
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class ResidualFactors:
    """The factors of a layer whose parts add to the norm that they read.

    stream = kept * norm(stream) + added * part(norm(stream))

    The stream is kept divided by the last `added`, so that a product adds its result as it is; the norm behind it,
    which does not see the factor, has another epsilon.
    """

    attention_kept: float
    attention_added: float
    feed_forward_kept: float
    feed_forward_added: float

    @property
    def attention_factor(self) -> float:
        """The factor of the norm in the divided stream behind attention."""
        return self.attention_kept / self.attention_added

    @property
    def feed_forward_factor(self) -> float:
        """The same behind the feed-forward."""
        return self.feed_forward_kept / self.feed_forward_added


class Summed(Enum):
    """Over which ranks the result of a part of a layer is summed."""

    NOWHERE = "nowhere"
    """It is the whole result."""
    REPLICA = "replica"
    ALL = "all"
    """Over the ranks of all replicas, each of which computes the rows of all."""


@dataclass(frozen=True)
class LayerDefinition:
    """The properties that may differ from layer to layer."""

    attention: AttentionDefinition
    rotary: RotarySpec | None
    """None if the layer does not rotate."""
    feed_forward: FeedForward
    lender: int | None = None
    """The layer whose keys and values it reads; None if it has its own."""
    residual: ResidualFactors | None = None
    """None if the parts of the layer add to the stream itself."""
    has_one_part: bool = False
    """True if the attention or the feed-forward is absent. The only norm is called `input_layernorm` then."""
    attention_sum: Summed = Summed.NOWHERE
    """Over whom attention is summed, if this is the part of a rank."""
    feed_forward_sum: Summed = Summed.NOWHERE
    """The same for the feed-forward."""

    def of_rank(self, prefix: str, mlp: str, division: Division) -> RankPart[LayerDefinition]:
        """The part of a rank. The layer is stored under `prefix`, its feed-forward under `mlp`."""
        heads = division.layers
        ranks = division.experts if self.feed_forward.has_experts else heads
        attention, feed_forward = RankPart(self.attention), RankPart(self.feed_forward)
        if not heads.is_alone:
            attention = self.attention.of_rank(f"{prefix}.{self.attention.stored_as}", heads)
        if not ranks.is_alone:
            feed_forward = self.feed_forward.of_rank(mlp, ranks)
        summed = Summed.REPLICA if ranks == heads else Summed.ALL
        part = replace(
            self,
            attention=attention.definition,
            feed_forward=feed_forward.definition,
            attention_sum=Summed.REPLICA if attention.is_summed else Summed.NOWHERE,
            feed_forward_sum=summed if feed_forward.is_summed else Summed.NOWHERE,
        )
        return RankPart(part, {**attention.cuts, **feed_forward.cuts}, whole=(*attention.whole, *feed_forward.whole))

    def load_attention(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int
    ) -> AttentionLayer | SummedAttention:
        """Loads the attention of the layer that is stored under `prefix`."""
        part = self.attention.load(weights, layer, f"{prefix}.{self.attention.stored_as}", hidden_size)
        if self.attention_sum is Summed.NOWHERE:
            return part
        return SummedAttention(part, hidden_size, weights.links.within)

    def load_feed_forward(
        self, weights: WeightReader, prefix: str, hidden_size: int
    ) -> FeedForwardLayer | SummedMlp | ExchangedMlp:
        """Loads the feed-forward that is stored under `prefix`."""
        part = self.feed_forward.load(weights, prefix, hidden_size)
        match self.feed_forward_sum:
            case Summed.NOWHERE:
                return part
            case Summed.REPLICA:
                return SummedMlp(part, hidden_size, weights.links.within)
            case Summed.ALL:
                return ExchangedMlp(part, hidden_size, weights.links, self.feed_forward.reads_tokens)
