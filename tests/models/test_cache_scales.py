"""Scales of an 8-bit cache are found under every published name, applied, and made up or left only with a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError, ConfigError
from sightline.core.ledger import Ledger
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime
from support.case_marks import proofs
from support.tiny_models import make_model, random_prompts, relative_error, stepped_logits

LAYERS = {"llama": 3, "deepseek_v3": 3}
PREFIX = "model.layers.{}.self_attn."
NAMES = {
    "plain": ("k_scale", "v_scale"),
    "of the attention": ("attn.k_scale", "attn.v_scale"),
    "of the projections": ("k_proj.k_scale", "v_proj.v_scale"),
    "of one projection": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "of the projections' outputs": ("k_proj.output_scale", "v_proj.output_scale"),
}


def scaled_folder(folder: Path, scales: Mapping[str, Tensor], family: str = "llama") -> Path:
    """A tiny model with more tensors in its file."""
    make_model(family).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    return folder


def per_layer(*names: str, layers: int = 3) -> dict[str, Tensor]:
    """Different everywhere; the first name's scales are 0.25, 0.5, 0.75, the second's 1.25, 1.5, 1.75."""
    return {
        PREFIX.format(layer) + name: torch.tensor(0.25 * (layer + 1) + index)
        for layer in range(layers)
        for index, name in enumerate(names)
    }


def built(folder: Path, *, strict: bool = False, **settings: object) -> tuple[Runtime, list[str]]:
    ledger = Ledger(strict=strict)
    config = EngineConfig(cache_tokens=256, page_size=8, **settings)  # type: ignore[arg-type]
    runtime = build_runtime(config, open_checkpoint(folder, ledger), ledger)
    return runtime, [str(entry) for entry in ledger if entry.subject != "max_model_len"]


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES.keys())
def test_scales_are_taken_from_the_checkpoint_layer_by_layer(tmp_path: Path, names: tuple[str, str]) -> None:
    runtime, told = built(scaled_folder(tmp_path, per_layer(*names)), kv_cache_dtype="fp8", strict=True)
    [pool] = runtime.store.pools
    assert pool.scales("k") == (0.25, 0.5, 0.75)
    assert pool.scales("v") == (1.25, 1.5, 1.75)
    assert told == []


def test_one_scale_for_both_holds_for_both(tmp_path: Path) -> None:
    scales = {name: scale.view(1) for name, scale in per_layer("kv_scale").items()}
    runtime, told = built(scaled_folder(tmp_path, scales), kv_cache_dtype="fp8")
    [pool] = runtime.store.pools
    assert pool.scales("k") == pool.scales("v") == (0.25, 0.5, 0.75)
    assert told == []


@pytest.mark.parametrize("names", [("kv_scale",), ("k_scale", "v_scale"), ("mla_attn.mla_attn.k_scale",)], ids=str)
def test_latent_entries_have_the_scale_of_both_or_of_keys(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = scaled_folder(tmp_path, per_layer(*names), "deepseek_v3")
    runtime, told = built(folder, kv_cache_dtype="fp8", enforce_eager=True)
    assert [pool.scales("entry") for pool in runtime.store.pools] == [(0.25, 0.5, 0.75)]
    assert told == []


def test_a_checkpoint_without_scales_has_scales_of_1_and_the_ledger_says_so_once(tmp_path: Path) -> None:
    folder = scaled_folder(tmp_path, {})
    runtime, told = built(folder, kv_cache_dtype="fp8")
    [pool] = runtime.store.pools
    assert pool.scales("k") == pool.scales("v") == (1.0, 1.0, 1.0)
    [line] = told
    assert line.startswith("cache scales: 6 of 6 are taken as 1, that of the k of layer 0 among them")
    with pytest.raises(ConfigError, match="refused under --strict: cache scales"):
        built(folder, kv_cache_dtype="fp8", strict=True)


def test_scales_that_only_some_layers_have_are_used_and_the_others_told(tmp_path: Path) -> None:
    scales = {name: scale for name, scale in per_layer("k_scale", "v_scale").items() if ".1." not in name}
    runtime, told = built(scaled_folder(tmp_path, scales), kv_cache_dtype="fp8")
    [pool] = runtime.store.pools
    assert pool.scales("k") == (0.25, 1.0, 0.75)
    [line] = told
    assert line.startswith("cache scales: 2 of 6 are taken as 1, that of the k of layer 1 among them")


def test_scales_of_a_cache_that_needs_none_are_no_unknown_tensors_and_are_told(tmp_path: Path) -> None:
    folder = scaled_folder(tmp_path, per_layer("k_scale", "v_scale", "q_scale", "prob_scale"))
    runtime, told = built(folder, strict=True)
    [pool] = runtime.store.pools
    assert pool.scales("k") == (1.0, 1.0, 1.0)
    [line] = told
    assert line.startswith("cache scales: 12 tensors such as model.layers.0.self_attn.k_scale are not loaded")


def test_scales_of_queries_are_left_and_told_beside_those_of_the_cache(tmp_path: Path) -> None:
    folder = scaled_folder(tmp_path, per_layer("k_scale", "v_scale", "q_proj.output_scale"))
    runtime, told = built(folder, kv_cache_dtype="fp8")
    assert runtime.store.pools[0].scales("k") == (0.25, 0.5, 0.75)
    [line] = told
    assert line.startswith("8-bit attention: 3 tensors such as model.layers.0.self_attn.q_proj.output_scale")


REFUSED = {
    "a number a head": ({PREFIX.format(0) + "k_scale": torch.ones(2)}, "to be one number, got shape"),
    "zero": ({PREFIX.format(0) + "k_scale": torch.tensor(0.0)}, "to be a number above 0, got 0.0"),
    "not a number": ({PREFIX.format(0) + "k_scale": torch.tensor(torch.nan)}, "to be a number above 0, got nan"),
    "two of them": (
        {PREFIX.format(0) + "k_scale": torch.tensor(1.0), PREFIX.format(0) + "attn.k_scale": torch.tensor(2.0)},
        "expected one k scale of layer 0, got another",
    ),
    "another tensor": ({PREFIX.format(0) + "k_scales": torch.tensor(1.0)}, "expected no tensor beyond the model's own"),
}


@pytest.mark.parametrize(("scales", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_scale_is_refused(tmp_path: Path, scales: Mapping[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        built(scaled_folder(tmp_path, scales), kv_cache_dtype="fp8")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", *proofs("bfloat16")])
def test_logits_of_a_model_are_near_those_of_a_wide_cache(tmp_path: Path, family: str, dtype: str) -> None:
    folder = scaled_folder(tmp_path, {}, family)
    sequences = random_prompts([30, 17, 22])
    wide, narrow = (
        stepped_logits(built(folder, dtype=dtype, kv_cache_dtype=cache)[0], sequences, [20, 9, 22], chunk=7)
        for cache in ("auto", "fp8")
    )
    away, spread = (torch.cat(narrow) - torch.cat(wide)).abs().mean(), torch.cat(wide).std()
    assert 1e-4 * spread < away < 0.2 * spread, (away, spread)


def test_how_a_prompt_is_cut_into_chunks_changes_nothing_but_rounding(tmp_path: Path) -> None:
    folder = scaled_folder(tmp_path, per_layer("k_scale", "v_scale"))
    sequences = random_prompts([40])
    whole, cut = (
        stepped_logits(built(folder, kv_cache_dtype="fp8")[0], sequences, [40], chunk=chunk)[0] for chunk in (40, 3)
    )
    # One token reads what another wrote, in 8 bits, in the same step or in an earlier one.
    assert relative_error(cut, whole) < 1e-3
