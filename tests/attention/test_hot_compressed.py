"""Entries of several tokens in host memory: what queries read is what the oracle says, and no planted fault passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.backends.reference.compressed_backend import ReferenceCompressedBackend
from sightline.attention.backends.reference.compressed_index_backend import ReferenceCompressedIndexBackend
from sightline.attention.backends.torch.compressed_backend import TorchCompressedBackend
from sightline.attention.backends.torch.compressed_index_backend import TorchCompressedIndexBackend
from sightline.attention.kinds import SpecKind
from sightline.attention.sparse import hot_entries
from sightline.core.errors import ConfigError
from sightline.kernels.hot_entries import FetchEntries, HotBuffer, TurnRows, drop_entries, fetch_entries
from support.compressed_bench import TOP_K, Backends, CompressedBench, text_of
from support.hot_compressed import Rows, traffic
from support.hot_faults import FAULTS

TORCH: Backends = {
    SpecKind.COMPRESSED: TorchCompressedBackend,
    SpecKind.COMPRESSED_INDEX: TorchCompressedIndexBackend,
}
REFERENCE: Backends = {
    SpecKind.COMPRESSED: ReferenceCompressedBackend,
    SpecKind.COMPRESSED_INDEX: ReferenceCompressedIndexBackend,
}


def proof(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.prove)


@pytest.mark.parametrize(
    ("backends", "page_size", "buffer"),
    [
        (TORCH, 16, TOP_K),
        proof(TORCH, 16, 2 * TOP_K),
        proof(TORCH, 1, 3 * TOP_K + 1),
        proof(TORCH, 4, TOP_K),
        proof(TORCH, 64, 200),
        proof(REFERENCE, 16, TOP_K),
    ],
)
def test_queries_read_what_they_chose(backends: Backends, page_size: int, buffer: int) -> None:
    counts = traffic(CompressedBench(backends, page_size, buffer=buffer))
    if backends is TORCH:
        # The oracle reads the host itself.
        assert 0 < counts.copied < counts.chosen


def test_entries_in_host_memory_are_those_that_indexers_choose_from() -> None:
    bench = CompressedBench(TORCH, buffer=TOP_K)
    on_host = {group.name: bench.store.cache(group.name).is_on_host for group in bench.groups}
    assert on_host == {"group0": True, "group1": False, "group2": False, "index0": False}
    with pytest.raises(ConfigError, match=f"expected a buffer of at least {TOP_K} entries"):
        CompressedBench(TORCH, buffer=TOP_K - 1)


def triton() -> tuple[Backends, FetchEntries]:
    if torch.cuda.is_available():
        pytest.skip("a GPU has no interpreter")
    backend = pytest.importorskip("sightline.attention.backends.triton.compressed_backend")
    kernels = pytest.importorskip("sightline.kernels.triton.hot_entries")
    backends = {**TORCH, SpecKind.COMPRESSED: backend.TritonCompressedBackend}
    return backends, kernels.fetch_entries


@pytest.mark.prove
@pytest.mark.parametrize("buffer", [TOP_K, pytest.param(50, marks=pytest.mark.slow)])
def test_triton_kernels_read_what_was_chosen(buffer: int) -> None:
    """On a CPU, Triton's interpreter runs them."""
    backends, copy = triton()
    rows = Rows(CompressedBench(backends, 4, buffer=buffer, copy=copy))
    first, second = rows.open(text_of(60, 0)), rows.open(text_of(60, 1))
    rows.step({first: 19, second: 3}, padded=1)
    rows.step({first: 1, second: 1}, padded=1)
    rows.step({second: 2, first: 1})
    rows.guess({first: 5, second: 1}, {first: 1, second: 1})
    rows.step({first: 17, second: 2})
    rows.step({first: 1, second: 1})


@pytest.mark.prove
def test_tokens_of_a_turn_that_do_not_follow_each_other_are_merged_where_they_belong() -> None:
    """Two rows are fetched together, and another is between them. Many programs cut the work of every token."""
    backends, copy = triton()
    shares = import_module("sightline.kernels.triton.decode_shares")
    made = {"sizes": shares.DecodeConfig(16, 16, 12, 1, 1, False)}
    backends = {**backends, SpecKind.COMPRESSED: type("Cut", (backends[SpecKind.COMPRESSED],), made)}
    rows = Rows(CompressedBench(backends, 4, buffer=TOP_K, copy=copy))
    ends, between = [rows.open(text_of(16, seed)) for seed in (0, 2)], rows.open(text_of(16, 1))
    rows.step(dict.fromkeys((*ends, between), 13))
    rows.step({ends[0]: 2, between: 1, ends[1]: 2})


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
    patch.setattr(hot_entries._HotPlan, "keep", lambda self, layer: None)


def write_the_pool_alone(patch: pytest.MonkeyPatch) -> None:
    """New entries are where the step before has left others."""
    keep = hot_entries._HotPlan.keep

    def kept(self: Any, layer: int) -> None:
        keep(self, layer)
        self.on_device[self.new_slots] = 0.0

    patch.setattr(hot_entries._HotPlan, "keep", kept)


def count_tokens(patch: pytest.MonkeyPatch) -> None:
    """Lengths of contexts on the device are those of tokens."""
    patch.setattr(hot_entries._LaneMemory, "entries", lambda self, lens: lens)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "hot entry survives a change of owner": keep_of_other_owners,
    "entry of a refused guess stays hot": keep_behind_the_context,
    "new entry not written through": write_the_device_alone,
    "new entry not on the device": write_the_pool_alone,
    "context counted in tokens": count_tokens,
}


def changed(**changes: Callable[[HotBuffer], int]) -> Callable[[], FetchEntries]:
    """Fetches with other facts about a buffer."""

    def copy(buffer: HotBuffer, layer: int, turn: TurnRows, chosen: Tensor, slots: Tensor) -> None:
        wrong: dict[str, Any] = {name: change(buffer) for name, change in changes.items()}
        fetch_entries(replace(buffer, **wrong), layer, turn, chosen, slots)

    return lambda: copy


COPIES: dict[str, Callable[[], FetchEntries]] = {
    **{name: make for name, (make, _) in FAULTS.items() if name != "LRU age of another layer"},
    "entry's slot by token instead of by entry": changed(page_size=lambda buffer: buffer.page_size * buffer.apart),
    "new entry's slot by entry instead of by token": changed(apart=lambda _: 1),
}
"""Wrong ages change no output."""


@pytest.mark.prove
@pytest.mark.parametrize("name", [*MUTANTS, *COPIES])
def test_the_oracle_finds_a_planted_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in MUTANTS:
        MUTANTS[name](monkeypatch)
    copy = COPIES[name]() if name in COPIES else fetch_entries
    bench = CompressedBench(TORCH, buffer=2 * TOP_K, copy=copy)
    with pytest.raises(AssertionError):
        traffic(bench)
