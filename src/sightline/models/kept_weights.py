"""Weights that stay quantised on a CPU: which can, how much memory they take, and the layers that hold them.

    KeepRule       decides by the headers of tensors
    KeptWeights    makes projections and embeddings of those that the rule accepts

There are two kinds: `BlockRule` and `KeptBlocks`, on ops of torch, and `CodeRule` and `sightline.models.kept_codes`, on
kernels of our own, which need Numba.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from sightline.kernels.block_product import PACKED_BITS, CpuFeatures, ProductShape, choose_product
from sightline.kernels.block_weights import LOOKUP_BITS, concatenate
from sightline.layers.embedding import BlockEmbedding, Embedding
from sightline.layers.linear import BlockLinear, Projection
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo


class KeepRule(ABC):
    """Decides which weights stay quantised, from their headers."""

    types: str
    """The stored types that can stay, for messages."""
    measured: str
    """What it brought for the default model, for messages."""

    @abstractmethod
    def projection_refusal(self, infos: Sequence[TensorInfo]) -> str | None:
        """The reason why the joined weights of a projection cannot stay quantised; None if they can."""

    @abstractmethod
    def embedding_refusal(self, info: TensorInfo) -> str | None:
        """The reason why the weights of an embedding cannot stay quantised; None if they can."""

    @abstractmethod
    def bits(self, info: TensorInfo, *, looked_up: bool) -> int:
        """An upper bound of the memory per weight; `looked_up` if the matrix is, or may be, an embedding too."""


class KeptWeights(ABC):
    """Makes layers of weights that stay quantised. The rule must have accepted them."""

    rule: KeepRule

    @abstractmethod
    def projection(self, checkpoint: Checkpoint, names: Sequence[str], bias: Tensor | None) -> Projection:
        """A projection with the joined weights `names`."""

    @abstractmethod
    def embedding(self, checkpoint: Checkpoint, name: str) -> Embedding:
        """An embedding with the weights `name`."""

    @abstractmethod
    def tied(self, checkpoint: Checkpoint, name: str) -> tuple[Embedding, Projection]:
        """An embedding, and the output projection with the same weights."""


class BlockRule(KeepRule):
    """The rule for torch's ops on a CPU."""

    types = "one of Q8_0, Q4_0 and Q4_1"
    measured = "one request was decoded 1.5 to 2.3 times as fast, and prompts were read at 0.3 to 0.55 of the speed"

    def __init__(self, cpu: CpuFeatures) -> None:
        self._cpu = cpu

    def projection_refusal(self, infos: Sequence[TensorInfo]) -> str | None:
        widths = {info.blocks for info in infos}
        bits = widths.pop()
        if bits is None or widths:
            stored = ", ".join(sorted({info.stored_as for info in infos}))
            return f"expected {self.types} for all of a projection, got {stored}"
        num_outputs, (_, in_features) = sum(info.shape[0] for info in infos), infos[0].shape
        choice = choose_product(ProductShape(num_outputs, in_features, bits), self._cpu)
        return choice.refusals if choice.product is None else None

    def embedding_refusal(self, info: TensorInfo) -> str | None:
        return f"expected {self.types}, got {info.stored_as}" if info.blocks is None else None

    def bits(self, info: TensorInfo, *, looked_up: bool) -> int:
        assert info.blocks is not None
        return PACKED_BITS[info.blocks] + (LOOKUP_BITS if looked_up else 0)


class KeptBlocks(KeptWeights):
    """Weights for torch's ops. An embedding that is the output projection too is kept twice: in blocks, and packed."""

    def __init__(self, cpu: CpuFeatures) -> None:
        self.rule = BlockRule(cpu)
        self._cpu = cpu

    def projection(self, checkpoint: Checkpoint, names: Sequence[str], bias: Tensor | None) -> Projection:
        weights = concatenate([checkpoint.load_blocks(name) for name in names])
        choice = choose_product(ProductShape(weights.out_features, weights.in_features, weights.bits), self._cpu)
        assert choice.product is not None, choice.refusals
        return BlockLinear(choice.product(weights), bias)

    def embedding(self, checkpoint: Checkpoint, name: str) -> Embedding:
        return BlockEmbedding(checkpoint.load_blocks(name))

    def tied(self, checkpoint: Checkpoint, name: str) -> tuple[Embedding, Projection]:
        return self.embedding(checkpoint, name), self.projection(checkpoint, [name], None)


class CodeRule(KeepRule):
    """The rule for Sightline's own kernels, on any CPU."""

    types = "one of Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K"
    measured = "one request was decoded 3.1 times as fast, and prompts were read 2.2 times as fast"

    def projection_refusal(self, infos: Sequence[TensorInfo]) -> str | None:
        other = sorted({info.stored_as for info in infos if info.codes is None})
        return f"expected {self.types} for all of a projection, got {', '.join(other)}" if other else None

    def embedding_refusal(self, info: TensorInfo) -> str | None:
        return self.projection_refusal([info])

    def bits(self, info: TensorInfo, *, looked_up: bool) -> int:
        del looked_up  # look-ups read the packed weights
        assert info.codes is not None
        # A scale and a minimum of 16 bits for 32 weights, or two steps of 8 bits and a share of the scales.
        return info.codes.bits + 1
