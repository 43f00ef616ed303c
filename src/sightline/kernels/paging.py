"""Moving cache entries between pools and dense tensors, with torch.

A pool plane is [num_slots, ...]; a slot is one entry's place in it. Planes of 8-bit floats are moved as bytes: not
every op that moves entries knows their dtypes, on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_entries(plane: Tensor, slots: Tensor, values: Tensor) -> None:
    """Puts `values` [n, ...] into `plane` at `slots` [n]."""
    plane.index_copy_(0, slots, values)


def gather_entries(plane: Tensor, slots: Tensor, out: Tensor) -> None:
    """Copies the entries at `slots` [n] into `out` [n, ...], each byte once."""
    torch.index_select(plane, 0, slots, out=out)


def write_scaled_entries(plane: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
    """Puts `values` / `scale` [n, ...] into the 8-bit floats of `plane` at `slots` [n].

    Saturated first: of what is beyond the range a cast may make NaN.
    """
    largest = torch.finfo(plane.dtype).max
    codes = values.float().div_(scale) if values.dtype != torch.float32 else values.div(scale)
    codes = codes.clamp_(-largest, largest).to(plane.dtype)
    plane.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))


def gather_scaled_entries(plane: Tensor, slots: Tensor, scale: float, out: Tensor) -> None:
    """Fills `out` [n, ...] with the 8-bit floats of `plane` at `slots` [n], times `scale`, in the dtype of `out`."""
    codes = plane.view(torch.uint8).index_select(0, slots).view(plane.dtype)
    out.copy_(codes).mul_(scale)
