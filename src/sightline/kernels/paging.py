"""Copies cache entries between pools and dense tensors, with torch.

A pool plane is [num_slots, ...]; a slot is the place of one entry. Planes of 8-bit floats are copied as bytes, because
not every op supports their dtypes on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_entries(plane: Tensor, slots: Tensor, values: Tensor) -> None:
    """Writes `values` [n, ...] to `plane` at `slots` [n], in the dtype of `plane`."""
    plane.index_copy_(0, slots, values.to(plane.dtype))


def gather_entries(plane: Tensor, slots: Tensor, out: Tensor) -> None:
    """Copies the entries at `slots` [n] to `out` [n, ...], in the dtype of `out`."""
    if out.dtype == plane.dtype:
        torch.index_select(plane, 0, slots, out=out)
    else:
        out.copy_(plane.index_select(0, slots))


def write_scaled_entries(plane: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
    """Writes `values` / `scale` [n, ...] to the 8-bit floats of `plane` at `slots` [n].

    Values are saturated first: a cast may turn those out of range into NaN.
    """
    largest = torch.finfo(plane.dtype).max
    codes = values.float().div_(scale) if values.dtype != torch.float32 else values.div(scale)
    codes = codes.clamp_(-largest, largest).to(plane.dtype)
    plane.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))


def gather_scaled_entries(plane: Tensor, slots: Tensor, scale: float, out: Tensor) -> None:
    """Fills `out` [n, ...] with the 8-bit floats of `plane` at `slots` [n], times `scale`, in the dtype of `out`."""
    codes = plane.view(torch.uint8).index_select(0, slots).view(plane.dtype)
    out.copy_(codes).mul_(scale)
