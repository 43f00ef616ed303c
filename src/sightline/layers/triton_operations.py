"""The operations as fused Triton kernels, one launch each, for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.kernels.triton import greedy, pointwise, rotations
from sightline.kernels.triton.norms import add_rms_norm, layer_norm, rms_norm
from sightline.layers.activation import Activation, ClampedSwiglu, Gate
from sightline.layers.norm import HeadNorms, LayerNorm, RmsNorm
from sightline.layers.operations import LatentRows, Operations, TurnedHeads
from sightline.layers.rotary import Rotary, RotaryTable


class TritonOperations(Operations):
    """Buffers are row-major."""

    turns = False

    def embed(self, weight: Tensor, tokens: Tensor, scale: float, out: Tensor) -> None:
        pointwise.take_rows(weight, tokens, float(torch.tensor(scale, dtype=out.dtype, device="cpu")), out)

    def add_rows(self, table: Tensor, rows: Tensor, out: Tensor) -> None:
        pointwise.add_rows(table, rows, out)

    def rotary_table(self, rotary: Rotary, positions: Tensor, out: RotaryTable) -> None:
        rotations.rotary_table(positions, rotary.frequencies, rotary.amplitude, out.cos, out.sin, out.minus_sin)

    def norm(self, x: Tensor, norm: RmsNorm, out: Tensor) -> None:
        rms_norm(x, norm.weight, norm.epsilon, out)

    def norm_rows(self, x: Tensor, rows: Tensor, norm: RmsNorm, out: Tensor) -> None:
        rms_norm(x, norm.weight, norm.epsilon, out, rows)

    def add_normed(self, result: Tensor, norm: RmsNorm, stream: Tensor) -> None:
        add_rms_norm(result, norm.weight, norm.epsilon, stream)

    def add_normed_then_norm(
        self, result: Tensor, norm: RmsNorm, stream: Tensor, next_norm: RmsNorm, out: Tensor
    ) -> None:
        add_rms_norm(result, norm.weight, norm.epsilon, stream, next_norm.weight, next_norm.epsilon, out)

    def layer_norm(self, x: Tensor, norm: LayerNorm, out: Tensor) -> None:
        layer_norm(x, norm.weight, norm.bias, norm.epsilon, out)

    def turn_heads(self, heads: TurnedHeads, norms: HeadNorms | None, table: RotaryTable) -> None:
        pairs = None if norms is None else ((norms.q.weight, norms.q.epsilon), (norms.k.weight, norms.k.epsilon))
        rotations.turn_heads(heads.turned.whole, table.cos, table.sin, heads.rotated.whole, heads.q.shape[1], pairs)

    def turn_latents(self, rows: LatentRows, norm: RmsNorm, table: RotaryTable) -> None:
        rotations.turn_latents(
            rows.unnormed,
            norm.weight,
            norm.epsilon,
            rows.latent,
            rows.turned.whole[:, :-1],
            rows.k_rope,
            table.cos,
            table.sin,
            rows.rotated.whole,
        )

    def gate(self, kind: Gate, gate: Tensor, up: Tensor, out: Tensor) -> None:
        match kind:
            case Activation():
                pointwise.gate(kind.value, gate, up, out)
            case ClampedSwiglu(alpha, limit):
                pointwise.gate("clamped_swiglu", gate, up, out, alpha, limit)

    def activate(self, kind: Activation, x: Tensor) -> None:
        pointwise.activate(kind.value, x)

    def softcap(self, logits: Tensor, cap: float) -> None:
        pointwise.softcap(logits, cap)

    def best_tokens(self, logits: Tensor, out: Tensor) -> None:
        greedy.best_tokens(logits, out)
