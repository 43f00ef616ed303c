"""The operations in torch, for any device. The order of the arithmetic is what results on a CPU are compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.kernels import greedy
from sightline.layers import portable
from sightline.layers.activation import Activation, ClampedSilu, ClampedSwiglu, Gate
from sightline.layers.decay_rates import DecayRates
from sightline.layers.norm import GroupNorm, HeadNorms, LayerNorm, RmsNorm
from sightline.layers.operations import IndexRows, LatentRows, Operations, TurnedHeads
from sightline.layers.rotary import Halves, Rotary, RotaryTable, WindowTable
from sightline.layers.stream_mix import StreamMix, StreamShares
from sightline.layers.time_steps import TimeSteps

_ACTIVATIONS: MappingProxyType[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Activation.SILU: F.silu,
        Activation.GELU: F.gelu,
        Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
        Activation.RELU: F.relu,
        Activation.SIGMOID: torch.sigmoid,
    }
)
_IN_PLACE: MappingProxyType[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Activation.SILU: torch.ops.aten.silu_,
        Activation.GELU: torch.ops.aten.gelu_,
        Activation.GELU_TANH: partial(torch.ops.aten.gelu_, approximate="tanh"),
        Activation.RELU: torch.ops.aten.relu_,
        Activation.SIGMOID: torch.ops.aten.sigmoid_,
    }
)


class TorchOperations(Operations):
    """Buffers may have any memory order."""

    turns = True

    def embed(self, weight: Tensor, tokens: Tensor, scale: float, out: Tensor) -> None:
        out.copy_(F.embedding(tokens, weight))
        scale_by(scale, out)

    def add_rows(self, table: Tensor, rows: Tensor, out: Tensor) -> None:
        out.add_(table.index_select(0, rows))

    def rotary_table(self, rotary: Rotary, positions: Tensor, out: RotaryTable) -> None:
        angles = positions.float()[:, None, None] * rotary.frequencies
        cos, sin = angles.cos(), angles.sin()
        if rotary.amplitude != 1.0:
            cos, sin = cos.mul_(rotary.amplitude), sin.mul_(rotary.amplitude)
        torch.cat((cos, cos), dim=-1, out=out.cos)
        torch.neg(out.sin.copy_(sin), out=out.minus_sin)

    def window_table(self, rotary: Rotary, positions: Tensor, size: int, out: WindowTable) -> None:
        portable.window_table(rotary, positions, size, out)

    def norm(self, x: Tensor, norm: RmsNorm, out: Tensor) -> None:
        if x.dtype != torch.float32:
            out.copy_(F.rms_norm(x.float(), norm.weight.shape, norm.weight, norm.epsilon))
            return
        # The vector's length instead of its mean square takes four small operations: torch's own norm takes twice as
        # long for one row and ten times as long for a prompt.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        torch.div(x, length.hypot_(norm.least_length), out=out).mul_(norm.scaled_weight)

    def norm_rows(self, x: Tensor, rows: Tensor, norm: RmsNorm, out: Tensor) -> None:
        torch.index_select(x, 0, rows, out=out)
        self.norm(out, norm, out)

    def add_normed(self, result: Tensor, norm: RmsNorm, stream: Tensor) -> None:
        self.norm(result, norm, result)
        stream.add_(result)

    def add_normed_then_norm(
        self, result: Tensor, norm: RmsNorm, stream: Tensor, next_norm: RmsNorm, out: Tensor
    ) -> None:
        self.add_normed(result, norm, stream)
        self.norm(stream, next_norm, out)

    def layer_norm(self, x: Tensor, norm: LayerNorm, out: Tensor) -> None:
        out.copy_(F.layer_norm(x.float(), norm.weight.shape, norm.weight, norm.bias, norm.epsilon))

    def turn_heads(self, heads: TurnedHeads, norms: HeadNorms | None, table: RotaryTable) -> None:
        if norms is not None:
            self.norm(heads.q, norms.q, heads.q)
            self.norm(heads.k, norms.k, heads.k)
        # One rotation for queries and keys: with few tokens, the time depends on the number of operations.
        _rotate(heads.turned, table, heads.rotated)

    def turn_latents(self, rows: LatentRows, norm: RmsNorm, table: RotaryTable) -> None:
        if rows.k_rope_room is not None:
            rows.k_rope_room.copy_(rows.k_rope)
        self.norm(rows.unnormed, norm, rows.latent)
        _rotate(rows.turned, table, rows.rotated)

    def turn_index(self, rows: IndexRows, norm: LayerNorm, table: RotaryTable) -> None:
        self.layer_norm(rows.key, norm, rows.key)
        size, num_heads = table.cos.shape[-1], rows.q.shape[1]
        for given, out in ((rows.q, rows.turned[:, :num_heads]), (rows.key.unsqueeze(1), rows.turned[:, num_heads:])):
            out[..., size:].copy_(given[..., size:])
            _rotate(Halves.of(given[..., :size]), table, Halves.of(out[..., :size]))

    def turn_tails(self, x: Tensor, norm: RmsNorm | None, table: RotaryTable, *, back: bool = False) -> None:
        portable.turn_tails(x, norm, table, back=back)

    def add_places(self, x: Tensor, bias: Tensor, places: Tensor, out: Tensor) -> None:
        portable.add_places(x, bias, places, out)

    def collapse_streams(
        self, streams: Tensor, logits: Tensor, mix: StreamMix, shares: StreamShares, out: Tensor
    ) -> None:
        portable.collapse_streams(streams, logits, mix, shares, out)

    def expand_streams(self, result: Tensor, shares: StreamShares, streams: Tensor) -> None:
        portable.expand_streams(result, shares, streams)

    def join_streams(self, streams: Tensor, logits: Tensor, mix: StreamMix, out: Tensor) -> None:
        portable.join_streams(streams, logits, mix, out)

    def gate(self, kind: Gate, gate: Tensor, up: Tensor, out: Tensor) -> None:
        match kind:
            case Activation():
                torch.mul(_ACTIVATIONS[kind](gate), up, out=out)
            case ClampedSwiglu(alpha, limit):
                gate = gate.clamp(max=limit)
                torch.mul((up.clamp(-limit, limit) + 1.0) * gate, torch.sigmoid(alpha * gate), out=out)
            case ClampedSilu(limit):
                torch.mul(F.silu(gate.clamp(max=limit)), up.clamp(-limit, limit), out=out)

    def activate(self, kind: Activation, x: Tensor) -> None:
        _IN_PLACE[kind](x)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: RmsNorm, activation: Activation, out: Tensor) -> None:
        opened = _ACTIVATIONS[activation](gate.float())
        normed = torch.empty_like(opened)
        self.norm(x.float(), norm, normed)
        torch.mul(normed, opened, out=out)

    def delta_gates(self, x: Tensor, shares: Tensor, rates: DecayRates, decay: Tensor, beta: Tensor) -> None:
        factors, given = rates.log_rates.exp().view(-1, *(1,) * (x.dim() - 2)), x.float() + rates.bias
        if rates.bound is None:
            torch.mul(F.softplus(given), -factors, out=decay)
        else:
            torch.mul(torch.sigmoid(given * factors), rates.bound, out=decay)
        torch.sigmoid(shares.float(), out=beta)

    def time_steps(self, x: Tensor, steps: TimeSteps, times: Tensor, decays: Tensor) -> None:
        torch.clamp(F.softplus(x.float() + steps.bias), steps.least, steps.most, out=times)
        torch.mul(times, steps.log_rates.exp().neg_(), out=decays)

    def norm_gated(self, x: Tensor, gate: Tensor, norm: GroupNorm, out: Tensor) -> None:
        groups = (len(x), *norm.weight.shape)
        gated = (x.float() * F.silu(gate.float())).view(groups)
        normed = F.rms_norm(gated, groups[2:], None, norm.epsilon)
        torch.mul(normed, norm.weight, out=out.view(groups))

    def multiply(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        torch.mul(x, y, out=out)

    def gate_heads(self, gate: Tensor, x: Tensor) -> None:
        x.mul_(torch.sigmoid(gate.float()).unsqueeze(-1))

    def copy(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def widened(self, x: Tensor) -> Tensor:
        return x.contiguous().float()

    def scale(self, logits: Tensor, factor: float) -> None:
        logits.mul_(factor)

    def softcap(self, logits: Tensor, cap: float) -> None:
        logits.div_(cap).tanh_().mul_(cap)

    def best_tokens(self, logits: Tensor, out: Tensor) -> None:
        greedy.best_tokens(logits, out)


def scale_by(scale: float, x: Tensor) -> None:
    """Multiplies x by the scale, rounded to the dtype of x."""
    if scale != 1.0:
        x.mul_(torch.tensor(scale, dtype=x.dtype, device="cpu"))


def _rotate(x: Halves, table: RotaryTable, out: Halves) -> None:
    """Writes the rotated x to `out`, which must not overlap x. Dimension i pairs with i + head_dim / 2."""
    torch.mul(x.whole, table.cos, out=out.whole)
    out.first.addcmul_(x.second, table.minus_sin)
    out.second.addcmul_(x.first, table.sin)
