"""Host buffers from which numbers are copied to a device without waiting for the copy.

    numbers ──▶ buffer 0, 1, … (pinned) ──one asynchronous copy──▶ device memory
                   ▲                          │
                   └──── free again ◀── event ┘

A copy reads its buffer after the call that started it has returned. Writing the buffer before then would change what
arrives, so each buffer has an event that is recorded behind its copy and waited for before the buffer is written again.
Does not know what the numbers mean.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

NUM_BUFFERS = 4
"""Copies that may be under way before the host waits for the oldest."""


class CopyEvent(Protocol):
    """Tells when a copy is over, as `torch.cuda.Event` does."""

    def record(self) -> None:
        """Marks the point behind all work that was given to the device so far."""

    def synchronize(self) -> None:
        """Waits for the device to reach that point. Returns at once if none was marked."""


class FinishedCopy:
    """The event of a copy that is over when its call returns, as between two places of host memory."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class StagingRing:
    """Buffers of equal size, used in turn."""

    def __init__(self, num_numbers: int, device: torch.device, make_event: Callable[[], CopyEvent]) -> None:
        """Each buffer holds `num_numbers` int64; pinned if the device is not the host."""
        self._num_numbers = num_numbers
        pinned = device.type != "cpu"
        self._buffers = [
            torch.zeros(num_numbers, dtype=torch.int64, device="cpu", pin_memory=pinned) for _ in range(NUM_BUFFERS)
        ]
        turns = [(number, each.numpy().data, make_event()) for number, each in enumerate(self._buffers)]
        self._turns = itertools.cycle(turns)
        self._views: dict[int, list[Tensor]] = {}
        """The first numbers of each buffer, by their count: to slice a tensor takes as long as to copy it."""

    @staticmethod
    def of(num_numbers: int, device: torch.device) -> StagingRing:
        """A ring with the device's own events."""
        return StagingRing(num_numbers, device, torch.cuda.Event if device.type == "cuda" else FinishedCopy)

    def copy(self, columns: Sequence[Sequence[int]], target: Tensor) -> None:
        """Copies columns to `target` [num_numbers] int64 by one copy, in stream order.

        Each column gets an equal share of the target, and zeros behind it.
        """
        count = target.shape[0]
        share, rest = divmod(count, len(columns))
        if count > self._num_numbers or rest or max(map(len, columns)) > share:
            raise ValueError(
                f"expected {len(columns)} columns of equal shares of at most {self._num_numbers} numbers, got "
                f"{[len(column) for column in columns]} for {count}"
            )
        number, on_host, event = next(self._turns)
        event.synchronize()
        for place, column in enumerate(columns):
            # Reads lists in a third of numpy's time; `x` is a byte of padding.
            struct.pack_into(f"{len(column)}q{8 * (share - len(column))}x", on_host, 8 * share * place, *column)
        target.copy_(self._first(count)[number], non_blocking=True)
        event.record()

    def _first(self, count: int) -> list[Tensor]:
        if count not in self._views:
            self._views[count] = [buffer[:count] for buffer in self._buffers]
        return self._views[count]
