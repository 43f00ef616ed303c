"""The memory layout of quantised weights for CPU products: panels of outputs, interleaved by 4 inputs.

    matrix   panels, one behind the other; missing outputs of the last are 0
    panel    spans of 32 or 256 inputs
    span     fp16 scales, one per output; fp16 minima, if any; then its blocks of 32 inputs
    block    steps, one byte per group and output; minimum steps, if any; lower bits of the codes; higher bits
    codes    quad 0 of output 0, quad 0 of output 1, ...: a quad is 4 consecutive inputs of one output

The lower 4 bits of quads 0 to 3 share bytes with those of quads 4 to 7, which are in the upper half of the byte. Codes
of 8 bits are signed, 128 below the form's code, and have a byte each. Fifth and sixth bits follow: bit q of a byte is
the fifth bit of quad q; of two bits, a byte has those of quads 0 to 3, and another byte those of quads 4 to 7.

A product reads a panel from its first to its last byte. Does not know instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.kernels.coded_weights import CodedWeights, CodeForm

BLOCK = 32
"""The inputs of a block, which share one scale of the quantised inputs."""
QUADS = 8
"""The quads of a block."""
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class PanelLayout:
    """Sizes and offsets in bytes."""

    form: CodeForm
    panel: int
    """The number of outputs of a panel."""

    @property
    def groups(self) -> int:
        """The number of scales of a block for each output."""
        return BLOCK // self.form.group

    @property
    def head_bytes(self) -> int:
        """Scales and minima of a span."""
        return self.panel * (4 if self.form.has_minima else 2)

    @property
    def step_bytes(self) -> int:
        """Steps and minimum steps of a block."""
        if not self.form.has_steps:
            return 0
        return self.panel * (self.groups + (1 if self.form.has_minima else 0))

    @property
    def block_bytes(self) -> int:
        return self.step_bytes + self.panel * BLOCK * self.form.bits // 8

    @property
    def blocks_per_span(self) -> int:
        return self.form.span // BLOCK if self.form.has_steps else 1

    @property
    def span_bytes(self) -> int:
        return self.head_bytes + self.blocks_per_span * self.block_bytes

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """The memory of a matrix."""
        spans = in_features // (self.blocks_per_span * BLOCK)
        return -(-out_features // self.panel) * spans * self.span_bytes


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """Quantised weights [out_features, in_features] in panels."""

    layout: PanelLayout
    panels: Tensor
    """[panels, bytes per panel] uint8."""
    out_features: int
    in_features: int

    @property
    def spans(self) -> int:
        """The spans of a row."""
        return self.in_features // BLOCK // self.layout.blocks_per_span


def pack(weights: CodedWeights, panel: int) -> PackedMatrix:
    """Packs the weights in panels of so many outputs."""
    layout = PanelLayout(weights.form, panel)
    num_panels = -(-weights.out_features // panel)
    packed = torch.empty(num_panels, layout.num_bytes(panel, weights.in_features), dtype=torch.uint8)
    step = max(1, _PIECE_ELEMENTS // (weights.in_features * panel))
    for start in range(0, num_panels, step):
        stop = min(start + step, num_panels)
        piece = weights.rows(start * panel, min(stop * panel, weights.out_features))
        packed[start:stop] = _Piece(piece, layout, stop - start).packed()
    return PackedMatrix(layout, packed, weights.out_features, weights.in_features)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some whole panels of a matrix."""

    weights: CodedWeights
    layout: PanelLayout
    num_panels: int

    def packed(self) -> Tensor:
        """[panels, bytes per panel] uint8."""
        weights, spans = self.weights, self.weights.scales.shape[1]
        heads = [
            self._by_span(part.view(torch.uint8), spans)
            for part in (weights.scales, weights.minima)
            if part is not None
        ]
        blocks = [
            self._by_block(part.view(torch.uint8))
            for part in (weights.steps, weights.minimum_steps)
            if part is not None
        ]
        body = torch.cat((*blocks, self._codes()), dim=2).view(self.num_panels, spans, -1)
        return torch.cat((*heads, body), dim=2).view(self.num_panels, -1)

    def _interleaved(self, part: Tensor, *sizes: int) -> Tensor:
        """[outputs, n] as [panels, panel, *sizes], with zeros for missing outputs."""
        missing = self.num_panels * self.layout.panel - len(part)
        return F.pad(part, (0, 0, 0, missing)).view(self.num_panels, self.layout.panel, *sizes)

    def _by_span(self, halves: Tensor, spans: int) -> Tensor:
        """fp16 numbers as bytes [outputs, 2 * spans] to [panels, spans, 2 * panel]."""
        return self._interleaved(halves, spans, 2).transpose(1, 2).reshape(self.num_panels, spans, -1)

    def _by_block(self, steps: Tensor) -> Tensor:
        """[outputs, blocks * groups] to [panels, blocks, groups * panel]."""
        blocks = self.weights.in_features // BLOCK
        groups = steps.shape[1] // blocks
        return self._interleaved(steps, blocks, groups).permute(0, 2, 3, 1).reshape(self.num_panels, blocks, -1)

    def _codes(self) -> Tensor:
        """[panels, blocks, bytes of codes]."""
        blocks, bits = self.weights.in_features // BLOCK, self.layout.form.bits
        quads = self._interleaved(self.weights.codes, blocks, QUADS, 4).permute(0, 2, 3, 1, 4)
        if bits == 8:
            return (quads ^ 0x80).reshape(self.num_panels, blocks, -1)
        lower = (quads[:, :, :4] & 0x0F) | (quads[:, :, 4:] << 4)
        parts = [lower.reshape(self.num_panels, blocks, -1)]
        if bits == 5:
            parts.append(_overlaid(quads >> 4, 1).reshape(self.num_panels, blocks, -1))
        elif bits == 6:
            higher = quads >> 4
            parts += [
                _overlaid(half, 2).reshape(self.num_panels, blocks, -1) for half in (higher[:, :, :4], higher[:, :, 4:])
            ]
        return torch.cat(parts, dim=2)


def _overlaid(bits: Tensor, width: int) -> Tensor:
    """[panels, blocks, quads, ...] to [panels, blocks, ...]: those of quad q begin at bit q * width of the byte."""
    joined = torch.zeros_like(bits[:, :, 0])
    for quad in range(bits.shape[2]):
        joined |= bits[:, :, quad] << (quad * width)
    return joined
