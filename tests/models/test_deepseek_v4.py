"""DeepSeek V4 gives the logits of transformers, however a text is cut into steps and pages, and every part of it is
seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from sightline.attention.kinds import SpecKind
from sightline.core import resolution
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.models.loading.opening import open_checkpoint
from sightline.models.random_weights import RandomCheckpoint
from sightline.runner.batching import assemble, assemble_transient
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime
from support.attention_cases import CPU
from support.case_marks import routine
from support.changed_runtimes import compute_with, error_of
from support.deepseek_v4_changes import FEATURES, MISTAKES, Plant
from support.deepseek_v4_files import save_original
from support.features import Change
from support.hybrid_checks import assert_greedy_answers
from support.tiny_deepseek_v4 import V4, make_v4
from support.tiny_models import Models, load_runtime, random_prompts, reference_logits, relative_error, stepped_logits
from support.tiny_sparse import clear_prompts

TOLERANCE = 2e-4
"""Of the logits' scale."""
VISIBLE = 50 * TOLERANCE
PROMPT_LENS = (5, 70, 1, 131, 16, 32)
"""Below, at and far above what windows and entries hold."""
ONE_SHOT = 1 << 10
NAMED = ("the output is not rotated back", "the experts of the token before", "streams are mixed the other way")
"""The mistakes of every run."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Each model and the folder that it is saved in."""
    made = {}
    for family in V4:
        folder, model = tmp_path_factory.mktemp(family), make_v4(family)
        model.save_pretrained(folder)
        made[family] = (model, folder)
    return made


def load(folder: Path, **changes: Any) -> Runtime:
    settings = {"page_size": 16, "dtype": "float32", "cache_tokens": 2048, "max_num_seqs": 8, **changes}
    return load_runtime(folder, EngineConfig(**settings))


def assert_same_logits(
    runtime: Runtime, model: PreTrainedModel, steps: int, lengths: tuple[int, ...], chunk: int
) -> None:
    sequences = clear_prompts(model, [length + steps for length in lengths])
    found = stepped_logits(runtime, sequences, lengths, chunk)
    for sequence, prompt_len, got in zip(sequences, lengths, found, strict=True):
        expected = reference_logits(model, sequence)[prompt_len - 1 :]
        assert got.shape == (steps + 1, expected.shape[1])
        assert relative_error(got, expected) <= TOLERANCE
    assert runtime.planner.num_rebuilt == 0
    assert runtime.store.num_free_pages == runtime.store.num_usable_pages


@pytest.mark.parametrize(("chunk", "page_size"), [(7, 16), (64, 1)])
def test_ragged_rows_equal_a_full_forward(saved: Models, chunk: int, page_size: int) -> None:
    model, folder = saved["deepseek_v4"]
    assert_same_logits(load(folder, page_size=page_size), model, 9, (1, 16, 37), chunk)


@pytest.mark.prove
@pytest.mark.parametrize(("chunk", "page_size"), [(3, 1), (7, 64), (64, 16), (ONE_SHOT, 64)])
@pytest.mark.parametrize(
    "family", ["deepseek_v4", "deepseek_v4_real", pytest.param("deepseek_v4_all", marks=pytest.mark.slow)]
)
def test_stepped_logits_equal_a_full_forward(saved: Models, family: str, chunk: int, page_size: int) -> None:
    model, folder = saved[family]
    assert_same_logits(load(folder, page_size=page_size), model, 24, PROMPT_LENS, chunk)


@pytest.mark.prove
def test_300_decoded_tokens_equal_a_full_forward(saved: Models) -> None:
    """With the published tokens per entry, two entries of 128 tokens are completed on the way."""
    model, folder = saved["deepseek_v4_real"]
    assert_same_logits(load(folder, page_size=16), model, 300, (21,), ONE_SHOT)


@pytest.mark.prove
@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_all_kernels_of_layers_give_the_same(saved: Models, kernels: str) -> None:
    model, folder = saved["deepseek_v4"]
    assert_same_logits(load(folder, layer_kernels=kernels), model, 4, (9, 30, 12), 13)


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fused_kernels_of_layers_give_the_same(saved: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, Triton's interpreter runs them."""
    triton_operations = pytest.importorskip("sightline.layers.triton_operations")
    model, folder = saved["deepseek_v4"]
    compute_with(monkeypatch, triton_operations.TritonOperations())
    assert_same_logits(load(folder), model, 2, (14,), 9)


def test_a_transient_forward_equals_a_full_one_and_leaves_the_pools_alone(saved: Models) -> None:
    model, folder = saved["deepseek_v4"]
    runtime = load(folder)
    prompts = clear_prompts(model, [9, 1, 33])
    batch = assemble_transient([RowWork(0, prompt, 0, True) for prompt in prompts], CPU)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    for prompt, got in zip(prompts, logits, strict=True):
        assert relative_error(got, reference_logits(model, prompt)[-1]) <= TOLERANCE
    assert all(pool.plane(plane.name).isnan().all() for pool in runtime.store.pools for plane in pool.spec.planes)


def test_padding_changes_no_logits_and_no_rows_give_none(saved: Models) -> None:
    model, folder = saved["deepseek_v4"]
    runtime = load(folder)
    assert runtime.runner.forward(runtime.planner.plan(assemble([], runtime.store))).shape == (0, 101)
    [prompt] = clear_prompts(model, [19])
    row = runtime.store.open_row()
    runtime.store.grow_row(row, 19)
    batch = assemble([RowWork(row, prompt, 0, True)], runtime.store).pad(5, 32)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    assert relative_error(logits[0], reference_logits(model, prompt)[-1]) <= TOLERANCE


def test_layers_of_a_kind_are_a_group(saved: Models) -> None:
    found = {binding.group.name: binding.group for binding in load(saved["deepseek_v4"][1]).bindings}
    kinds = {name: (group.spec.kind, group.layers) for name, group in found.items()}
    assert kinds == {
        "group0": (SpecKind.COMPRESSED, (0,)),
        "group1": (SpecKind.COMPRESSED, (1, 3)),
        "group2": (SpecKind.COMPRESSED, (2,)),
        "index0": (SpecKind.COMPRESSED_INDEX, (1, 3)),
    }


@pytest.mark.prove
def test_greedy_answers_are_those_of_transformers(saved: Models) -> None:
    assert_greedy_answers(*saved["deepseek_v4"])


def test_a_packed_checkpoint_of_the_original_repository_gives_the_logits_of_what_it_stands_for(
    saved: Models, tmp_path: Path
) -> None:
    made, folder = saved["deepseek_v4_wide"]
    exact, plain = save_original(folder, tmp_path, packed=True), tmp_path / "plain"
    made.save_pretrained(plain)
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    model = type(made).from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    [sequence] = clear_prompts(model, [40])
    [got] = stepped_logits(load(tmp_path), [sequence], [30], chunk=16)
    assert relative_error(got, reference_logits(model, sequence)[29:]) <= TOLERANCE
    assert relative_error(reference_logits(made, sequence), reference_logits(model, sequence)) > 1e-2


@pytest.mark.parametrize("family", routine({name: name for name in V4}, "deepseek_v4"))
def test_random_weights_are_those_of_a_saved_model_and_give_finite_logits(saved: Models, family: str) -> None:
    _, folder = saved[family]
    made = RandomCheckpoint(folder / "config.json", CPU, Ledger(strict=True))
    stored = {name: info.shape for name, info in open_checkpoint(folder, Ledger()).tensors.items()}
    assert {name: info.shape for name, info in made.tensors.items()} == stored
    runtime = build_runtime(EngineConfig(dtype="float32", cache_tokens=512), made, Ledger())
    for logits in stepped_logits(runtime, random_prompts([9, 40]), prompt_lens=[8, 30], chunk=16):
        assert logits.isfinite().all()
        assert logits.std() > 0.05


@pytest.mark.prove
def test_a_bf16_checkpoint_runs_in_fp32_as_the_same_numbers_and_in_bf16_near_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU without instructions for bf16 is slow, and right.
    monkeypatch.setattr(resolution, "lacks_products", lambda device, dtype: False)
    made = make_v4("deepseek_v4")
    made.bfloat16().save_pretrained(tmp_path)
    model = type(made).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    [sequence] = random_prompts([60])
    expected = reference_logits(model, sequence)[19:]
    [exact] = stepped_logits(load(tmp_path), [sequence], [20], chunk=7)
    assert relative_error(exact, expected) <= TOLERANCE
    runtime = load_runtime(tmp_path, EngineConfig(dtype="bfloat16", cache_tokens=1024), strict=False)
    [rounded] = stepped_logits(runtime, [sequence], [20], chunk=7)
    # A rounded score may choose other experts or entries, which moves single logits far: compare directions.
    assert torch.cosine_similarity(rounded.flatten(), expected.flatten(), dim=0) > 0.95


def test_an_unchanged_model_is_within_the_tolerance(saved: Models) -> None:
    assert error_of(*saved["deepseek_v4"], Change("nothing")) <= TOLERANCE


@pytest.mark.prove
@pytest.mark.parametrize("change", [pytest.param(each, id=each.name) for each in FEATURES])
def test_disabling_a_feature_would_be_seen(saved: Models, change: Change) -> None:
    assert error_of(*saved["deepseek_v4"], change) >= VISIBLE


@pytest.mark.parametrize("plant", routine(MISTAKES, *NAMED))
def test_a_mistake_in_a_layer_would_be_seen(saved: Models, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert error_of(*saved["deepseek_v4"], Change("nothing")) >= VISIBLE
