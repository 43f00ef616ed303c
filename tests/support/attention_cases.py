"""A bench over a built-in backend on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.kinds import SpecKind
from sightline.attention.spec import SoftmaxSpec
from sightline.core.device import Device, DeviceKind
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Subject

CPU = torch.device("cpu")
CPU_DEVICE = Device(DeviceKind.CPU, CPU, "cpu", None)
BACKENDS = {
    candidate.name: candidate.load()
    for candidate in BUILT_IN
    if any(DeviceKind.CPU in row.devices and SpecKind.SOFTMAX in row.spec_kinds for row in candidate.rows())
}
"""The built-in backends of softmax attention that run here."""


def subject_for(backend: str, dtype: torch.dtype) -> Subject:
    """The capability row that computes in the dtype."""
    row = next(row for row in BACKENDS[backend].capabilities if dtype in row.dtypes)
    return Subject(backend, BACKENDS[backend], row, CPU_DEVICE)


def bench(specs: Sequence[SoftmaxSpec], backend: str = "torch", **setting: object) -> AttentionRig:
    """Shuffled pages, NaN in unused slots and poison in leases, unless the setting says otherwise."""
    chosen = RigSetting(**setting)  # type: ignore[arg-type]
    return AttentionRig(subject_for(backend, chosen.dtype), specs, chosen)
