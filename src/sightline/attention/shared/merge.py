"""Merges attention over parts of the keys into attention over all of them.

Exact if a part saw no key: its log-sum-exp is -inf, and its output is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def merge_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges outputs [num_parts, ..., head_dim] by natural log-sum-exps [num_parts, ...], both fp32.

    Returns the output [..., head_dim] and the log-sum-exp [...]; 0 and -inf if no part saw a key.
    """
    lse = torch.logsumexp(lses, dim=0)
    # -inf - -inf would be NaN: if no part saw a key, every weight is exp(-inf).
    weights = torch.exp(lses - lse.masked_fill(lse.isneginf(), 0.0))
    # A weight of 0 does not mask a NaN.
    seen = outs.masked_fill(lses.isneginf().unsqueeze(-1), 0.0)
    return (seen * weights.unsqueeze(-1)).sum(0), lse


def merge_states(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges another part into `out` [..., head_dim] and `lse` [...], both fp32, in place.

    `other_out` may have any dtype and either LSE any memory order.
    """
    merged = merge_parts(torch.stack((out, other_out.float())), torch.stack((lse, other_lse)))
    out.copy_(merged[0])
    lse.copy_(merged[1])


class PartialResults(NamedTuple):
    """Memory in which the parts of rows are merged."""

    out: Tensor
    """[max_step_tokens, heads, value] fp32."""
    lse: Tensor
    """[max_step_tokens, heads] fp32."""

    def begin(self, runs: Sequence[slice]) -> None:
        """Makes these tokens ready for their first part."""
        for tokens in runs:
            self.out[tokens] = 0.0
            self.lse[tokens] = -torch.inf

    def end(self, runs: Sequence[slice], out: Tensor, lse: Tensor | None) -> None:
        """Copies the merged results of these tokens."""
        for tokens in runs:
            out[tokens] = self.out[tokens]
            if lse is not None:
                lse[tokens] = self.lse[tokens]
