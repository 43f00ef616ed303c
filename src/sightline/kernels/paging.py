"""Moving cache entries between pools and dense tensors, with torch.

A pool plane is [num_slots, ...]; a slot is one entry's place in it.
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
