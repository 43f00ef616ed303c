"""Copies between the host and a device that make neither wait: numbers to the device, and results back.

On a GPU both go through pinned memory, in the order of the current stream. On a CPU nothing is copied twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

_DTYPES = {numpy.dtype(numpy.int64): torch.int64, numpy.dtype(numpy.float64): torch.float64}


def sent(arrays: Sequence[NDArray[numpy.int64] | NDArray[numpy.float64]], device: torch.device) -> tuple[Tensor, ...]:
    """Copies arrays of int64 and fp64 to tensors of the same shapes and types, adjacent in memory, by one copy."""
    joined = torch.from_numpy(numpy.concatenate([array.ravel().view(numpy.int64) for array in arrays]))
    if device.type == "cuda":
        # The allocator of pinned memory does not reuse it before the copy is done.
        joined = joined.pin_memory().to(device, non_blocking=True)
    elif device.type != "cpu":
        joined = joined.to(device)
    parts = joined.split_with_sizes([array.size for array in arrays])
    return tuple([part.view(_DTYPES[array.dtype]).view(array.shape) for part, array in zip(parts, arrays, strict=True)])


class Arrival:
    """A tensor on its way to the host. Making one does not wait for the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The tensor on the host. Waits for what the device did up to the copy, and for nothing after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
