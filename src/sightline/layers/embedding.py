"""Token embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sightline.kernels.block_weights import BlockWeights
from sightline.layers.operations import Operations
from sightline.layers.torch_operations import scale_by


class Embedding(ABC):
    """A vector for each token of the vocabulary."""

    @abstractmethod
    def __call__(self, tokens: Tensor, scale: float, out: Tensor, operations: Operations) -> None:
        """Writes `out` [num_tokens, hidden_size], the vectors of tokens [num_tokens] int64 times `scale`."""


class DenseEmbedding(Embedding):
    """An embedding with dense weights."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [vocab_size, hidden_size]."""
        self.weight = weight

    def __call__(self, tokens: Tensor, scale: float, out: Tensor, operations: Operations) -> None:
        operations.embed(self.weight, tokens, scale, out)


class BlockEmbedding(Embedding):
    """An embedding with quantised weights. Each step dequantises the vectors of its tokens."""

    def __init__(self, weights: BlockWeights) -> None:
        self._weights = weights

    def __call__(self, tokens: Tensor, scale: float, out: Tensor, operations: Operations) -> None:
        del operations  # block weights have kernels of their own
        out.copy_(self._weights.take_rows(tokens).dequantised())
        scale_by(scale, out)
