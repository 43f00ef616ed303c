"""The cache of a sparse model is shared out between host and device, and nothing that either holds is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sightline.core import hot_memory
from sightline.core.config import PADDING_PAGES, EngineConfig
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import ConfigError
from sightline.core.hot_memory import CacheSizes, ChosenFacts, LongestRow, PageShape, size_cache
from sightline.core.ledger import Ledger
from sightline.core.memory import MemoryBudget

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
CARD = Device(DeviceKind.CUDA, torch.device("cuda"), "a card", (9, 0))
TOP_K, LAYERS, WIDTH, KEYS, PAGE = 64, 10, 100, 28, 8
CHOSEN = ChosenFacts(TOP_K, 1, LAYERS, LAYERS * WIDTH, WIDTH)
LONGEST = LongestRow(model_len=1000, step_tokens=100)
ROOM = 100_000_000
SHAPE = PageShape(PAGE, LAYERS * (WIDTH + KEYS), itemsize=2)
"""A page of 20,480 bytes, of which 16,000 are latents."""


def size(
    ledger: Ledger | None = None, *, device: Device = CARD, max_rows: int = 20, shape: PageShape = SHAPE, **changes: Any
) -> CacheSizes:
    config = EngineConfig(**{"enable_hisparse": True, **changes})
    room = MemoryBudget(room_bytes=ROOM, cache_bytes=ROOM)
    return size_cache(config, CHOSEN, shape, LONGEST, room, max_rows, device, ledger or Ledger(strict=True))


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How much host memory is free."""
    free = {"bytes": 1 << 40}
    monkeypatch.setattr(hot_memory, "available_bytes", lambda _: free["bytes"])
    return free


@pytest.mark.parametrize("ratio", [1, 1.5])
def test_the_cache_holds_so_many_times_what_the_device_alone_would_hold(ratio: float) -> None:
    # More pages than that are of use to so many rows.
    sizes = size(max_rows=100, hisparse_config={"host_to_device_ratio": ratio, "device_buffer_size": TOP_K})
    assert sizes == CacheSizes(PADDING_PAGES + int(ratio * (ROOM // 20_480)), 100, TOP_K)


def test_keys_and_hot_entries_fit_the_device_at_any_ratio() -> None:
    sizes = size(max_rows=10_000, hisparse_config={"host_to_device_ratio": 1024}, ledger=Ledger())
    hot = hot_memory.HotDemand(CHOSEN, sizes.hot_buffer, 2, *LONGEST).num_bytes(sizes.max_rows)
    assert hot <= ROOM // hot_memory.ROWS_SHARE
    keys = sizes.num_pages * (20_480 - 16_000)
    assert ROOM - 4_480 < hot + keys <= ROOM


def test_fewer_rows_run_if_hot_entries_would_take_more_than_half() -> None:
    ledger = Ledger()
    sizes = size(ledger, max_rows=10_000)
    assert 1 < sizes.max_rows < 10_000
    [told] = ledger.degradations
    assert (told.subject, f"to {sizes.max_rows}" in told.outcome) == ("max_num_seqs", True)
    demand = hot_memory.HotDemand(CHOSEN, sizes.hot_buffer, 2, *LONGEST)
    assert demand.num_bytes(sizes.max_rows) <= ROOM // 2 < demand.num_bytes(sizes.max_rows + 1)
    with pytest.raises(ConfigError, match="hot entries of 10000 rows"):
        size(max_rows=10_000, max_num_seqs=10_000)


def test_entries_take_half_of_the_host_memory_that_is_free(host: dict[str, int]) -> None:
    host["bytes"], ledger = 2 * 100 * 16_000, Ledger()
    assert size(ledger).num_pages == 100
    [told] = ledger.degradations
    assert told.subject == "host_to_device_ratio"
    with pytest.raises(ConfigError, match="expected entries that fit 1 / 2 of the free host memory"):
        size(cache_tokens=100 * PAGE)
    assert size(cache_tokens=99 * PAGE).num_pages == 100
    host["bytes"] = 16_000
    with pytest.raises(ConfigError, match="expected free host memory for entries"):
        size()


def test_the_scales_of_keys_count() -> None:
    eight_bits = SHAPE._replace(itemsize=1)
    with_scales = eight_bits._replace(scale_bytes=LAYERS * 4)
    assert with_scales.split(CHOSEN.elements_per_page(PAGE)).device_bytes == PAGE * LAYERS * (KEYS + 4)
    few, many = (size(max_rows=300, shape=each).num_pages for each in (with_scales, eight_bits))
    assert few < many


@pytest.mark.parametrize(("device", "changes"), [(CPU, {}), (CARD, {"cache_tokens": 800})])
def test_a_ratio_that_decides_nothing_is_noted(device: Device, changes: dict[str, Any]) -> None:
    ledger = Ledger(strict=True)
    size(ledger, device=device, hisparse_config={"host_to_device_ratio": 4}, **changes)
    assert [note.subject for note in ledger.notes] == ["host_to_device_ratio"]
    ledger = Ledger(strict=True)
    size(ledger, device=device, **changes)
    assert not ledger.notes
