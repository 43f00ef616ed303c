"""Finds NaN and infinities in weights, in one pass over their memory."""

from __future__ import annotations

import torch
from torch import Tensor


def find_not_finite(tensor: Tensor) -> str | None:
    """Returns None if all values are finite, otherwise how many are not and the index of the first, in words.

    Finite values take one pass and no memory: the minimum and maximum are NaN if any value is. The dimensions are
    sorted by stride, because torch copies a tensor that is not contiguous before it reduces it.
    """
    if tensor.is_floating_point() and tensor.element_size() == 1:
        # torch compares no 8-bit floats.
        tensor = tensor.float()
    ordered = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if tensor.numel() == 0 or bool(torch.stack(torch.aminmax(ordered)).isfinite().all()):
        return None
    wrong = tensor.isfinite().logical_not_()
    first = torch.unravel_index(wrong.flatten().byte().argmax(), wrong.shape)
    return f"{int(wrong.sum())} of {wrong.numel()}, the first at {[int(place) for place in first]}"
