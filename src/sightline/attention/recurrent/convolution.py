"""The causal convolution of every channel over a row's last tokens, in fp32.

    window   [ tail | tokens ]     of each row: the inputs before the step, oldest first, then the new ones

Does not know what the channels are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.attention.contract import ConvWeights

_CACHED_BYTES = 1 << 20
"""Inputs that are convolved at once, so that all taps find them in the cache of a CPU."""


def convolve_few(tails: Tensor, x: Tensor, conv: ConvWeights, *, activated: bool) -> tuple[Tensor, Tensor]:
    """Convolves rows of a few tokens, x [rows, tokens, channels], behind `tails` [rows, channels, width - 1] fp32.

    Returns [rows, tokens, channels] fp32, with SiLU if `activated`, and the windows [rows, channels, width - 1 +
    tokens] fp32. Channels come first in these, as in tails: transposing those would cost more than the convolution.
    """
    window = torch.cat((tails, x.transpose(1, 2)), dim=2)
    views = window.unfold(2, conv.weight.shape[1], 1)
    out = (views * conv.weight.unsqueeze(1)).sum(3)
    if conv.bias is not None:
        out += conv.bias.unsqueeze(1)
    if activated:
        torch.nn.functional.silu(out, inplace=True)
    return out.transpose(1, 2), window


def convolve(window: Tensor, conv: ConvWeights, *, activated: bool) -> Tensor:
    """[rows, tokens, channels] fp32, from `window` [rows, width - 1 + tokens, channels] fp32; with SiLU if `activated`.

    Rows of different lengths may follow each other as if they were one: what is computed across a border is of no use.
    """
    rows, places, channels = window.shape
    taps = conv.weight.float().T.contiguous()
    width = taps.shape[0]
    length = places - width + 1
    out = window.new_empty(rows, length, channels)
    step = max(1, _CACHED_BYTES // (4 * channels * rows)) if window.device.type == "cpu" else length
    for start in range(0, length, step):
        stop = min(start + step, length)
        part = out[:, start:stop]
        torch.mul(window[:, start:stop], taps[0], out=part)
        for tap in range(1, width):
            part.addcmul_(window[:, start + tap : stop + tap], taps[tap])
        if conv.bias is not None:
            part += conv.bias
        if activated:
            torch.nn.functional.silu(part, inplace=True)
    return out
