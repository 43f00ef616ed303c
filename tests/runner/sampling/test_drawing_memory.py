"""Drawing tokens in the form for a GPU takes no more memory than is reserved for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sightline.core.memory import SAMPLED_LOGITS, drawing_bytes
from sightline.core.request import EffectiveParams
from sightline.runner.sampling import race
from sightline.runner.sampling.noise import noise_keys
from sightline.runner.sampling.race import race_arrays, run
from support.peak_memory import PeakMemory

PLAIN = EffectiveParams(1.0, 1.0, 0, 0.0, 5, 16, frozenset(), True)
CHANGES: dict[str, dict[str, Any]] = {
    "all": {},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 20},
    "every limit": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
}


def peak_bytes(num_rows: int, vocab_size: int, changes: list[dict[str, Any]]) -> int:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    drawn = [(row, replace(PLAIN, **changes[row % len(changes)])) for row in range(num_rows)]
    arrays = race_arrays(drawn, noise_keys([1] * num_rows, range(num_rows)), vocab_size)
    made = arrays.on_device(torch.from_numpy(arrays.integers), torch.from_numpy(arrays.numbers))
    peak = PeakMemory(logits)
    with peak:
        run(logits, made)
    return peak.num_bytes


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 50_000), (8, 20_000), (300, 64)])
def test_what_is_reserved_covers_every_kind_of_row(num_rows: int, vocab_size: int, changes: dict[str, Any]) -> None:
    taken = peak_bytes(num_rows, vocab_size, [changes])
    assert 0 < taken <= drawing_bytes(num_rows, vocab_size)
    # Not out of all proportion either: the rest of the memory is the cache's.
    assert vocab_size < 1000 or drawing_bytes(num_rows, vocab_size) < 2 * taken


def test_more_rows_than_are_drawn_at_once_take_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "_BLOCK_SIZE", 40_000)
    monkeypatch.setattr("sightline.core.memory.SAMPLED_LOGITS", 40_000)
    reserved = drawing_bytes(64, 10_000)
    assert reserved == drawing_bytes(4, 10_000) > drawing_bytes(3, 10_000)
    assert peak_bytes(64, 10_000, list(CHANGES.values())) <= reserved


def test_the_block_that_is_drawn_is_the_one_that_is_reserved() -> None:
    assert race._BLOCK_SIZE == SAMPLED_LOGITS
    assert drawing_bytes(1000, 128_256) == drawing_bytes(SAMPLED_LOGITS // 128_256, 128_256)


def test_the_peak_counts_what_is_held_at_once() -> None:
    given = torch.zeros(1000)
    peak = PeakMemory(given)
    with peak:
        first = given + 1.0
        second = first * 2.0
        del first
        third = second.add_(1.0).view(10, 100) + 0.0
    assert (peak.num_bytes, third.numel()) == (8000, 1000)
