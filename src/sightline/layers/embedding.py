"""Token embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor

from sightline.kernels.block_weights import BlockWeights


class Embedding(ABC):
    """A vector for each token, however the vectors are kept."""

    @abstractmethod
    def __call__(self, tokens: Tensor, out: Tensor) -> None:
        """Writes `out` [num_tokens, hidden_size] for tokens [num_tokens] int64."""


class DenseEmbedding(Embedding):
    """As they are used."""

    def __init__(self, weight: Tensor) -> None:
        """[vocab_size, hidden_size]."""
        self.weight = weight

    def __call__(self, tokens: Tensor, out: Tensor) -> None:
        out.copy_(F.embedding(tokens, self.weight))


class BlockEmbedding(Embedding):
    """As the file quantises them: a step dequantises the vectors of its own tokens."""

    def __init__(self, weights: BlockWeights) -> None:
        self._weights = weights

    def __call__(self, tokens: Tensor, out: Tensor) -> None:
        out.copy_(self._weights.take_rows(tokens).dequantised())
