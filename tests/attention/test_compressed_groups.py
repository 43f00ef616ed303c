"""Specs of compressed attention, and the groups, caches and facts that follow from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sightline.attention.backends.torch.compressed_backend import TorchCompressedBackend
from sightline.attention.backends.torch.compressed_index_backend import TorchCompressedIndexBackend
from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec, Compression
from sightline.attention.groups import group_layers
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.spec import IndexSpec, SoftmaxSpec
from sightline.core.hot_memory import ChosenFacts
from sightline.core.page_shape import CompressedEntries
from sightline.runner.quantised import _cache_facts, chosen_facts
from support.compressed_bench import CHOSEN, INDEX, INDEXERS, SPECS, WHOLE, Backends, CompressedBench, TextPart, text_of

FOUR = Compression(4, overlap=True, rope_dim=64, norm_eps=1e-6)
MANY = Compression(128, overlap=False, rope_dim=64, norm_eps=1e-6)
FLASH = CompressedSpec(64, 512, 512**-0.5, 128, FOUR, 512)


def test_layers_of_a_model_are_in_groups_by_spec_and_indexers_in_groups_of_their_own() -> None:
    groups = group_layers(SPECS, indexers=INDEXERS)
    assert [(group.name, group.layers) for group in groups] == [
        ("group0", (0, 2)),
        ("group1", (1,)),
        ("group2", (3,)),
        ("index0", (0, 2)),
    ]
    assert [group.chooses for group in groups] == [False, False, False, True]
    assert [group.reads_choice for group in groups] == [True, False, False, False]
    assert all(group.is_recurrent for group in groups)
    assert [group.may_be_on_host for group in groups] == [True, False, False, False]
    assert {group.cache_dtype(torch.bfloat16) for group in groups} == {torch.bfloat16}


def test_a_layer_keeps_entries_in_pages_and_a_window_with_sums_per_sequence() -> None:
    group, _ = group_layers([FLASH], indexers={0: CompressedIndexSpec(64, 128, 512, FOUR)})
    cache = group.cache_spec(torch.bfloat16, with_hot_entries=True)
    [pool] = cache.pools
    assert (pool.tokens_per_entry, pool.entry_bytes, cache.on_host) == (4, 512 * 2, True)
    planes = {plane.name: (plane.shape, plane.dtype) for plane in cache.states.planes}
    assert planes == {"window": ((128, 512), torch.bfloat16), "sums": ((3, 3, 512), torch.float32)}
    without = replace(FLASH, compression=None, top_k=None)
    assert without.pools(1, torch.float32) == ()
    assert [plane.name for plane in without.states(1, torch.float32).planes] == ["window"]
    assert replace(FLASH, compression=MANY, top_k=None).states(1, torch.float16).planes[1].shape == (1, 3, 512)


def test_facts_about_memory_tell_entries_and_both_parts_of_states() -> None:
    groups = group_layers(SPECS, indexers=INDEXERS)
    facts = _cache_facts(groups)
    assert facts["cache_elements_per_token"] == 0
    assert facts["compressed"] == (
        CompressedEntries(4, 2 * 16),
        CompressedEntries(16, 16),
        CompressedEntries(4, 2 * 8),
    )
    chosen = ChosenFacts(3, 1, 2, 2 * 16, 16, tokens_per_entry=4)
    assert sum([chosen_facts(group) for group in groups if group.may_be_on_host], ChosenFacts()) == chosen
    assert (chosen.elements_per_page(16), chosen.elements_per_page(1)) == (4 * 2 * 16, 2 * 16)
    assert facts["state_elements"] == 4 * 10 * 16
    assert facts["state_bytes"] == 4 * (2 * 9 * 16 + 3 * 16 + 2 * 9 * 8)


@pytest.mark.parametrize(
    ("indexer", "told"),
    [
        (None, "got none"),
        (replace(INDEX, top_k=4), "got one that chooses 4 entries of 4 tokens"),
        (IndexSpec(4, 8, 3), "got one that chooses 3 tokens"),
    ],
)
def test_a_choice_must_be_of_entries_as_the_layer_has_them(indexer: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"chooses 3 entries of 4 tokens for layer 0, in it or before it, {told}"):
        group_layers([CHOSEN], indexers={} if indexer is None else {0: indexer})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"window": 0}, "expected a window of at least 1"),
        ({"top_k": 0}, "expected a choice of at least 1 among entries"),
        ({"compression": None}, "expected a choice of at least 1 among entries"),
        ({"head_dim": 32}, "expected at most 32 rotated channels"),
    ],
)
def test_specs_that_make_no_sense_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(FLASH, **change)


def test_compressions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens per entry"):
        replace(FOUR, ratio=1)
    with pytest.raises(ValueError, match="an even number of rotated channels"):
        replace(FOUR, rope_dim=3)
    with pytest.raises(ValueError, match="at least 1 chosen entry"):
        CompressedIndexSpec(4, 128, 0, FOUR)
    with pytest.raises(ValueError, match="at most 32 rotated channels"):
        CompressedIndexSpec(4, 32, 8, FOUR)


def test_specs_say_what_they_are_and_cost() -> None:
    assert FLASH.label == "window 128 attention with 512 chosen entries of 4 tokens"
    assert replace(FLASH, compression=None, top_k=None).label == "window 128 attention with one key head"
    assert CompressedIndexSpec(64, 128, 512, FOUR).label == "choice of 512 entries of 4 tokens"
    assert FLASH.features == {Feature.WINDOW, Feature.SPARSE}
    pair = 2 * 64 * 512
    assert FLASH.step_costs() == (pair * (128 + 512), 0)
    assert replace(FLASH, compression=MANY, top_k=None).step_costs() == (pair * 128, pair / 128)
    assert CompressedIndexSpec(64, 128, 512, FOUR).step_costs() == (0, 64 * 129 / 4)
    assert SoftmaxSpec(2, 2, 16, 1.0).tokens_per_entry == 1
    assert WHOLE.tokens_per_entry == 16


def test_a_step_is_sparse_only_if_some_query_may_see_more_entries_than_are_chosen() -> None:
    backends: Backends = {
        SpecKind.COMPRESSED: TorchCompressedBackend,
        SpecKind.COMPRESSED_INDEX: TorchCompressedIndexBackend,
    }
    text = text_of(70, 0)
    for stop, is_sparse in ((15, False), (16, True)):
        bench = CompressedBench(backends)
        found = bench.run([TextPart(bench.open_row(70), text, 0, stop)])
        assert [chosen is not None for chosen in found.chosen.values()] == [is_sparse, is_sparse]
