"""Several residual streams between the parts of a network: how a part reads them, and how its result is added to them.

    streams ──shares of reading──▶ input ──▶ a part ──▶ result
       └──────mixing────▶ streams ◀──shares of writing────┘

Shares are computed in fp32. Tensors in, tensors out, on any device: nothing is read back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.kernels.row_slices import row_slices


def normed_logits(streams: Tensor, logits: Tensor, norm_epsilon: float) -> Tensor:
    """What a projection gives for normalised streams, from `logits`, which it gives for the streams as they are.

    Streams are [num_tokens, count, size]. All streams of a token are normalised together, without weights.
    """
    flat = streams.flatten(1)
    length: Tensor = torch.linalg.vector_norm(flat, dim=-1, keepdim=True, dtype=torch.float32)
    return logits * (length.square_().div_(flat.shape[1]) + norm_epsilon).rsqrt_()


def doubly_stochastic(positive: Tensor, num_rounds: int, epsilon: float) -> Tensor:
    """Divides the columns, then in turn the rows and columns, of matrices [..., n, n] by their sums.

    `num_rounds` counts the divisions of columns. With many of them, all rows and columns add up to 1.
    """
    mixed = positive / positive.sum(dim=-2, keepdim=True).add_(epsilon)
    for _ in range(num_rounds - 1):
        mixed.div_(mixed.sum(dim=-1, keepdim=True).add_(epsilon))
        mixed.div_(mixed.sum(dim=-2, keepdim=True).add_(epsilon))
    return mixed


def collapse(streams: Tensor, shares: Tensor, out: Tensor) -> None:
    """Writes the sum of streams [num_tokens, count, size], weighted by shares [num_tokens, count] fp32, to `out`."""
    for rows in row_slices(len(streams)):
        out[rows] = torch.bmm(shares[rows].unsqueeze(1), streams[rows].float()).squeeze(1)


def expand(result: Tensor, shares: Tensor, mixing: Tensor, streams: Tensor) -> None:
    """Mixes the streams [num_tokens, count, size] in place, and adds a share of the result [num_tokens, size] to each.

    Stream k becomes shares[k] * result + sum over j of mixing[j, k] * stream j. Shares are [num_tokens, count] fp32,
    `mixing` is [num_tokens, count, count] fp32.
    """
    for rows in row_slices(len(streams)):
        mixed = torch.bmm(mixing[rows].mT, streams[rows].float())
        streams[rows] = mixed.addcmul_(shares[rows].unsqueeze(-1), result[rows].float().unsqueeze(1))
