"""What checks choose for themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sightline.core.device import DeviceKind, detect_device
from sightline.testing.checks.pages import large_numbers

CPU = detect_device("cpu")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "itemsize", "free_gib", "power"),
    [
        (DeviceKind.CUDA, 2, 139, 32),
        (DeviceKind.CUDA, 2, 17, 32),
        (DeviceKind.CUDA, 2, 16, 31),
        (DeviceKind.CUDA, 4, 33, 32),
        (DeviceKind.CUDA, 4, 17, 31),
        (DeviceKind.CPU, 2, 999, 31),
    ],
)
def test_a_large_pool_is_as_large_as_there_is_room(kind: DeviceKind, itemsize: int, free_gib: int, power: int) -> None:
    assert large_numbers(replace(CPU, kind=kind), itemsize, free_gib * GIB) == 1 << power
