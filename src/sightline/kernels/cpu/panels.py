"""The memory layout of quantised weights for CPU products: panels of outputs, interleaved by 4 or 8 inputs.

    matrix   panels, one behind the other; missing outputs of the last are 0
    panel    spans of 32 or 256 inputs
    span     fp16 scales, one per output; fp16 minima, if any; then its blocks of 32 inputs
    block    steps, one byte per group and output; minimum steps, if any; lower bits of the codes; higher bits
    codes    planes 0 to 7, which share bytes: a plane has a quad, 4 consecutive inputs, for each output of the panel

                   one quad together                     two quads together
    plane 0        quad 0 of all outputs                 quads 0 and 1 of output 0, of output 1, ...: half the outputs
    plane 1        quad 1 of all outputs                 quads 0 and 1 of the other half
    plane 2        quad 2 of all outputs                 quads 2 and 3 of the first half, and so on

The lower 4 bits of planes 0 to 3 share bytes with those of planes 4 to 7, which are in the upper half of the byte.
Codes of 8 bits are signed, 128 below the form's code, and have a byte each. Fifth and sixth bits follow: bit p of a
byte is the fifth bit of plane p; of two bits, a byte has those of planes 0 to 3, and another byte those of planes 4 to
7.

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
"""The quads of a block, and its planes."""
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class PanelLayout:
    """Sizes and offsets in bytes."""

    form: CodeForm
    panel: int
    """The number of outputs of a panel."""
    quads_together: int
    """The consecutive quads of one output that are stored side by side: 1 or 2."""

    @property
    def plane_bytes(self) -> int:
        """A plane of codes, of 8 bits or with those that share its bytes."""
        return 4 * self.panel

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


def pack(weights: CodedWeights, panel: int, quads_together: int) -> PackedMatrix:
    """Packs the weights in panels of so many outputs, with so many quads of an output side by side."""
    layout = PanelLayout(weights.form, panel, quads_together)
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
        blocks, bits, together = self.weights.in_features // BLOCK, self.layout.form.bits, self.layout.quads_together
        runs = self._interleaved(self.weights.codes, blocks, QUADS // together, 4 * together).permute(0, 2, 3, 1, 4)
        planes = runs.reshape(self.num_panels, blocks, QUADS, -1)
        if bits == 8:
            return (planes ^ 0x80).reshape(self.num_panels, blocks, -1)
        lower = (planes[:, :, :4] & 0x0F) | (planes[:, :, 4:] << 4)
        parts = [lower.reshape(self.num_panels, blocks, -1)]
        if bits == 5:
            parts.append(_overlaid(planes >> 4, 1).reshape(self.num_panels, blocks, -1))
        elif bits == 6:
            higher = planes >> 4
            parts += [
                _overlaid(half, 2).reshape(self.num_panels, blocks, -1) for half in (higher[:, :, :4], higher[:, :, 4:])
            ]
        return torch.cat(parts, dim=2)


def _overlaid(bits: Tensor, width: int) -> Tensor:
    """[panels, blocks, planes, ...] to [panels, blocks, ...]: those of plane p begin at bit p * width of the byte."""
    joined = torch.zeros_like(bits[:, :, 0])
    for plane in range(bits.shape[2]):
        joined |= bits[:, :, plane] << (plane * width)
    return joined
