"""An engine on a card says who holds its memory, and tells if the process holds more than it may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sightline.core.config import EngineConfig
from sightline.core.device import Device, DeviceKind, DeviceMemory
from sightline.core.ledger import Ledger
from sightline.core.memory import MemoryTaken, share_out
from sightline.core.resolution import ModelFacts, resolve
from sightline.runner import memory as memory_module
from sightline.runner.memory import memory_ledger, tell_excess

GIB = 1 << 30
CARD = Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (9, 0))
CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
START = DeviceMemory(80 * GIB, 79 * GIB, 0)
FACTS = ModelFacts(max_positions=1000, weight_elements=500, quantised_bytes=0, cache_elements_per_token=10)
TAKEN = MemoryTaken(weights=10 * GIB, cache=7 * GIB, scratch=GIB, graphs=GIB // 2)


def configured(device: Device) -> Any:
    config = resolve(EngineConfig(cache_tokens=64), FACTS, CPU, Ledger())
    return replace(config, device=device, memory=share_out(device.kind, START, 0.5, 10 * GIB))


def hold(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    now = DeviceMemory(START.total_bytes, START.free_bytes - held, held)
    monkeypatch.setattr(memory_module, "device_memory", lambda device: now)


def test_what_is_taken_is_counted_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, 19 * GIB)
    ledger = memory_ledger(configured(CARD), TAKEN)
    assert ledger is not None
    assert (ledger.taken, ledger.other) == (TAKEN, GIB // 2)
    assert memory_ledger(configured(CPU), TAKEN) is None


def test_host_memory_has_a_line_and_is_not_counted_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, 19 * GIB)
    plain, ledger = (memory_ledger(configured(CARD), replace(TAKEN, host_cache=each)) for each in (0, 64 * GIB))
    assert plain is not None
    assert ledger is not None
    assert ledger.parts == plain.parts
    assert ledger.lines()[:-1] == plain.lines()
    assert ledger.lines()[-1].split()[-2:] == ["64.00", "GiB"]


@pytest.mark.parametrize(("held", "told"), [(40, []), (41, ["memory_fraction"])])
def test_more_than_the_share_of_the_card_is_told(monkeypatch: pytest.MonkeyPatch, held: int, told: list[str]) -> None:
    hold(monkeypatch, held * GIB)
    ledger = Ledger()
    tell_excess(configured(CARD), TAKEN, ledger)
    assert [entry.subject for entry in ledger.degradations] == told
