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
    ring.copy([[3, 1, 2]], target[:3])
    assert target.tolist() == [3, 1, 2, -1, -1]
    ring.copy([[]], target[:0])
    ring.copy([range(5)], target)
    assert target.tolist() == [0, 1, 2, 3, 4]


def test_buffers_are_on_the_host_whatever_the_callers_default_device_is() -> None:
    target = torch.zeros(2, dtype=torch.int64)
    with torch.device("meta"):
        StagingRing.of(2, CPU).copy([[3, 1]], target)
    assert target.tolist() == [3, 1]


def test_copies_that_are_still_under_way_arrive_as_they_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice(monkeypatch)
    ring = StagingRing(2, CPU, device.event)
    targets = [torch.zeros(2, dtype=torch.int64) for _ in range(3 * NUM_BUFFERS)]
    for number, target in enumerate(targets):
        ring.copy([[number], [-number]], target)
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
    with pytest.raises(ValueError, match=r"equal shares of at most 2 numbers, got \[3\] for 3"):
        StagingRing.of(2, CPU).copy([[1, 2, 3]], target)


@pytest.mark.parametrize("columns", [[[1, 2], [3]], [[1], [2], [3], [4]]], ids=["too long", "no equal shares"])
def test_columns_that_do_not_share_the_target_equally_are_refused(columns: list[list[int]]) -> None:
    target = torch.full((2 if len(columns) == 2 else 5,), 7)
    with pytest.raises(ValueError, match=f"expected {len(columns)} columns of equal shares"):
        StagingRing.of(9, CPU).copy(columns, target)
    assert set(target.tolist()) == {7}


def test_a_shorter_column_is_followed_by_zeros_and_not_by_what_the_buffer_held() -> None:
    target = torch.zeros(6, dtype=torch.int64)
    ring = StagingRing.of(6, CPU)
    for _ in range(NUM_BUFFERS):
        ring.copy([[9, 9, 9], [9, 9, 9]], target)
    ring.copy([[1], [2, 3]], target)
    assert target.tolist() == [1, 0, 0, 2, 3, 0]
