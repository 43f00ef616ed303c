"""A staging buffer is written again only when the copy that reads it is over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sightline.core.staging import NUM_BUFFERS, StagingRing
from support.slow_copies import SlowDevice

CPU = torch.device("cpu")


def test_numbers_arrive_by_one_copy() -> None:
    target = torch.full((5,), -1)
    ring = StagingRing.of(7, CPU)
    ring.copy([3, 1, 2], target[:3])
    assert target.tolist() == [3, 1, 2, -1, -1]
    ring.copy([], target[:0])
    ring.copy(list(range(5)), target)
    assert target.tolist() == [0, 1, 2, 3, 4]


def test_buffers_are_on_the_host_whatever_the_callers_default_device_is() -> None:
    target = torch.zeros(2, dtype=torch.int64)
    with torch.device("meta"):
        StagingRing.of(2, CPU).copy([3, 1], target)
    assert target.tolist() == [3, 1]


def test_copies_that_are_still_under_way_arrive_as_they_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice(monkeypatch)
    ring = StagingRing(2, CPU, device.event)
    targets = [torch.zeros(2, dtype=torch.int64) for _ in range(3 * NUM_BUFFERS)]
    for number, target in enumerate(targets):
        ring.copy([number, -number], target)
        assert device.num_under_way <= NUM_BUFFERS
    assert device.num_under_way == NUM_BUFFERS, "the host waits only for a buffer that it needs"
    device.finish()
    assert [target.tolist() for target in targets] == [[number, -number] for number in range(3 * NUM_BUFFERS)]


def test_the_slow_device_would_show_a_buffer_that_is_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice(monkeypatch)
    buffer, targets = torch.zeros(1, dtype=torch.int64), [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    for number, target in enumerate(targets):
        buffer.fill_(number)
        target.copy_(buffer, non_blocking=True)
    device.finish()
    assert [int(target) for target in targets] == [1, 1]


def test_more_numbers_than_a_buffer_holds_are_refused() -> None:
    target: Tensor = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected at most 2 numbers, got 3"):
        StagingRing.of(2, CPU).copy([1, 2, 3], target)
