"""Faults of a coordinator that keeps hot entries, by name: each changes an output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.sparse import hot_entries
from sightline.cache.layout import walk_slots
from sightline.kernels.hot_entries import drop_entries
from support.hot_benches import MAX_LEN, OURS, PAGE, TOP_K, HotBench, hot

Patch = Callable[[pytest.MonkeyPatch], None]


def rollout(bench: HotBench) -> list[list[Tensor]]:
    """Steps of guesses behind one another, then other tokens in their place, and a row that another sequence takes
    over, with a prefix that is cached."""
    first, second = bench.open(), bench.open()
    found = [bench.step({first: 30, second: 20}, 0)]
    for number in range(3):
        length = bench.lens[first]
        # Each step reads what the one before it wrote, and both are refused.
        found += [bench.step({first: 1, second: 1}, 40 * number + 10 + at, is_kept=False) for at in range(0, 30, 3)]
        bench.lens.update({first: length, second: bench.lens[second] - 10})
        for row in (first, second):
            bench.store.lengths.settle(row, bench.lens[row])
        found += [bench.step({first: 1, second: 1}, 500 + 40 * number + at) for at in range(0, 30, 3)]
    bench.store.close_row(first)
    again = bench.store.open_row()
    assert again == first
    bench.store.adopt(again, [bench.store.committed_bundle(second, index) for index in range(5)])
    bench.store.grow_row(again, MAX_LEN)
    bench.lens[again] = 5 * PAGE
    return [*found, *[bench.step({again: 1, second: 1}, 910 + 10 * at) for at in range(4)]]


def keep_of_other_owners(patch: pytest.MonkeyPatch) -> None:
    def drop(held: Tensor, owners: Tensor, rows: Tensor, stamps: Tensor, contexts: Tensor) -> None:
        owners.index_copy_(0, rows, stamps)
        drop_entries(held, owners, rows, stamps, contexts)

    patch.setattr(hot_entries, "drop_entries", drop)


def keep_behind_the_context(patch: pytest.MonkeyPatch) -> None:
    def drop(held: Tensor, owners: Tensor, rows: Tensor, stamps: Tensor, contexts: Tensor) -> None:
        drop_entries(held, owners, rows, stamps, torch.full_like(contexts, 10**6))

    patch.setattr(hot_entries, "drop_entries", drop)


def write_the_device_alone(patch: pytest.MonkeyPatch) -> None:
    def write(self: Any, layer: int, new: Tensor) -> None:
        if self.turns:
            self.entries[layer].write(self.memory.step_slots[: new.shape[0]], new)
        else:
            self.host[layer].write(self.write_slots, new)

    patch.setattr(hot_entries._HotPlan, "write", write)


def write_the_host_alone(patch: pytest.MonkeyPatch) -> None:
    def write(self: Any, layer: int, new: Tensor) -> None:
        self.host[layer].write(self.write_slots, new)

    patch.setattr(hot_entries._HotPlan, "write", write)


MUTANTS: dict[str, Patch] = {
    "hot entry survives a change of owner": keep_of_other_owners,
    "refused guess stays hot": keep_behind_the_context,
    "new token not written through": write_the_device_alone,
    "new token not written to the device": write_the_host_alone,
}


def is_right(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    return all(
        torch.allclose(tensor, wanted, atol=1e-5)
        for step, right in zip(found, expected, strict=True)
        for tensor, wanted in zip(step[-2:], right[-2:], strict=True)
    )


@pytest.fixture(scope="module")
def expected() -> list[list[Tensor]]:
    return rollout(HotBench(OURS))


@pytest.mark.parametrize("buffer", [TOP_K, 40])
def test_without_a_fault_outputs_are_right(buffer: int, expected: list[list[Tensor]]) -> None:
    assert is_right(rollout(HotBench(OURS, hot(buffer))), expected)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_changes_an_output(name: str, expected: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert not is_right(rollout(HotBench(OURS, hot(40))), expected)


def test_attention_reads_the_buffer_and_not_the_host() -> None:
    """The buffer has room for all entries. Once all of them are hot, nothing more is read from the host."""
    found = []
    for is_spoiled in (False, True):
        bench = HotBench(OURS, hot(2 * MAX_LEN))
        row = bench.open()
        bench.step({row: TOP_K - 2}, 0)
        bench.step({row: 1}, 10)
        [coordinator] = [each for each in bench.coordinators if each.cache.is_on_host]
        copied = coordinator.counts().copied
        if is_spoiled:
            # All but the last token's entry were chosen, so they are hot.
            plane = coordinator.cache.pools["latent"].plane("entry")
            slots = walk_slots(coordinator.cache.pools["latent"], row, TOP_K - 2)
            plane[:, slots] = torch.nan
        found.append(bench.step({row: 1}, 20))
        assert coordinator.counts().copied == copied + 2, "the entry of the last step, in two layers"
    assert is_right([found[1]], [found[0]])
    assert not found[1][-1].isnan().any()
