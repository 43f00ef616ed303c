"""The memory of a card is shared out once, and what is taken adds up to what the driver reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.core.config import EngineConfig, LayerKernels
from sightline.core.device import Device, DeviceKind, DeviceMemory
from sightline.core.memory import LEAST_RESERVE, MemoryBudget, MemoryTaken, OutputMemory, account, share_out
from sightline.core.resolution import OUTPUT_COPIES, ModelFacts, _output_memory

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
    outputs = OutputMemory(steps=2 * GIB, graphs=GIB)
    without, with_outputs = (share_out(DeviceKind.CUDA, start, 1.0, 0, each) for each in (OutputMemory(), outputs))
    assert with_outputs.reserve_bytes == without.reserve_bytes + 3 * GIB
    assert (with_outputs.output_bytes, with_outputs.graph_bytes) == (2 * GIB, GIB)
    assert with_outputs.cache_bytes < without.cache_bytes
    assert share_out(DeviceKind.CPU, start, 1.0, 0, outputs).reserve_bytes == 0


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
    taken = MemoryTaken(weights=20 * GIB, cache=8 * GIB, scratch=2 * GIB, graphs=GIB // 4)
    ledger = account(budget(start), now, taken)
    assert (ledger.kernels, ledger.other) == (taken_without, GIB - GIB // 4)
    assert sum(part.held for part in ledger.parts.values()) == ledger.total == now.total_bytes - now.free_bytes
    assert ledger.held == start.held_bytes + taken_by_torch + taken_without


def test_the_table_has_what_was_reserved_beside_what_is_held() -> None:
    reserved = share_out(DeviceKind.CUDA, EMPTY, 0.75, 20 * GIB, OutputMemory(steps=3 * GIB, graphs=GIB))
    now = replace(EMPTY, free_bytes=EMPTY.free_bytes - 33 * GIB, held_bytes=32 * GIB)
    taken = MemoryTaken(weights=19 * GIB, cache=8 * GIB, scratch=2 * GIB, graphs=GIB // 2)
    heading, *lines = account(reserved, now, taken).lines()
    assert heading.split() == ["memory:", "reserved", "held"]
    table = {line.removeprefix("memory: ")[:28].strip(): line[len("memory: ") + 28 :].split() for line in lines}
    held_and_reserved = {
        "weights": ["20.00", "GiB", "19.00", "GiB"],
        "CUDA graphs": ["1.00", "GiB", "0.50", "GiB"],
        "logits, drawing, in steps": ["3.00", "GiB", "0.00", "GiB"],
        "kernels, libraries": [f"{reserved.kernel_bytes / GIB:.2f}", "GiB", "1.00", "GiB"],
        "other": ["2.50", "GiB"],
        "before the start": ["1.00", "GiB"],
        "used, by the driver": ["34.00", "GiB"],
        "held by the process": ["60.00", "GiB", "33.00", "GiB"],
    }
    assert {name: table[name] for name in held_and_reserved} == held_and_reserved
    assert list(table) == ["weights", "cache", "scratch", *list(held_and_reserved)[1:]]


def test_the_logits_of_all_replicas_are_kept_room_for() -> None:
    facts = ModelFacts(1000, 500, 0, 10, vocab_size=1 << 17)
    device = Device(DeviceKind.CUDA, torch.device("cpu"), "a card", (9, 0))
    one, two = (
        _output_memory(EngineConfig(data_parallel_size=count), LayerKernels.TORCH, facts, device, 64)
        for count in (1, 2)
    )
    assert two.steps >= one.steps + OUTPUT_COPIES * 64 * 4 * facts.vocab_size
    assert two.graphs == one.graphs, "captured steps are those of one replica"
