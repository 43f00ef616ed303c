"""The operations as fused Triton kernels, one launch each, for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.kernels.triton import greedy, pointwise, rotations, state_gates, tails
from sightline.kernels.triton import streams as residual
from sightline.kernels.triton.gates import GateKind, GateRule
from sightline.kernels.triton.norms import add_rms_norm, layer_norm, rms_norm
from sightline.layers import portable
from sightline.layers.activation import Activation, ClampedSilu, ClampedSwiglu, Gate
from sightline.layers.decay_rates import DecayRates
from sightline.layers.norm import GroupNorm, HeadNorms, LayerNorm, RmsNorm
from sightline.layers.operations import IndexRows, LatentRows, Operations, TurnedHeads
from sightline.layers.rotary import Rotary, RotaryTable, WindowTable
from sightline.layers.stream_mix import StreamMix, StreamShares
from sightline.layers.time_steps import TimeSteps

_KINDS = {
    Activation.SILU: GateKind.SILU,
    Activation.GELU: GateKind.GELU,
    Activation.GELU_TANH: GateKind.GELU_TANH,
    Activation.RELU: GateKind.RELU,
    Activation.SIGMOID: GateKind.SIGMOID,
}


def gate_rule(gate: Gate) -> GateRule:
    """The gate as kernels read it."""
    match gate:
        case Activation():
            return GateRule(_KINDS[gate])
        case ClampedSwiglu(alpha, limit):
            return GateRule(GateKind.CLAMPED_SWIGLU, alpha, limit)
        case ClampedSilu(limit):
            return GateRule(GateKind.CLAMPED_SILU, limit=limit)


class TritonOperations(Operations):
    """Buffers are row-major."""

    turns = False

    def __init__(self, *, overlaps: bool = False) -> None:
        """With `overlaps`, a launch may begin before the previous one ends, as `kernels.triton.overlap` says."""
        self._overlaps = overlaps

    def embed(self, weight: Tensor, tokens: Tensor, scale: float, out: Tensor) -> None:
        pointwise.take_rows(weight, tokens, float(torch.tensor(scale, dtype=out.dtype, device="cpu")), out)

    def add_rows(self, table: Tensor, rows: Tensor, out: Tensor) -> None:
        pointwise.add_rows(table, rows, out)

    def rotary_table(self, rotary: Rotary, positions: Tensor, out: RotaryTable) -> None:
        rotations.rotary_table(positions, rotary.frequencies, rotary.amplitude, out.cos, out.sin, out.minus_sin)

    def window_table(self, rotary: Rotary, positions: Tensor, size: int, out: WindowTable) -> None:
        portable.window_table(rotary, positions, size, out)

    def norm(self, x: Tensor, norm: RmsNorm, out: Tensor) -> None:
        rms_norm(x, norm.weight, norm.epsilon, out, overlaps=self._overlaps)

    def norm_rows(self, x: Tensor, rows: Tensor, norm: RmsNorm, out: Tensor) -> None:
        rms_norm(x, norm.weight, norm.epsilon, out, rows, overlaps=self._overlaps)

    def add_normed(self, result: Tensor, norm: RmsNorm, stream: Tensor) -> None:
        add_rms_norm(result, norm.weight, norm.epsilon, stream, overlaps=self._overlaps)

    def add_normed_then_norm(
        self, result: Tensor, norm: RmsNorm, stream: Tensor, next_norm: RmsNorm, out: Tensor
    ) -> None:
        add_rms_norm(
            result,
            norm.weight,
            norm.epsilon,
            stream,
            next_norm.weight,
            next_norm.epsilon,
            out,
            overlaps=self._overlaps,
        )

    def layer_norm(self, x: Tensor, norm: LayerNorm, out: Tensor) -> None:
        layer_norm(x, norm.weight, norm.bias, norm.epsilon, out)

    def turn_heads(self, heads: TurnedHeads, norms: HeadNorms | None, table: RotaryTable) -> None:
        pairs = None if norms is None else ((norms.q.weight, norms.q.epsilon), (norms.k.weight, norms.k.epsilon))
        rotations.turn_heads(
            heads.turned.whole,
            table.cos,
            table.sin,
            heads.rotated.whole,
            heads.q.shape[1],
            pairs,
            overlaps=self._overlaps,
        )

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
            overlaps=self._overlaps,
        )

    def turn_index(self, rows: IndexRows, norm: LayerNorm, table: RotaryTable) -> None:
        rotations.turn_index(
            rows.q,
            rows.key,
            (norm.weight, norm.bias, norm.epsilon),
            table.cos,
            table.sin,
            rows.turned,
            overlaps=self._overlaps,
        )

    def turn_tails(self, x: Tensor, norm: RmsNorm | None, table: RotaryTable, *, back: bool = False) -> None:
        weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.epsilon)
        sin = table.minus_sin if back else table.sin
        tails.turn_tails(x, weight, epsilon, table.cos, sin, overlaps=self._overlaps)

    def add_places(self, x: Tensor, bias: Tensor, places: Tensor, out: Tensor) -> None:
        portable.add_places(x, bias, places, out)

    def collapse_streams(
        self, streams: Tensor, logits: Tensor, mix: StreamMix, shares: StreamShares, out: Tensor
    ) -> None:
        self._read_streams(streams, logits, mix, shares, out)

    def expand_streams(self, result: Tensor, shares: StreamShares, streams: Tensor) -> None:
        residual.expand_streams(result, *shares, streams, overlaps=self._overlaps)

    def join_streams(self, streams: Tensor, logits: Tensor, mix: StreamMix, out: Tensor) -> None:
        self._read_streams(streams, logits, mix, None, out)

    def _read_streams(
        self, streams: Tensor, logits: Tensor, mix: StreamMix, shares: StreamShares | None, out: Tensor
    ) -> None:
        numbers = residual.StreamNumbers(mix.rule.num_rounds, mix.rule.epsilon, mix.rule.norm_epsilon)
        writing, mixing = (None, None) if shares is None else shares
        residual.collapse_streams(
            streams, logits, mix.scale, mix.base, numbers, writing, mixing, out, overlaps=self._overlaps
        )

    def gate(self, kind: Gate, gate: Tensor, up: Tensor, out: Tensor) -> None:
        pointwise.gate(gate_rule(kind), gate, up, out, overlaps=self._overlaps)

    def activate(self, kind: Activation, x: Tensor) -> None:
        pointwise.activate(_KINDS[kind], x)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: RmsNorm, activation: Activation, out: Tensor) -> None:
        state_gates.gated_norm(x, gate, norm.weight, norm.epsilon, _KINDS[activation], out, overlaps=self._overlaps)

    def delta_gates(self, x: Tensor, shares: Tensor, rates: DecayRates, decay: Tensor, beta: Tensor) -> None:
        state_gates.delta_gates(x, shares, *rates, decay, beta, overlaps=self._overlaps)

    def time_steps(self, x: Tensor, steps: TimeSteps, times: Tensor, decays: Tensor) -> None:
        limits = (steps.least, steps.most)
        state_gates.time_steps(x, steps.bias, steps.log_rates, limits, times, decays, overlaps=self._overlaps)

    def norm_gated(self, x: Tensor, gate: Tensor, norm: GroupNorm, out: Tensor) -> None:
        state_gates.norm_gated(x, gate, norm.weight, norm.epsilon, out, overlaps=self._overlaps)

    def multiply(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        torch.mul(x, y, out=out)

    def gate_heads(self, gate: Tensor, x: Tensor) -> None:
        state_gates.gate_heads(gate, x, overlaps=self._overlaps)

    def copy(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def widened(self, x: Tensor) -> Tensor:
        return x.contiguous().float()

    def scale(self, logits: Tensor, factor: float) -> None:
        pointwise.scale(logits, factor)

    def softcap(self, logits: Tensor, cap: float) -> None:
        pointwise.softcap(logits, cap)

    def best_tokens(self, logits: Tensor, out: Tensor) -> None:
        greedy.best_tokens(logits, out)
