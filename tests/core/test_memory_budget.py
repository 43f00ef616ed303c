"""The memory of a card is shared out once, and what is taken adds up to what the driver reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sightline.core.device import DeviceKind, DeviceMemory
from sightline.core.memory import LEAST_RESERVE, MemoryBudget, account, share_out

GIB = 1 << 30
EMPTY = DeviceMemory(total_bytes=80 * GIB, free_bytes=79 * GIB, held_bytes=0)
BUSY = DeviceMemory(total_bytes=80 * GIB, free_bytes=50 * GIB, held_bytes=9 * GIB)


def budget(start: DeviceMemory = EMPTY) -> MemoryBudget:
    return share_out(DeviceKind.CUDA, start, fraction=0.75, weight_bytes=20 * GIB)


def test_the_parts_of_a_card_are_what_may_be_held() -> None:
    shared = budget()
    parts = shared.weight_bytes + shared.reserve_bytes + shared.scratch_bytes + shared.cache_bytes
    assert parts == shared.allowed_bytes == 60 * GIB
    assert shared.room_bytes == shared.cache_bytes


def test_what_the_process_holds_already_counts_against_its_share() -> None:
    assert budget(replace(EMPTY, held_bytes=8 * GIB)).room_bytes == budget().room_bytes - 7 * GIB


def test_a_small_card_keeps_a_reserve_too() -> None:
    small = share_out(DeviceKind.CUDA, DeviceMemory(8 * GIB, 8 * GIB, 0), 1.0, 0)
    assert small.reserve_bytes == LEAST_RESERVE


def test_logits_are_reserved_beside_the_rest_on_a_card_only() -> None:
    start = DeviceMemory(80 * GIB, 80 * GIB, 0)
    without, with_outputs = (share_out(DeviceKind.CUDA, start, 1.0, 0, each) for each in (0, 2 * GIB))
    assert with_outputs.reserve_bytes == without.reserve_bytes + 2 * GIB
    assert with_outputs.cache_bytes < without.cache_bytes
    assert share_out(DeviceKind.CPU, start, 1.0, 0, 2 * GIB).reserve_bytes == 0


def test_a_cpu_has_no_reserve_and_its_cache_takes_a_share_of_the_rest() -> None:
    shared = share_out(DeviceKind.CPU, DeviceMemory(10 * GIB, 10 * GIB, 0), 0.5, 2 * GIB)
    assert (shared.reserve_bytes, shared.scratch_bytes, shared.room_bytes) == (0, GIB, 7 * GIB)
    assert shared.cache_bytes == 7 * GIB // 2


@pytest.mark.parametrize("start", [EMPTY, BUSY], ids=["empty", "busy"])
def test_everything_adds_up_to_what_the_driver_reports(start: DeviceMemory) -> None:
    taken_by_torch, taken_without = 31 * GIB, GIB // 2
    now = DeviceMemory(
        start.total_bytes, start.free_bytes - taken_by_torch - taken_without, start.held_bytes + taken_by_torch
    )
    ledger = account(budget(start), now, cache_bytes=8 * GIB, scratch_bytes=2 * GIB)
    assert (ledger.weights, ledger.cache, ledger.scratch) == (20 * GIB, 8 * GIB, 2 * GIB)
    assert (ledger.kernels, ledger.other) == (taken_without, GIB)
    parts = ledger.weights + ledger.cache + ledger.scratch + ledger.kernels + ledger.other + ledger.before
    assert parts == ledger.total == now.total_bytes - now.free_bytes
    assert ledger.held == start.held_bytes + taken_by_torch + taken_without
    table = "\n".join(ledger.lines())
    assert all(f"{number} GiB" in table for number in ("20.00", "8.00", "2.00", "0.50", "1.00", "60.00"))
