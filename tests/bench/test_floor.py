"""The floor counts every byte that a step must read, and none twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sightline.bench import floor as floor_module
from sightline.bench.engine.work import load_subject
from sightline.bench.floor import CacheReads, ExpertSize, Floor, Machine, ModelSize, measure_machine, model_size
from sightline.core.ledger import Ledger
from sightline.models.loading.opening import open_checkpoint
from support.gguf_files import tiny_llama, write_llama
from support.tiny_models import make_model
from support.tiny_sparse import TOP_K, make_sparse

MACHINE = Machine(read_bytes_per_second=10e9, operations_per_second=100e9)
SIZE = ModelSize(layers=8 * 10**7, vocabulary=2 * 10**7, num_bytes=4 * 10**8)


def test_a_step_takes_its_bytes_over_the_read_rate_or_its_operations_over_the_products() -> None:
    floor = Floor(MACHINE, SIZE, ())
    assert floor.decode([0]) == pytest.approx(0.04)
    assert floor.decode([0] * 64) == pytest.approx(0.128)
    assert floor.prefill(512) == pytest.approx(2 * 8 * 10**7 * 512 / 100e9)


def test_the_better_of_two_measurements_counts() -> None:
    assert MACHINE.best(Machine(5e9, 200e9)) == Machine(10e9, 200e9)


def test_a_machine_without_instructions_for_the_dtype_is_measured_by_a_small_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(floor_module, "_timed", lambda run: 0.5)
    slow = measure_machine(torch.bfloat16, torch.device("cpu"))
    assert slow.operations_per_second == 2 * 128**3 / 0.5


def test_every_rows_cache_is_read_up_to_the_window() -> None:
    floor = Floor(MACHINE, SIZE, (CacheReads(10**5, None), CacheReads(10**5, 100)))
    assert floor.decode([50]) == pytest.approx((4e8 + 2 * 50e5) / 10e9)
    assert floor.decode([300, 50]) == pytest.approx((4e8 + 300e5 + 100e5 + 2 * 50e5) / 10e9)


def test_experts_are_read_as_far_as_rows_use_them() -> None:
    """Of 16 experts a token uses 4, so that two tokens use 7 of them if they choose evenly."""
    experts = ExpertSize(weights=4 * 10**7, num_bytes=16 * 10**7, unused_share=0.75)
    size = ModelSize(layers=8 * 10**7, vocabulary=2 * 10**7, num_bytes=4 * 10**8, experts=(experts,))
    floor = Floor(MACHINE, size, ())
    assert floor.decode([0]) == pytest.approx((24e7 + 4e7) / 10e9)
    assert floor.decode([0, 0]) == pytest.approx((24e7 + 7e7) / 10e9)
    assert floor.prefill(512) == pytest.approx(2 * (4e7 + 1e7) * 512 / 100e9)


def test_the_states_of_a_row_are_read_and_written_whatever_its_context() -> None:
    floor = Floor(MACHINE, SIZE, (CacheReads(0, None, state_bytes=3 * 10**6),))
    assert floor.decode([50, 5000]) == pytest.approx((4e8 + 2 * 3e6) / 10e9)


def test_a_sparse_layer_reads_every_index_key_and_the_chosen_entries() -> None:
    floor = Floor(MACHINE, SIZE, (CacheReads(10**5, 100), CacheReads(10**4, None, unread=100)))
    assert floor.decode([100]) == pytest.approx((4e8 + 100e5) / 10e9)
    assert floor.decode([300, 50]) == pytest.approx((4e8 + 100e5 + 300e4 + 50e5) / 10e9)


def test_rows_grow_by_a_token_each_step() -> None:
    floor = Floor(MACHINE, SIZE, (CacheReads(10**5, None),))
    assert floor.decode_all([10, 20], 2) == pytest.approx(floor.decode([11, 21]) + floor.decode([12, 22]))


def test_kept_weights_count_as_they_are_stored(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", tiny_llama(), quantised="Q8_0")
    checkpoint = open_checkpoint(tmp_path / "model.gguf", Ledger())
    dense = model_size(checkpoint, torch.float32, "dequantise")
    kept = model_size(checkpoint, torch.float32, "keep")
    assert dense.num_bytes == 4 * dense.weights
    assert dense.weights == kept.weights
    assert 34 / 32 * kept.weights <= kept.num_bytes < 1.2 * kept.weights


def test_an_engines_cache_reads_are_those_of_its_layers(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    subject = load_subject({"model": str(tmp_path), "cache_tokens": 512, "dtype": "float32", "device": "cpu"})
    config = model.config
    per_layer = 2 * config.num_key_value_heads * config.head_dim * 4
    assert subject.floor.caches == (CacheReads(config.num_hidden_layers * per_layer, None),)
    assert subject.conditions.quantization == "dequantise"


def test_cache_reads_of_a_sparse_model_are_chosen_entries_and_index_keys(tmp_path: Path) -> None:
    make_sparse("glm_moe_dsa").save_pretrained(tmp_path)
    subject = load_subject({"model": str(tmp_path), "cache_tokens": 512, "dtype": "float32", "device": "cpu"})
    entries, keys = CacheReads(5 * (20 + 8) * 4, TOP_K), CacheReads(2 * 14 * 4, None, unread=TOP_K)
    assert subject.floor.caches == (entries, keys)
