"""Comparisons, and the positions where they hold. On the CPU numpy takes a tenth of torch's time for them."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor


def true_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and columns, each [num_true] int64, where a mask [num_rows, num_columns] bool is true, row by row."""
    if mask.device.type == "cpu":
        flat = torch.from_numpy(numpy.flatnonzero(mask.numpy()))
        return flat // mask.shape[1], flat % mask.shape[1]
    rows, columns = mask.nonzero(as_tuple=True)
    return rows, columns


def at_most(values: Tensor, limits: Tensor) -> Tensor:
    """values <= limits, bool."""
    if values.device.type == "cpu":
        return torch.from_numpy(numpy.less_equal(values.numpy(), limits.numpy()))
    return values <= limits
