"""Token embeddings with quantised weights, decoded by a CPU kernel."""

from __future__ import annotations

from torch import Tensor

from sightline.kernels.cpu.lookup_kernel import LookupArguments, lookup_kernel
from sightline.kernels.cpu.panels import PackedMatrix
from sightline.kernels.cpu.record import float_bits
from sightline.layers.cpu_compute import CpuCompute, record_of
from sightline.layers.cpu_operations import rounded
from sightline.layers.embedding import Embedding
from sightline.layers.operations import Operations


class CodedEmbedding(Embedding):
    """An embedding whose weights stay quantised. Each step decodes the vectors of its tokens."""

    def __init__(self, weights: PackedMatrix, compute: CpuCompute) -> None:
        """`weights` may be those of the output projection too."""
        self._weights = weights
        self._compute = compute

    def __call__(self, tokens: Tensor, scale: float, out: Tensor, operations: Operations) -> None:
        del operations  # packed weights have a kernel of their own
        if not len(tokens):
            return
        arguments = LookupArguments(
            weights=self._weights.panels.data_ptr(),
            rows=tokens.data_ptr(),
            num_rows=len(tokens),
            out_features=self._weights.out_features,
            out=out.data_ptr(),
            out_row_bytes=out.stride(0) * out.itemsize,
            spans=self._weights.spans,
            factor=float_bits(rounded(scale, out.dtype)),
        )
        kernel = lookup_kernel(self._weights.layout.form, out.dtype, self._compute.processor)
        self._compute.launcher.launch(record_of(kernel, arguments, (self._weights.panels, tokens, out)))
