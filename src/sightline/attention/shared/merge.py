"""Merging attention over parts of the keys into attention over all of them.

Exact where a part saw nothing: its log-sum-exp is -inf, and what stands in its output is not looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """From outputs [num_parts, ..., head_dim] and natural log-sum-exps [num_parts, ...], both fp32.

    Returns the output [..., head_dim] and the log-sum-exp [...]; 0 and -inf where no part saw a key.
    """
    lse = torch.logsumexp(lses, dim=0)
    # -inf less -inf would be NaN: where no part saw anything, every weight is exp(-inf).
    weights = torch.exp(lses - lse.masked_fill(lse.isneginf(), 0.0))
    # A weight of 0 would not silence a NaN.
    seen = outs.masked_fill(lses.isneginf().unsqueeze(-1), 0.0)
    return (seen * weights.unsqueeze(-1)).sum(0), lse


def merge_states(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges another part into `out` [..., head_dim] and `lse` [...], both fp32 and changed in place.

    The other's output may be in any dtype and either LSE in any memory order.
    """
    merged = merge_parts(torch.stack((out, other_out.float())), torch.stack((lse, other_lse)))
    out.copy_(merged[0])
    lse.copy_(merged[1])
