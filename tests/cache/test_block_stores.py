"""A block's name says whose tokens it holds, and a layout says what is in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sightline.cache.blocks import BlockIdentity, hash_after, layout_of
from sightline.cache.copies import as_bytes, gather, host_memory, scatter
from sightline.cache.pools import CacheLimits
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec, StateSpec
from sightline.cache.store import CacheStore
from sightline.core.errors import ConfigError

ENTRIES = PoolSpec("kv", (PlaneSpec("k", (2, 3), torch.bfloat16), PlaneSpec("v", (5,), torch.float32)), num_layers=2)
STATES = StateSpec((PlaneSpec("state", (2, 2), torch.float32),), num_layers=3)
CPU = torch.device("cpu")


CODED = PlaneSpec("code", (3,), torch.float8_e4m3fn)


def make_store(
    *, page_size: int = 4, drafts: bool = True, states: bool = True, scales: tuple[float, ...] | None = None
) -> CacheStore:
    coded = PoolSpec("coded", (replace(CODED, scales=scales),), num_layers=2)
    specs = [GroupCacheSpec("full", (ENTRIES,) if scales is None else (ENTRIES, coded))]
    if states:
        specs.append(GroupCacheSpec("recurrent", (), STATES))
    drafting = [[GroupCacheSpec("draft0.full", (replace(ENTRIES, num_layers=1),))]] if drafts else []
    limits = CacheLimits(9, page_size, 2, 32, states_per_row=2, max_checkpoints=3)
    return CacheStore(specs, limits, CPU, drafting=drafting)


def test_a_layout_lists_every_plane_of_every_network_and_the_states_of_the_model() -> None:
    layout = layout_of(make_store())
    assert [(plane.source, plane.name, plane.shape) for plane in layout.entries] == [
        ("full.kv", "k", (4, 2, 3)),
        ("full.kv", "v", (4, 5)),
        ("draft0.full.kv", "k", (4, 2, 3)),
        ("draft0.full.kv", "v", (4, 5)),
    ]
    assert [(plane.source, plane.name, plane.shape) for plane in layout.states] == [("recurrent", "state", (2, 2))]
    # Pages of 4 tokens of 6 bfloat16 and 5 float32 numbers: in 2 layers, and in 1 of the drafter.
    assert layout.entry_bytes == 4 * (6 * 2 + 5 * 4) * 3
    assert layout.state_bytes == 3 * 4 * 4
    assert layout == layout_of(make_store())


@pytest.mark.parametrize("other", [{"page_size": 2}, {"drafts": False}, {"states": False}], ids=str)
def test_blocks_of_another_layout_are_refused(other: dict[str, Any]) -> None:
    layout, wrong = layout_of(make_store()), layout_of(make_store(**other))
    assert layout.digest != wrong.digest
    with pytest.raises(ConfigError, match="use the same model, dtypes and page size on both sides"):
        layout.require(wrong)
    layout.require(layout_of(make_store()))


def test_codes_with_other_scales_are_other_values() -> None:
    layouts = [layout_of(make_store(scales=scales)) for scales in ((1.0, 2.0), (1.0, 3.0))]
    assert layouts[0].digest != layouts[1].digest


def test_a_name_depends_on_model_adapter_tenant_layout_and_all_tokens_before() -> None:
    identity = BlockIdentity("model", "layout")
    beginnings = {
        identity.beginning(""),
        identity.beginning("tenant"),
        BlockIdentity("other", "layout").beginning(""),
        BlockIdentity("model", "other").beginning(""),
        BlockIdentity("model", "layout", "adapter").beginning(""),
        # Fields cannot run into each other.
        BlockIdentity("model", "layout", 'adapter", "tenant').beginning(""),
        BlockIdentity("model", "layout", "adapter").beginning("tenant"),
    }
    assert len(beginnings) == 7
    first = hash_after(identity.beginning(""), b"abcd")
    assert first == hash_after(identity.beginning(""), b"abcd")
    assert hash_after(first, b"efgh") != hash_after(hash_after(identity.beginning(""), b"abce"), b"efgh")


def test_pages_survive_the_way_out_and_back_bit_by_bit() -> None:
    store = make_store()
    pool = store.pools[0]
    planes = [as_bytes(pool.plane(plane.name), 9) for plane in pool.spec.planes]
    for plane in planes:
        plane.copy_(torch.randint(0, 256, plane.shape, dtype=torch.uint8))
    before = [plane.clone() for plane in planes]
    # Wider than the planes: what is behind them belongs to the next pool.
    rows = torch.full((3, layout_of(store).entry_bytes), 7, dtype=torch.uint8)
    behind = gather(planes, torch.tensor([5, 2, 8]), rows)
    assert behind.shape[1] == rows.shape[1] // 3
    assert bool((behind == 7).all())
    scatter(planes, torch.tensor([1, 3, 4]), rows)
    for plane, kept in zip(planes, before, strict=True):
        assert torch.equal(plane[:, [1, 3, 4]], kept[:, [5, 2, 8]])
        others = [0, 2, 5, 6, 7, 8]
        assert torch.equal(plane[:, others], kept[:, others])
    # As bytes: a number may be NaN, which equals nothing.
    values = pool.plane("v")[1].view(torch.uint8)
    assert torch.equal(values[5 * 4 : 6 * 4], values[1 * 4 : 2 * 4])


def test_host_memory_for_a_cpu_is_ordinary() -> None:
    memory = host_memory(10, CPU)
    assert (memory.shape, memory.dtype, memory.is_pinned()) == ((10,), torch.uint8, False)
