"""Memory for cache entries: the device's own, or the host's, where a GPU reads and writes it in place.

Knows bytes and addresses. Does not know what an entry is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class _PinnedBytes:
    """Page-locked host memory, described as memory of a GPU: the driver gives it one address for both."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self._memory.data_ptr(), False),
            "version": 2,
        }


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, on_host: bool) -> Tensor:
    """An uninitialized tensor for the operations of `device`, whose memory is the device's or the host's.

    On a CPU both are the same memory. On a GPU, a tensor in host memory is page-locked, and kernels reach it over the
    bus: every operation works on it in stream order, far slower than on the card's own memory.
    """
    if not on_host or device.type == "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    # The tensor keeps the memory: torch holds on to what it was made from.
    return torch.as_tensor(_PinnedBytes(num_bytes), device=device).view(dtype).view(tuple(shape))
