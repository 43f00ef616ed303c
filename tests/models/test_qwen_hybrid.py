"""Qwen3-Next and Qwen3.5 give the logits of transformers, however sequences are cut, and every feature is seen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from sightline.attention.kinds import SpecKind
from sightline.core import resolution
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig, Quantization
from sightline.core.ledger import Ledger
from sightline.layers.attention import SoftmaxAttention
from sightline.layers.linear import Linear
from sightline.layers.mlp import GatedMlp
from sightline.layers.moe import ExpertMlp
from sightline.layers.recurrent.gated_delta import GatedDelta
from sightline.models.loading.opening import open_checkpoint
from sightline.models.random_weights import RandomCheckpoint
from sightline.models.registry import define_model
from sightline.runner.batching import assemble_transient
from sightline.runner.build import build_embedding_runtime, build_runtime
from sightline.runner.quantised import model_facts
from support.attention_cases import CPU
from support.case_marks import of_families
from support.changed_runtimes import compute_with, error_of
from support.features import (
    Change,
    in_definition,
    in_expert_layers,
    in_kind,
    in_mixers,
    in_rotary,
    in_routing,
    no_norm,
    other_share,
)
from support.hybrid_checks import (
    TOLERANCE,
    VISIBLE,
    assert_equal_to_transformers,
    assert_greedy_answers,
    assert_steps_equal_a_full_forward,
    config,
    every_chunk,
    save_hybrids,
)
from support.layers import dense, without_bias
from support.tiny_models import (
    Models,
    _common,
    load_runtime,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
    with_weights,
)
from support.tiny_qwen_hybrid import QWEN_HYBRID, with_vision

EXPERTS = ("qwen3_next", "qwen3_next_plain", "qwen3_5_moe")


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_hybrids(tmp_path_factory, QWEN_HYBRID)


def saved(model: PreTrainedModel, folder: Path) -> tuple[PreTrainedModel, Path]:
    with_weights(model.eval()).save_pretrained(folder)
    return model, folder


@every_chunk
@pytest.mark.parametrize("family", QWEN_HYBRID)
def test_stepped_logits_equal_a_full_forward(hybrids: Models, family: str, chunk: int) -> None:
    assert_steps_equal_a_full_forward(*hybrids[family], chunk)


@pytest.mark.parametrize(
    ("family", "recurrent", "softmax"),
    [("qwen3_next", (0, 2, 3), (1,)), ("qwen3_next_plain", (0, 2), (1, 3)), ("qwen3_5_moe", (0, 2, 3), (1,))],
)
def test_layers_are_grouped_by_kind(
    hybrids: Models, family: str, recurrent: tuple[int, ...], softmax: tuple[int, ...]
) -> None:
    bindings = load_runtime(hybrids[family][1], config()).bindings
    found = {binding.group.spec.kind: binding.group.layers for binding in bindings}
    assert found == {SpecKind.RECURRENT: recurrent, SpecKind.SOFTMAX: softmax}


@pytest.mark.parametrize("family", QWEN_HYBRID)
def test_greedy_answers_are_those_of_transformers(hybrids: Models, family: str) -> None:
    assert_greedy_answers(*hybrids[family])


@pytest.mark.parametrize("family", QWEN_HYBRID)
def test_embedding_keeps_no_states(hybrids: Models, family: str) -> None:
    model, folder = hybrids[family]
    settings = EngineConfig(task="embed", dtype="float32", device="cpu")
    runtime, _ = build_embedding_runtime(settings, open_checkpoint(folder, Ledger()), Ledger())
    prompts = random_prompts([9, 1, 33])
    batch = assemble_transient([RowWork(0, prompt, 0, True) for prompt in prompts], CPU)
    found = runtime.runner.forward(runtime.planner.plan(batch))
    for prompt, got in zip(prompts, found, strict=True):
        with torch.no_grad():
            expected = model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1]
        assert relative_error(got, expected) <= TOLERANCE
    assert runtime.store.num_bytes == 0


@pytest.mark.parametrize("experts", [False, True])
def test_text_of_a_model_with_vision_is_served_and_the_rest_is_named(tmp_path: Path, *, experts: bool) -> None:
    model, folder = saved(with_vision(_common(), experts=experts), tmp_path)
    ledger = Ledger()
    runtime = build_runtime(config(), open_checkpoint(folder, ledger), ledger)
    assert_equal_to_transformers(model, runtime, (20, 5), 7, 8, vocab=90)
    notes = {note.subject: note.fact for note in ledger.notes}
    assert "21 tensors model.visual.* are not loaded: images and videos are not supported" in notes["vision"]
    assert ledger.degradations == ()


def test_experts_stored_as_one_tensor_are_loaded_as_separate_ones(hybrids: Models, tmp_path: Path) -> None:
    _, folder = hybrids["qwen3_5_moe"]
    tensors = load_file(folder / "model.safetensors")
    stacked = {name: each for name, each in tensors.items() if ".experts." not in name}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors[f"{prefix}.{number}.{part}_proj.weight"] for number in range(7)])
            for part in ("gate", "up", "down")
        }
        stacked[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        stacked[f"{prefix}.down_proj"] = parts["down"]
    save_file(stacked, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    opened, plain = open_checkpoint(tmp_path, Ledger()), open_checkpoint(folder, Ledger())
    assert dict(opened.tensors) == dict(plain.tensors)
    for name in plain.tensors:
        assert torch.equal(opened.load(name), plain.load(name)), name
    assert opened.file_of("model.layers.1.mlp.experts.6.up_proj.weight") == tmp_path / "model.safetensors"


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_layers_for_multi_token_prediction_are_left_and_named(hybrids: Models, family: str, tmp_path: Path) -> None:
    model, folder = hybrids[family]
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.zeros(48, 96)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    ledger = Ledger(strict=True)
    runtime = build_runtime(config(), open_checkpoint(tmp_path, ledger), ledger)
    assert any("1 tensors mtp.* are not loaded" in note.fact for note in ledger.notes)
    assert_equal_to_transformers(model, runtime, (5,), 7, 2)


def test_the_sizes_of_a_model_leave_out_what_is_not_loaded(tmp_path: Path) -> None:
    _, folder = saved(with_vision(_common(), experts=False), tmp_path)
    checkpoint = open_checkpoint(folder, Ledger())
    definition = define_model(checkpoint.config, Ledger())
    facts = model_facts(Quantization.DEQUANTISE, checkpoint, definition, definition.groups())
    text = [info.shape for name, info in checkpoint.tensors.items() if not name.startswith("model.visual.")]
    assert facts.weight_elements == sum(math.prod(shape) for shape in text)
    assert len(text) < len(checkpoint.tensors)


@pytest.mark.parametrize("family", QWEN_HYBRID)
def test_random_weights_have_the_tensors_of_a_saved_model_and_give_finite_logits(hybrids: Models, family: str) -> None:
    folder = hybrids[family][1]
    made = RandomCheckpoint(folder / "config.json", torch.device("cpu"), Ledger())
    stored = {name: info.shape for name, info in open_checkpoint(folder, Ledger()).tensors.items()}
    assert {name: info.shape for name, info in made.tensors.items()} == stored
    runtime = build_runtime(config(), made, Ledger())
    for logits in stepped_logits(runtime, random_prompts([9, 40]), prompt_lens=[8, 30], chunk=16):
        assert logits.isfinite().all()
        assert logits.std() > 0.05


@pytest.mark.parametrize("layer_kernels", ["torch", "numba"])
def test_every_kind_of_layer_kernels_gives_the_same(hybrids: Models, layer_kernels: str) -> None:
    if layer_kernels == "numba":
        pytest.importorskip("numba")
    model, folder = hybrids["qwen3_next"]
    runtime = load_runtime(folder, replace(config(), layer_kernels=layer_kernels))
    assert_equal_to_transformers(model, runtime, (20, 5, 9), 16, 12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.prove)])
def test_fused_kernels_of_layers_give_the_same(hybrids: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: on a CPU, the settings would not choose them."""
    pytest.importorskip("triton")
    from sightline.layers.triton_operations import TritonOperations

    model, folder = hybrids[family]
    compute_with(monkeypatch, TritonOperations())
    assert_equal_to_transformers(model, load_runtime(folder, config()), (5, 1), 4, 2)


@pytest.mark.parametrize(
    ("dtype", "least"), [pytest.param("float16", 0.998, marks=pytest.mark.slow), ("bfloat16", 0.98)]
)
@pytest.mark.prove
@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_rounded_weights_and_activations_give_nearly_the_same(
    hybrids: Models, family: str, dtype: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rounded router logit may choose another expert, which moves single logits far: directions are compared."""
    # A CPU without instructions for bf16 is slow, and right.
    monkeypatch.setattr(resolution, "lacks_products", lambda device, dtype: False)
    model, folder = hybrids[family]
    [sequence] = random_prompts([40])
    [got] = stepped_logits(load_runtime(folder, replace(config(), dtype=dtype)), [sequence], [20], chunk=7)
    expected = reference_logits(model, sequence)[19:]
    assert torch.cosine_similarity(got.flatten(), expected.flatten(), dim=0) > least


def in_delta(name: str, change: Callable[[GatedDelta], GatedDelta]) -> Change:
    return in_mixers(name, GatedDelta, change)


def in_softmax(name: str, change: Callable[[SoftmaxAttention], SoftmaxAttention]) -> Change:
    return in_mixers(name, SoftmaxAttention, change)


def with_rows(layer: GatedDelta, change: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> GatedDelta:
    """The layer with other rows for queries, keys and values; gates; shares; and steps."""
    spec = layer.spec
    sizes = [spec.channels, spec.num_heads * spec.value_dim, spec.num_heads, spec.num_heads]
    parts = change(*torch.split(dense(layer.inputs).weight, sizes))
    return replace(layer, inputs=Linear(torch.cat(parts)))


def half_open(layer: SoftmaxAttention) -> SoftmaxAttention:
    """The layer with gates of 0, whose sigmoid is one half."""
    qkv, num_gates = dense(layer.qkv), layer.spec.num_q_heads * layer.spec.head_dim
    weight, bias = (None if each is None else each.clone() for each in (qkv.weight, qkv.bias))
    assert weight is not None
    weight[-num_gates:] = 0.0
    if bias is not None:
        bias[-num_gates:] = 0.0
    return replace(layer, qkv=Linear(weight, bias))


def without_past_inputs(layer: GatedDelta) -> GatedDelta:
    weight = layer.conv.weight.clone()
    weight[:, :-1] = 0.0
    return replace(layer, conv=layer.conv._replace(weight=weight))


def without_row_gate(mlp: ExpertMlp) -> ExpertMlp:
    assert isinstance(mlp.shared, GatedMlp)
    assert mlp.shared.row_gate is not None
    return replace(mlp, shared=replace(mlp.shared, row_gate=None))


FEATURES = [
    in_rotary("rotary base", lambda rotary: replace(rotary, theta=rotary.theta * 10)),
    in_rotary("dimensions that are rotated", lambda rotary: replace(rotary, rotated_dim=None)),
    in_definition("norm epsilon", norm_epsilon=0.5),
    in_definition("norm offset", norm_offset=0.0),
    in_kind("score scale", SpecKind.SOFTMAX, scale=1.0),
    in_softmax("query and key norms", lambda x: replace(x, norms=None)),
    in_softmax("gates of the heads", half_open),
    in_kind("query scale", SpecKind.RECURRENT, scale=1e-4),
    in_kind("delta rule", SpecKind.RECURRENT, delta_rule=False),
    in_kind("length of keys", SpecKind.RECURRENT, unit_keys=False),
    in_delta("decay", lambda x: replace(x, log_rates=torch.full_like(x.log_rates, -50.0))),
    in_delta("bias of the decay", lambda x: replace(x, step_bias=torch.zeros_like(x.step_bias))),
    in_delta("convolution", without_past_inputs),
    in_delta("norm of the output", lambda x: replace(x, norm=no_norm(x.norm))),
    in_delta("rows of the gates", lambda x: with_rows(x, lambda m, z, b, a: (m, z.flip(0), b, a))),
    in_delta("rows of the shares", lambda x: with_rows(x, lambda m, z, b, a: (m, z, b * 0.0, a))),
    in_delta("rows of the decays", lambda x: with_rows(x, lambda m, z, b, a: (m, z, b, a.flip(0)))),
    in_delta("shares and decays", lambda x: with_rows(x, lambda m, z, b, a: (m, z, a, b))),
]
BIASES = [
    in_softmax("query, key and value biases", lambda x: replace(x, qkv=without_bias(x.qkv))),
    in_softmax("output bias", lambda x: replace(x, output=without_bias(x.output))),
]
EXPERT_FEATURES = [
    in_routing("share of the chosen experts", other_share),
    in_routing("number of experts a token", lambda x: replace(x, experts_per_token=x.experts_per_token - 1)),
    in_expert_layers("shared expert", lambda x: replace(x, shared=None)),
    in_expert_layers("gate of the shared expert", without_row_gate),
]
CASES = [
    *((family, change) for family in QWEN_HYBRID for change in FEATURES),
    *(("qwen3_next", change) for change in BIASES),
    *((family, change) for family in EXPERTS for change in EXPERT_FEATURES),
]


@pytest.mark.parametrize("family", QWEN_HYBRID)
def test_an_unchanged_model_is_within_the_tolerance(hybrids: Models, family: str) -> None:
    assert error_of(*hybrids[family], Change("nothing")) <= TOLERANCE


@pytest.mark.prove
@pytest.mark.parametrize(("family", "change"), of_families(CASES, "qwen3_next"))
def test_disabling_a_feature_would_be_seen(hybrids: Models, family: str, change: Change) -> None:
    assert error_of(*hybrids[family], change) >= VISIBLE


def test_the_saved_models_have_the_layouts_that_are_told_apart(hybrids: Models) -> None:
    """Both ways of storing projections are among them, and biases, and a config that lists no kinds."""
    names = {}
    for family, (_, folder) in hybrids.items():
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            names[family] = set(file.keys())
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in names["qwen3_next"]
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in names["qwen3_5"]
    assert "model.layers.1.self_attn.q_proj.bias" in names["qwen3_next"]
    assert "lm_head.weight" not in names["qwen3_next_plain"]
    assert json.loads((hybrids["qwen3_5"][1] / "config.json").read_text())["rope_parameters"]["mrope_section"]
