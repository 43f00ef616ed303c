"""A rig whose kernels run for several threads, in leases with memory behind them that nothing may write."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from sightline.attention.spec import AttentionSpec
from sightline.attention.workspace import Lane, Workspace, poison_
from sightline.testing.conformance import rig
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Subject
from support.cpu_launchers import SerialLauncher

_GUARD_BYTES = 1 << 18
"""More than all threads together could write behind a lease that is made for one of them."""
_GUARD = 0xA5


class GuardedWorkspace(Workspace):
    """Leases are poisoned, and followed by bytes of one value."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 1 << 34)
        self._guards: dict[str, Tensor] = {}

    def lease(
        self, owner: str, name: str, lane: Lane, shape: Sequence[int], dtype: torch.dtype, *, zeroed: bool = False
    ) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        whole = super().lease(owner, name, lane, (size + _GUARD_BYTES,), torch.uint8, zeroed=zeroed)
        guard = self._guards[f"{owner}.{name}"] = whole[size:]
        guard.fill_(_GUARD)
        found = whole[:size].view(dtype).view(tuple(shape))
        if not zeroed:
            poison_(found)
        return found

    def overrun(self) -> list[str]:
        """The leases behind which something was written."""
        return [name for name, guard in self._guards.items() if not bool((guard == _GUARD).all())]


class GuardedRig(AttentionRig):
    """Runs a kernel's threads one after the other: the last first, so that none finds what an earlier one left."""

    def __init__(self, subject: Subject, specs: Sequence[AttentionSpec], setting: RigSetting, num_threads: int) -> None:
        self.guarded = GuardedWorkspace()
        with patch.object(rig, "inline_launcher", lambda: SerialLauncher(num_threads)):
            super().__init__(subject, specs, setting)

    def _make_workspace(self) -> Workspace:
        return self.guarded
