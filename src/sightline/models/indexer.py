"""The definition of an indexer, and how checkpoints store it.

    self_attn.indexer.wq_b           [heads * head_dim, query rank]: from the normalised low-rank query
    self_attn.indexer.wk             [head_dim, hidden]: the key, which k_norm, with weight and bias, normalises
    self_attn.indexer.weights_proj   [heads, hidden]: how much each head counts

Rows are kept in the order that the half-split rotation needs, and joined with the projections of the attention layer
that read the same input. Does not know model families.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.spec import IndexSpec
from sightline.layers.indexer import Indexer
from sightline.layers.norm import LayerNorm
from sightline.models.weights import WeightReader

JOINED = "a joint projection"
"""What prevents weights of an indexer from staying quantised."""


@dataclass(frozen=True)
class IndexerDefinition:
    """The indexer of a latent layer."""

    spec: IndexSpec
    rope_dim: int
    """The number of dimensions of queries and key that are rotated: the first ones."""
    paired_neighbours: bool
    """True if the stored rotation pairs dimension 2i with 2i + 1 instead of i with i + rope_dim / 2."""
    norm_epsilon: float
    """The epsilon of the key's layer norm."""

    def __post_init__(self) -> None:
        if self.rope_dim > self.spec.head_dim:
            raise ValueError(
                f"expected index_head_dim to be at least {self.rope_dim}, the dimensions that are rotated, got "
                f"{self.spec.head_dim}"
            )

    def num_weights(self, hidden_size: int, query_rank: int) -> int:
        """Weights that each token is multiplied with."""
        heads, dim = self.spec.num_q_heads, self.spec.head_dim
        return heads * dim * query_rank + (dim + heads) * hidden_size

    def query_rows(self, weights: WeightReader, prefix: str, query_rank: int) -> Tensor:
        """The rows of the projection to queries, head by head."""
        spec = self.spec
        shape = (spec.num_q_heads * spec.head_dim, query_rank)
        stored = weights.matrix(f"{prefix}.indexer.wq_b.weight", shape, JOINED)
        heads = stored.view(spec.num_q_heads, spec.head_dim, query_rank)
        return heads[:, self._order().to(stored.device)].flatten(0, 1)

    def input_rows(self, weights: WeightReader, prefix: str, in_features: int) -> Tensor:
        """The rows of the projections to the key, then to the weights of heads."""
        spec = self.spec
        key = weights.matrix(f"{prefix}.indexer.wk.weight", (spec.head_dim, in_features), JOINED)
        shape = (spec.num_q_heads, in_features)
        return torch.cat(
            (
                key[self._order().to(key.device)],
                weights.matrix(f"{prefix}.indexer.weights_proj.weight", shape, JOINED),
            )
        )

    def load(self, weights: WeightReader, prefix: str) -> Indexer:
        """Loads what is not a projection."""
        names, shape = [f"{prefix}.indexer.k_norm.{part}" for part in ("weight", "bias")], (self.spec.head_dim,)
        weight, bias = (weights.take(name, shape, torch.float32) for name in names)
        order = self._order().to(weight.device)
        return Indexer(self.spec, LayerNorm(weight[order], bias[order], self.norm_epsilon))

    def _order(self) -> Tensor:
        """The stored dimension for each kept dimension of a query or key, which share it."""
        turning = half_split_order(self.rope_dim, paired_neighbours=self.paired_neighbours)
        return torch.cat((turning, torch.arange(self.rope_dim, self.spec.head_dim)))


def half_split_order(rope_dim: int, *, paired_neighbours: bool) -> Tensor:
    """The order of rope dimensions for a half-split rotation. Queries and keys share it, so scores are the same."""
    dims = torch.arange(rope_dim)
    return torch.cat((dims[::2], dims[1::2])) if paired_neighbours else dims
