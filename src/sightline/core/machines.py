"""Machines that an engine can be planned for without being there.

Owns what their devices report. An engine starts only on a device that `detect_device` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from sightline.core.device import Device, DeviceKind, DeviceMemory, detect_device
from sightline.core.errors import ConfigError

HERE = ("auto", "cpu", "cuda")
"""Names of the devices of this machine."""


def _card(name: str, compute_capability: tuple[int, int], gibibytes: float) -> Device:
    """A GPU that is not here. `gibibytes` is what the driver reports as its memory, which is less than its label."""
    total = int(gibibytes * 2**30)
    memory = DeviceMemory(total, total, 0)
    return Device(DeviceKind.CUDA, torch.device("meta"), name, compute_capability, memory, is_here=False)


KNOWN: Mapping[str, Device] = MappingProxyType(
    {
        "h200": _card("NVIDIA H200", (9, 0), 139.8),
        "h100": _card("NVIDIA H100 80GB HBM3", (9, 0), 79.1),
        "a100": _card("NVIDIA A100-SXM4-80GB", (8, 0), 79.1),
        "l40s": _card("NVIDIA L40S", (8, 9), 44.4),
        "rtx5090": _card("NVIDIA GeForce RTX 5090", (12, 0), 31.3),
        "b200": _card("NVIDIA B200", (10, 0), 178.3),
    }
)
"""Machines by name. Memory is that of an empty card; the compute capability is exact: 12.0 is not 10.0."""


def find_device(name: str) -> Device:
    """Returns a device of this machine, or of a known one. Raises `ConfigError`, listing the names, for others."""
    if name in HERE:
        return detect_device(name)
    known = KNOWN.get(name.lower())
    if known is None:
        raise ConfigError(f"expected a device out of {', '.join((*HERE, *KNOWN))}, got {name!r}")
    return known
