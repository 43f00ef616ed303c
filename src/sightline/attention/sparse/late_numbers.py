"""Numbers that are counted on the device and read by the host without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class LateNumbers:
    """Reads a tensor of counts. On a GPU, `read` returns what a copy brought that an earlier call had started."""

    def __init__(self, counts: Tensor) -> None:
        """`counts` is [n] int64."""
        is_card = counts.device.type == "cuda"
        self._counts = counts
        self._copied = torch.zeros(counts.shape, dtype=counts.dtype, pin_memory=True) if is_card else counts
        self._arrived = torch.cuda.Event() if is_card else None  # type: ignore[no-untyped-call]
        self._last = [0] * counts.shape[0]

    def read(self) -> list[int]:
        """The numbers as of the last copy that has arrived; starts the next one."""
        if self._arrived is None or self._arrived.query():  # type: ignore[no-untyped-call]
            self._last[:] = self._copied.tolist()
            if self._arrived is not None:
                self._copied.copy_(self._counts, non_blocking=True)
                self._arrived.record()
        return list(self._last)
