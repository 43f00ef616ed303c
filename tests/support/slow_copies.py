"""A device whose asynchronous copies read their source late: when somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


class SlowDevice:
    """Until the test ends, `Tensor.copy_` with `non_blocking` is only noted, and done in order when it must be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copies: list[Callable[[], object]] = []
        self._num_done = 0
        copy = Tensor.copy_

        def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
            if not non_blocking:
                return copy(target, source)
            self._copies.append(lambda: copy(target, source))
            return target

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)

    @property
    def num_under_way(self) -> int:
        return len(self._copies)

    def finish(self, position: int | None = None) -> None:
        """Does all copies, or the first ones up to a position in the order of all."""
        stop = self._num_done + len(self._copies) if position is None else position
        while self._num_done < stop:
            self._copies.pop(0)()
            self._num_done += 1

    def event(self) -> SlowEvent:
        return SlowEvent(self)

    @property
    def position(self) -> int:
        return self._num_done + len(self._copies)


class SlowEvent:
    """As `torch.cuda.Event`."""

    def __init__(self, device: SlowDevice) -> None:
        self._device = device
        self._position = 0

    def record(self) -> None:
        self._position = self._device.position

    def synchronize(self) -> None:
        self._device.finish(self._position)
