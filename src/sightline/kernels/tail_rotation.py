"""Rotation of the last dimensions of heads, in pairs of neighbours, and what compression windows need of positions.

Tensors in, tensors out, on any device. Arithmetic is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.kernels.row_slices import row_slices


def turn_tails(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates the last 2 * pairs dimensions of x [num_tokens, heads, dim] in place.

    `cos` and `sin` are [num_tokens, 1, pairs]. Dimension 2i of the tail is paired with 2i + 1.
    """
    num_pairs = cos.shape[-1]
    for rows in row_slices(len(x)):
        tail, c, s = x[rows, :, -2 * num_pairs :], cos[rows], sin[rows]
        first, second = tail.float().view(*tail.shape[:-1], num_pairs, 2).unbind(-1)
        tail.copy_(torch.stack((first * c - second * s, second * c + first * s), dim=-1).flatten(-2))


def window_table(
    positions: Tensor, size: int, frequencies: Tensor, amplitude: float, places: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Writes each token's place in its window of `size` tokens, and the rotation at the first position of the window.

    Positions and places are [num_tokens] int64, frequencies [pairs] fp32, `cos` and `sin` [num_tokens, pairs] fp32.
    """
    torch.remainder(positions, size, out=places)
    angles = (positions - places).float().unsqueeze(1) * frequencies
    torch.mul(angles.cos(), amplitude, out=cos)
    torch.mul(angles.sin(), amplitude, out=sin)
