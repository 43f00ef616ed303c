"""Quantised weights of a projection: small integers in blocks of 32 inputs that share a scale and a minimum.

The form between a file and a product. Does not know file formats, nor how a product packs the codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

BLOCK_SIZE = 32
"""The number of consecutive inputs of a row that share a scale and a minimum."""
LOOKUP_BITS = 10
"""The bits per weight of `BlockWeights`: a byte for the code, and its share of two fp32 numbers per block."""


class CodeBits(IntEnum):
    """The width of the codes."""

    FOUR = 4
    """Codes 0 to 15."""
    EIGHT = 8
    """Codes 0 to 255."""


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """w = minimum + scale * code."""

    codes: Tensor
    """[out_features, in_features] uint8, one byte per code, even if `bits` is 4."""
    scales: Tensor
    """[out_features, in_features / 32] fp32."""
    minima: Tensor
    """[out_features, in_features / 32] fp32: the value of code 0."""
    bits: CodeBits

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        expected = (rows, columns // BLOCK_SIZE)
        if columns % BLOCK_SIZE or self.scales.shape != expected or self.minima.shape != expected:
            raise ValueError(
                f"expected a scale and a minimum for every {BLOCK_SIZE} codes of a row, got codes {[rows, columns]}, "
                f"scales {list(self.scales.shape)} and minima {list(self.minima.shape)}"
            )

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    def dequantised(self) -> Tensor:
        """[out_features, in_features] fp32."""
        values = self.codes.float().view(self.out_features, -1, BLOCK_SIZE)
        # Two rounded operations, as in the decoders of files: a fused multiply-add would differ in the last bit.
        values.mul_(self.scales.unsqueeze(-1)).add_(self.minima.unsqueeze(-1))
        return values.view(self.codes.shape)

    def take_rows(self, order: Tensor) -> BlockWeights:
        """A copy of the rows with the indices `order` [n] int64."""
        return BlockWeights(self.codes[order], self.scales[order], self.minima[order], self.bits)

    def row_pieces(self, num_rows: int) -> Iterator[BlockWeights]:
        """Views of `num_rows` consecutive rows each; the last may have fewer."""
        for start in range(0, self.out_features, num_rows):
            rows = slice(start, start + num_rows)
            yield BlockWeights(self.codes[rows], self.scales[rows], self.minima[rows], self.bits)


def concatenate(parts: Sequence[BlockWeights]) -> BlockWeights:
    """Joins projections of the same input into one whose outputs are side by side."""
    forms = {(part.bits, part.in_features) for part in parts}
    if len(forms) != 1:
        described = sorted(f"{bits.value} bits over {inputs} inputs" for bits, inputs in forms)
        raise ValueError(
            "expected projections with codes of the same width over the same inputs, "
            f"got {', '.join(described) or 'none'}"
        )
    return BlockWeights(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.minima for part in parts]),
        parts[0].bits,
    )
