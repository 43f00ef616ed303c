"""The likeliest token of each row of logits, and whether all its logits are numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def best_tokens(logits: Tensor, out: Tensor) -> None:
    """Writes to `out` [2, num_rows] int64, for each row of logits [num_rows, vocab_size] fp32: the likeliest token, the
    lowest id among equals; then 1 if all its logits are finite, otherwise 0.

    NaN counts as larger than any number, so the token is always an id of the vocabulary. Does not wait for a GPU.
    """
    largest = logits.new_empty(logits.shape[0])
    torch.max(logits, dim=-1, out=(largest, out[0]))
    torch.mul(largest < torch.inf, logits.amin(dim=-1) > -torch.inf, out=out[1])
