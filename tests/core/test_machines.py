"""Machines that are not here are known by their exact compute capability and by what their drivers report."""

from __future__ import annotations

import pytest

from sightline.core.device import DeviceKind, detect_device, device_memory
from sightline.core.errors import ConfigError
from sightline.core.machines import KNOWN, find_device


def test_each_known_machine_has_its_exact_compute_capability() -> None:
    assert {name: device.compute_capability for name, device in KNOWN.items()} == {
        "h200": (9, 0),
        "h100": (9, 0),
        "a100": (8, 0),
        "l40s": (8, 9),
        "rtx5090": (12, 0),
        "b200": (10, 0),
    }


def test_a_known_machine_is_not_here_and_reports_its_own_memory() -> None:
    device = find_device("RTX5090")
    assert not device.is_here
    assert device.kind is DeviceKind.CUDA
    memory = device_memory(device)
    assert memory.free_bytes == memory.total_bytes < 32 * 2**30


def test_the_devices_of_this_machine_are_here() -> None:
    assert find_device("cpu") == detect_device("cpu")
    assert find_device("cpu").is_here


def test_an_unknown_machine_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        find_device("h300")
    message = str(caught.value)
    assert "got 'h300'" in message
    assert all(name in message for name in ("auto", "cpu", "cuda", *KNOWN))


def test_no_engine_starts_on_a_machine_that_is_not_here() -> None:
    for name in KNOWN:
        with pytest.raises(ConfigError):
            detect_device(name)
