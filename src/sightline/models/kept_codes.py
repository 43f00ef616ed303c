"""Weights that stay quantised, on CPU kernels of our own. Needs Numba."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sightline.layers.cpu_compute import CpuCompute
from sightline.layers.cpu_embedding import CodedEmbedding
from sightline.layers.cpu_linear import CodedLinear
from sightline.layers.embedding import Embedding
from sightline.layers.linear import Projection
from sightline.models.kept_weights import CodeRule, KeptWeights
from sightline.models.loading.checkpoint import Checkpoint


class KeptCodes(KeptWeights):
    """Codes, scales and minima stay as they are stored, in another order."""

    rule = CodeRule()

    def __init__(self, compute: CpuCompute) -> None:
        self._compute = compute

    def projection(self, checkpoint: Checkpoint, names: Sequence[str], bias: Tensor | None) -> Projection:
        matrices = self._compute.pack([checkpoint.load_codes(name) for name in names])
        return CodedLinear(matrices, bias, self._compute)

    def embedding(self, checkpoint: Checkpoint, name: str) -> Embedding:
        [matrix] = self._compute.pack([checkpoint.load_codes(name)])
        return CodedEmbedding(matrix, self._compute)

    def tied(self, checkpoint: Checkpoint, name: str) -> tuple[Embedding, Projection]:
        [matrix] = self._compute.pack([checkpoint.load_codes(name)])
        return CodedEmbedding(matrix, self._compute), CodedLinear([matrix], None, self._compute)
