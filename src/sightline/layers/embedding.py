"""Token embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor

from sightline.kernels.block_weights import BlockWeights


class Embedding(ABC):
    """A vector for each token of the vocabulary."""

    @abstractmethod
    def __call__(self, tokens: Tensor, out: Tensor) -> None:
        """Writes `out` [num_tokens, hidden_size] for tokens [num_tokens] int64."""


class DenseEmbedding(Embedding):
    """An embedding with dense weights."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [vocab_size, hidden_size]."""
        self.weight = weight

    def __call__(self, tokens: Tensor, out: Tensor) -> None:
        out.copy_(F.embedding(tokens, self.weight))


class BlockEmbedding(Embedding):
    """An embedding with quantised weights. Each step dequantises the vectors of its tokens."""

    def __init__(self, weights: BlockWeights) -> None:
        self._weights = weights

    def __call__(self, tokens: Tensor, out: Tensor) -> None:
        out.copy_(self._weights.take_rows(tokens).dequantised())
