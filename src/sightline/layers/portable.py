"""Operations that are torch on every device, because no device has a kernel of its own for them.

Nothing is read back to the host, so a CUDA graph can capture them. A program of CPU kernels cannot repeat them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.kernels import residual_streams, tail_rotation
from sightline.kernels.row_slices import row_slices
from sightline.layers.norm import RmsNorm
from sightline.layers.rotary import Rotary, RotaryTable, WindowTable
from sightline.layers.stream_mix import StreamMix, StreamShares


def window_table(rotary: Rotary, positions: Tensor, size: int, out: WindowTable) -> None:
    """See `Operations.window_table`."""
    tail_rotation.window_table(positions, size, rotary.frequencies, rotary.amplitude, *out)


def turn_tails(x: Tensor, norm: RmsNorm | None, table: RotaryTable, *, back: bool) -> None:
    """See `Operations.turn_tails`."""
    if norm is not None:
        for rows in row_slices(len(x)):
            x[rows] = F.rms_norm(x[rows].float(), norm.weight.shape, norm.weight, norm.epsilon)
    sin = table.minus_sin if back else table.sin
    tail_rotation.turn_tails(x, table.cos[..., : sin.shape[-1]], sin)


def add_places(x: Tensor, bias: Tensor, places: Tensor, out: Tensor) -> None:
    """See `Operations.add_places`."""
    torch.add(x, bias.index_select(0, places), out=out)


def collapse_streams(streams: Tensor, logits: Tensor, mix: StreamMix, shares: StreamShares, out: Tensor) -> None:
    """See `Operations.collapse_streams`."""
    rule = mix.rule
    parts = [rule.count, rule.count, rule.count**2]
    normed = residual_streams.normed_logits(streams, logits, rule.norm_epsilon)
    scaled = [
        part * scale + base
        for part, scale, base in zip(
            torch.split(normed, parts, dim=-1), mix.scale.unbind(0), torch.split(mix.base, parts), strict=True
        )
    ]
    shares.writing.copy_(scaled[1].sigmoid_().mul_(2.0))
    mixing = scaled[2].view_as(shares.mixing).softmax(dim=-1).add_(rule.epsilon)
    shares.mixing.copy_(residual_streams.doubly_stochastic(mixing, rule.num_rounds, rule.epsilon))
    residual_streams.collapse(streams, scaled[0].sigmoid_().add_(rule.epsilon), out)


def expand_streams(result: Tensor, shares: StreamShares, streams: Tensor) -> None:
    """See `Operations.expand_streams`."""
    residual_streams.expand(result, shares.writing, shares.mixing, streams)


def join_streams(streams: Tensor, logits: Tensor, mix: StreamMix, out: Tensor) -> None:
    """See `Operations.join_streams`."""
    normed = residual_streams.normed_logits(streams, logits, mix.rule.norm_epsilon)
    reading = (normed * mix.scale + mix.base).sigmoid_().add_(mix.rule.epsilon)
    residual_streams.collapse(streams, reading, out)
