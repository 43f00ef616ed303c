"""DeepSeek V3.2 and GLM-5 give the logits of transformers, and every feature of their indexers is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import SpecKind
from sightline.attention.spec import IndexSpec
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.models.loading.opening import open_checkpoint
from sightline.models.random_weights import RandomCheckpoint
from sightline.runner.batching import assemble, assemble_transient
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime
from support.attention_cases import CPU
from support.case_marks import routine, seldom
from support.changed_runtimes import compute_with
from support.tiny_models import Models, load_runtime, random_prompts, reference_logits, relative_error, stepped_logits
from support.tiny_sparse import SPARSE, TOP_K, clear_prompts, make_sparse

TOLERANCE = 2e-4
"""Of the logits' scale."""
VISIBLE = 100 * TOLERANCE
DECODE_STEPS = 64
PROMPT_LENS = (5, 70, 1, 131, TOP_K, TOP_K + 1)
"""Below, at and far above what an indexer chooses."""
ONE_SHOT = 256
ROUTINE = ("deepseek_v32", "glm_moe_dsa")
families = pytest.mark.parametrize("family", routine({name: name for name in SPARSE}, *ROUTINE))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Each family's model and the folder that it is saved in."""
    made = {}
    for family in SPARSE:
        folder, model = tmp_path_factory.mktemp(family), make_sparse(family)
        model.save_pretrained(folder)
        made[family] = (model, folder)
    return made


def load(folder: Path, **changes: Any) -> Runtime:
    settings = {"page_size": 16, "dtype": "float32", "cache_tokens": 2048, "max_num_seqs": 8, **changes}
    return load_runtime(folder, EngineConfig(**settings), strict=False)


def assert_same_logits(
    runtime: Runtime, model: PreTrainedModel, steps: int, lengths: tuple[int, ...], chunk: int
) -> None:
    sequences = clear_prompts(model, [length + steps for length in lengths])
    found = stepped_logits(runtime, sequences, lengths, chunk)
    for sequence, prompt_len, got in zip(sequences, lengths, found, strict=True):
        expected = reference_logits(model, sequence)[prompt_len - 1 :]
        assert got.shape == (steps + 1, expected.shape[1])
        assert relative_error(got, expected) <= TOLERANCE


@pytest.mark.prove
@pytest.mark.parametrize(("chunk", "page_size"), [(1, 16), (7, 1), (64, 4), (ONE_SHOT, 16)])
@pytest.mark.parametrize("family", SPARSE)
def test_stepped_logits_equal_a_full_forward(sparse: Models, family: str, chunk: int, page_size: int) -> None:
    model, folder = sparse[family]
    runtime = load(folder, page_size=page_size)
    assert_same_logits(runtime, model, DECODE_STEPS, PROMPT_LENS, chunk)
    assert runtime.planner.num_rebuilt == 0
    assert runtime.store.num_free_pages == runtime.store.num_usable_pages


@pytest.mark.parametrize(("family", "chunk", "page_size"), [("deepseek_v32", 7, 4), ("glm_moe_dsa", 64, 1)])
def test_ragged_rows_below_and_above_the_choice_equal_a_full_forward(
    sparse: Models, family: str, chunk: int, page_size: int
) -> None:
    model, folder = sparse[family]
    assert_same_logits(load(folder, page_size=page_size), model, 12, (1, TOP_K, 70), chunk)


@families
@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_all_kernels_of_layers_give_the_same_in_either_order_of_memory(
    sparse: Models, family: str, kernels: str
) -> None:
    """With so many tokens in a step, activations of torch's kernels are feature-major."""
    model, folder = sparse[family]
    assert_same_logits(load(folder, layer_kernels=kernels), model, 4, (9, 40, 12), 13)


@pytest.mark.prove
@pytest.mark.parametrize("family", seldom(ROUTINE, ROUTINE[0]))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fused_kernels_of_layers_give_the_same(sparse: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, Triton's interpreter runs them."""
    triton_operations = pytest.importorskip("sightline.layers.triton_operations")
    model, folder = sparse[family]
    compute_with(monkeypatch, triton_operations.TritonOperations())
    assert_same_logits(load(folder), model, 2, (14,), 9)


@families
def test_a_transient_forward_equals_a_full_one_and_leaves_the_pools_alone(sparse: Models, family: str) -> None:
    model, folder = sparse[family]
    runtime = load(folder)
    prompts = clear_prompts(model, [9, 1, 33])
    batch = assemble_transient([RowWork(0, prompt, 0, True) for prompt in prompts], CPU)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    for prompt, got in zip(prompts, logits, strict=True):
        assert relative_error(got, reference_logits(model, prompt)[-1]) <= TOLERANCE
    assert all(pool.plane(plane.name).isnan().all() for pool in runtime.store.pools for plane in pool.spec.planes)


def test_padding_changes_no_logits_and_no_rows_give_none(sparse: Models) -> None:
    model, folder = sparse["glm_moe_dsa"]
    runtime = load(folder)
    assert runtime.runner.forward(runtime.planner.plan(assemble([], runtime.store))).shape == (0, 101)
    [prompt] = clear_prompts(model, [19])
    row = runtime.store.open_row()
    runtime.store.grow_row(row, 19)
    batch = assemble([RowWork(row, prompt, 0, True)], runtime.store).pad(5, 32)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    assert relative_error(logits[0], reference_logits(model, prompt)[-1]) <= TOLERANCE


def test_only_layers_with_an_indexer_of_their_own_have_index_keys(sparse: Models) -> None:
    def groups(family: str) -> dict[SpecKind, LayerGroup]:
        return {each.group.spec.kind: each.group for each in load(sparse[family][1]).bindings}

    found = groups("glm_moe_dsa")
    assert found[SpecKind.LATENT].layers == (0, 1, 2, 3, 4)
    assert found[SpecKind.INDEX].layers == (0, 2)
    assert found[SpecKind.INDEX].spec == IndexSpec(num_q_heads=16, head_dim=14, top_k=TOP_K)
    assert groups("deepseek_v32")[SpecKind.INDEX].layers == (0, 1, 2)


@families
def test_a_context_of_which_nothing_is_left_out_gives_the_logits_of_dense_attention(
    sparse: Models, family: str, tmp_path: Path
) -> None:
    """The same weights as a DeepSeek V3, which has no indexer."""
    model, folder = sparse[family]
    stored = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in stored.items() if ".indexer." not in name}, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    left = ("index_", "indexer_", "layer_types", "mlp_layer_types", "mlp_bias")
    dense = {name: value for name, value in config.items() if not name.startswith(left)}
    dense |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    top_k = model.config.index_topk
    [sequence] = random_prompts([top_k + 6])
    below, above = (slice(None, top_k - 3), slice(top_k - 2, None))
    [expected] = stepped_logits(load(tmp_path), [sequence], [4], chunk=3)
    [got] = stepped_logits(load(folder), [sequence], [4], chunk=3)
    assert relative_error(got[below], expected[below]) <= TOLERANCE / 10
    assert relative_error(got[above], expected[above]) > VISIBLE


def test_a_cache_of_8_bits_gives_what_the_oracles_make_of_it(sparse: Models) -> None:
    """Index keys have a scale each, a power of two."""
    _, folder = sparse["deepseek_v32"]
    [sequence] = random_prompts([24])
    found = []
    for backend in (None, "reference-latent,reference-index"):
        runtime = load(folder, kv_cache_dtype="fp8", attention_backend=backend, page_size=4)
        planes = [plane for pool in runtime.store.pools if pool.spec.name == "index" for plane in pool.spec.planes]
        assert [plane.dtype for plane in planes] == [torch.float8_e4m3fn, torch.float32]
        found += stepped_logits(runtime, [sequence], [18], chunk=16)
    assert relative_error(*found) <= TOLERANCE


@families
def test_random_weights_are_those_of_a_saved_model_and_give_finite_logits(sparse: Models, family: str) -> None:
    _, folder = sparse[family]
    made = RandomCheckpoint(folder / "config.json", CPU, Ledger(strict=True))
    stored = {name: info.shape for name, info in open_checkpoint(folder, Ledger()).tensors.items()}
    assert {name: info.shape for name, info in made.tensors.items()} == stored
    runtime = build_runtime(EngineConfig(dtype="float32", cache_tokens=512), made, Ledger())
    for logits in stepped_logits(runtime, random_prompts([9, 40]), prompt_lens=[8, 30], chunk=16):
        assert logits.isfinite().all()
        assert logits.std() > 0.05


def indexers(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]


Patch = pytest.MonkeyPatch
Spoil = Callable[[PreTrainedModel, Patch], None]


def without_relu(model: PreTrainedModel, patch: Patch) -> None:
    patch.setattr(nn.functional, "relu", lambda x: x)


def with_equal_weights(model: PreTrainedModel, patch: Patch) -> None:
    for each in indexers(model):
        patch.setattr(each.weights_proj, "forward", lambda x: x.new_ones(*x.shape[:-1], 16))


def without_key_norm(model: PreTrainedModel, patch: Patch) -> None:
    for each in indexers(model):
        patch.setattr(each.k_norm, "forward", lambda x: x)


def without_key_bias(model: PreTrainedModel, patch: Patch) -> None:
    for each in indexers(model):
        patch.setattr(each.k_norm, "bias", nn.Parameter(torch.zeros(14)))


def without_query_norm(model: PreTrainedModel, patch: Patch) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        if attention.indexer is not None:
            project, low = attention.indexer.wq_b.forward, attention.q_a_proj
            kept: list[Tensor] = []
            low.register_forward_hook(lambda _module, _given, out, kept=kept: kept.append(out))
            patch.setattr(attention.indexer.wq_b, "forward", lambda x, run=project, kept=kept: run(kept[-1]))


def rotate_index(model: PreTrainedModel, patch: Patch, rotate: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Replaces the rotation in indexers, the only one whose heads are in the second dimension."""
    module = __import__(type(model).__module__, fromlist=["x"])
    for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"):
        if (known := getattr(module, name, None)) is not None:
            patch.setattr(
                module,
                name,
                lambda *given, known=known, unsqueeze_dim=1: (rotate if unsqueeze_dim == 2 else known)(
                    *given, unsqueeze_dim=unsqueeze_dim
                ),
            )


def without_rotation(model: PreTrainedModel, patch: Patch) -> None:
    rotate_index(model, patch, lambda q, k, *_, **__: (q, k))


def with_the_other_pairs(model: PreTrainedModel, patch: Patch) -> None:
    swapped = "apply_rotary_pos_emb_interleave" if "V32" in type(model).__name__ else "apply_rotary_pos_emb"
    rotate_index(model, patch, getattr(modeling_deepseek_v3, swapped))


def with_another_count(change: int) -> Spoil:
    def spoil(model: PreTrainedModel, patch: Patch) -> None:
        for each in indexers(model):
            patch.setattr(each, "index_topk", TOP_K + change)

    return spoil


def with_the_choice_of_the_first_layer(model: PreTrainedModel, patch: Patch) -> None:
    first, *_, last = model.model.layers
    chosen: list[Tensor] = []
    run, run_last = first.forward, last.forward

    def keep(*given: Any, **options: Any) -> Any:
        out = run(*given, **options)
        chosen.append(out[1])
        return out

    patch.setattr(first, "forward", keep)
    patch.setattr(last, "forward", lambda *given, **rest: run_last(*given, **rest | {"prev_topk_indices": chosen[-1]}))


SPOILED: dict[str, Spoil] = {
    "relu": without_relu,
    "weights": with_equal_weights,
    "key norm": without_key_norm,
    "key bias": without_key_bias,
    "query norm": without_query_norm,
    "rotation": without_rotation,
    "pairs": with_the_other_pairs,
    "one less": with_another_count(-1),
    "one more": with_another_count(1),
}


@pytest.mark.parametrize("spoil", [pytest.param(spoil, id=name) for name, spoil in SPOILED.items()])
@pytest.mark.parametrize("family", ROUTINE)
def test_leaving_out_a_feature_of_an_indexer_would_be_seen(
    family: str, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_sparse(family)
    [sequence] = clear_prompts(model, [48])
    expected = reference_logits(model, sequence)
    spoil(model, monkeypatch)
    assert relative_error(reference_logits(model, sequence), expected) >= VISIBLE


def test_the_choice_of_another_layer_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_sparse("glm_moe_dsa")
    [sequence] = clear_prompts(model, [48])
    expected = reference_logits(model, sequence)
    with_the_choice_of_the_first_layer(model, monkeypatch)
    assert relative_error(reference_logits(model, sequence), expected) >= VISIBLE
