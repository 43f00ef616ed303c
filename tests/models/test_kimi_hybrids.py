"""Kimi Linear, Bailing hybrids and MiniMax give the logits of transformers, and every feature is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightline.attention.kinds import SpecKind
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.layers.latent import LatentAttention
from sightline.layers.linear import Linear
from sightline.layers.recurrent.kimi_delta import KimiDelta, SecondProducts
from sightline.layers.recurrent.lightning import LightningAttention
from sightline.layers.routing import Routing, Score
from sightline.models.decoder import DecoderDefinition
from sightline.models.layer_definition import ResidualFactors
from sightline.models.loading.opening import open_checkpoint
from sightline.models.norms import NormDefinition
from sightline.models.random_weights import RandomCheckpoint
from sightline.runner.batching import assemble, assemble_transient
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime
from support.attention_cases import CPU
from support.case_marks import of_families, routine, seldom
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
    without_correction,
    without_latent_norm,
    without_query_norm,
    without_shared,
)
from support.hybrid_checks import (
    TOLERANCE,
    VISIBLE,
    assert_greedy_answers,
    assert_steps_equal_a_full_forward,
    config,
    every_chunk,
    save_hybrids,
)
from support.layers import dense, without_bias
from support.tiny_bert import open_tiny, reference_vector, save_embedder, vectors
from support.tiny_kimi import KIMI
from support.tiny_models import (
    Models,
    load_runtime,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
)

DELTA = [family for family in KIMI if not family.startswith("minimax")]
"""Families with latent and recurrent layers."""
LIGHTNING = [family for family in KIMI if family.startswith("minimax")]


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_hybrids(tmp_path_factory, KIMI)


def assert_untouched(runtime: Runtime) -> None:
    """Nothing was written: pools and states are as they were filled."""
    assert all(pool.plane(plane.name).isnan().all() for pool in runtime.store.pools for plane in pool.spec.planes)


@every_chunk
@pytest.mark.parametrize("family", routine({name: name for name in KIMI}, "kimi_linear", "bailing_hybrid", "minimax"))
def test_stepped_logits_equal_a_full_forward(hybrids: Models, family: str, chunk: int) -> None:
    assert_steps_equal_a_full_forward(*hybrids[family], chunk)


@pytest.mark.parametrize("family", KIMI)
def test_torch_kernels_of_layers_give_the_same_in_either_order_of_memory(hybrids: Models, family: str) -> None:
    """With so many tokens in a step, activations are feature-major."""
    model, folder = hybrids[family]
    lengths = (9, 40, 12)
    sequences = random_prompts([length + 4 for length in lengths])
    runtime = load_runtime(folder, replace(config(), layer_kernels="torch"))
    for sequence, prompt_len, got in zip(
        sequences, lengths, stepped_logits(runtime, sequences, lengths, 13), strict=True
    ):
        assert relative_error(got, reference_logits(model, sequence)[prompt_len - 1 :]) <= TOLERANCE


@pytest.mark.prove
@pytest.mark.parametrize("family", seldom(KIMI, "kimi_linear", "minimax"))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fused_kernels_of_layers_give_the_same(hybrids: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, Triton's interpreter runs them."""
    triton_operations = pytest.importorskip("sightline.layers.triton_operations")
    model, folder = hybrids[family]
    compute_with(monkeypatch, triton_operations.TritonOperations())
    runtime = load_runtime(folder, EngineConfig(cache_tokens=256, max_num_seqs=4))
    [sequence] = random_prompts([11])
    [got] = stepped_logits(runtime, [sequence], [9], chunk=4)
    assert relative_error(got, reference_logits(model, sequence)[8:]) <= TOLERANCE


@pytest.mark.parametrize("family", KIMI)
def test_a_transient_forward_equals_a_full_one_and_leaves_the_pools_alone(hybrids: Models, family: str) -> None:
    model, folder = hybrids[family]
    runtime = load_runtime(folder, config())
    prompts = random_prompts([9, 1, 33])
    batch = assemble_transient([RowWork(0, prompt, 0, True) for prompt in prompts], CPU)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    for prompt, got in zip(prompts, logits, strict=True):
        assert relative_error(got, reference_logits(model, prompt)[-1]) <= TOLERANCE
    assert_untouched(runtime)


@pytest.mark.parametrize("family", KIMI)
def test_padding_changes_no_logits_and_no_rows_give_none(hybrids: Models, family: str) -> None:
    model, folder = hybrids[family]
    runtime = load_runtime(folder, config())
    assert runtime.runner.forward(runtime.planner.plan(assemble([], runtime.store))).shape == (0, 101)
    [prompt] = random_prompts([19])
    row = runtime.store.open_row()
    runtime.store.grow_row(row, 19)
    batch = assemble([RowWork(row, prompt, 0, True)], runtime.store).pad(5, 32)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    assert relative_error(logits[0], reference_logits(model, prompt)[-1]) <= TOLERANCE


@pytest.mark.parametrize("family", KIMI)
def test_layers_are_grouped_by_kind(hybrids: Models, family: str) -> None:
    bindings = load_runtime(hybrids[family][1], config()).bindings
    found = {binding.group.spec.kind: binding.group.layers for binding in bindings}
    other = SpecKind.LATENT if family in DELTA else SpecKind.SOFTMAX
    if family == "minimax_window":
        assert found == {SpecKind.RECURRENT: (1, 2), other: (0,)}
    else:
        assert found == {SpecKind.RECURRENT: (0, 2), other: (1, 3)}


@pytest.mark.parametrize("family", routine({name: name for name in KIMI}, "kimi_linear", "bailing_hybrid", "minimax"))
def test_greedy_answers_are_those_of_transformers(hybrids: Models, family: str) -> None:
    assert_greedy_answers(*hybrids[family])


def copied(folder: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """The model of `folder` with other tensors."""
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def logits_of(folder: Path, ledger: Ledger) -> Tensor:
    [sequence] = random_prompts([24])
    runtime = build_runtime(config(), open_checkpoint(folder, ledger), ledger)
    [got] = stepped_logits(runtime, [sequence], [20], chunk=64)
    return got


def test_dense_layers_may_have_the_names_of_the_original_repository(hybrids: Models, tmp_path: Path) -> None:
    """transformers writes them under `block_sparse_moe`, the original repository under `mlp`."""
    _, folder = hybrids["kimi_linear"]
    stored = load_file(folder / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in stored
    renamed = {
        name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor.contiguous()
        for name, tensor in stored.items()
    }
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in renamed
    assert torch.equal(logits_of(copied(folder, tmp_path, renamed), Ledger(strict=True)), logits_of(folder, Ledger()))


def test_two_tensors_of_one_name_are_refused(hybrids: Models, tmp_path: Path) -> None:
    _, folder = hybrids["kimi_linear"]
    stored = load_file(folder / "model.safetensors")
    extra = {"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 48)}
    with pytest.raises(CheckpointError, match=r"expected one tensor model.layers.0.mlp.up_proj.weight in .*, got "):
        open_checkpoint(copied(folder, tmp_path, stored | extra), Ledger())


def test_layers_for_multi_token_prediction_are_left_and_named(hybrids: Models, tmp_path: Path) -> None:
    _, folder = hybrids["bailing_hybrid"]
    stored = load_file(folder / "model.safetensors")
    extra = {
        "model.layers.4.eh_proj.weight": torch.zeros(48, 96),
        "model.layers.4.attention.dense.weight": torch.ones(1),
    }
    ledger = Ledger(strict=True)
    assert torch.equal(logits_of(copied(folder, tmp_path, stored | extra), ledger), logits_of(folder, Ledger()))
    assert any("2 tensors model.layers.4.* are not loaded" in note.fact for note in ledger.notes)


def test_a_layer_beyond_those_for_prediction_is_refused(hybrids: Models, tmp_path: Path) -> None:
    _, folder = hybrids["bailing_hybrid"]
    stored = load_file(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"it would ignore: model.layers.5.eh_proj.weight"):
        logits_of(copied(folder, tmp_path, stored | {"model.layers.5.eh_proj.weight": torch.zeros(48, 96)}), Ledger())


def test_stored_decays_of_lightning_layers_are_left_and_named_and_need_not_be_there(
    hybrids: Models, tmp_path: Path
) -> None:
    _, folder = hybrids["minimax"]
    stored = load_file(folder / "model.safetensors")
    derived = [name for name in stored if name.endswith(("_decay", "slope_rate"))]
    assert len(derived) == 8
    ledger = Ledger(strict=True)
    whole = logits_of(folder, ledger)
    assert sum("4 tensors such as model.layers." in note.fact for note in ledger.notes) == 2
    kept = {name: tensor for name, tensor in stored.items() if name not in derived}
    assert torch.equal(logits_of(copied(folder, tmp_path, kept), Ledger(strict=True)), whole)


def test_the_saved_configs_have_the_names_that_are_told_apart(hybrids: Models) -> None:
    """transformers writes the other names of fields, and replaces the size of recurrent heads by that of the rope."""
    saved = {family: json.loads((folder / "config.json").read_text()) for family, (_, folder) in hybrids.items()}
    assert (saved["kimi_linear"]["num_expert_group"], saved["kimi_linear"]["model_max_length"]) == (4, 256)
    assert (saved["bailing_hybrid"]["head_dim"], saved["bailing_hybrid"]["linear_head_dim"]) == (8, 14)


@pytest.mark.parametrize("family", KIMI)
def test_random_weights_are_those_of_a_saved_model_and_give_finite_logits(hybrids: Models, family: str) -> None:
    _, folder = hybrids[family]
    made = RandomCheckpoint(folder / "config.json", CPU, Ledger(strict=True))
    stored = {name: info.shape for name, info in open_checkpoint(folder, Ledger()).tensors.items()}
    derived = {name for name in stored if name.endswith(("_decay", "slope_rate"))}
    assert {name: info.shape for name, info in made.tensors.items()} == {
        name: shape for name, shape in stored.items() if name not in derived
    }
    runtime = build_runtime(config(), made, Ledger())
    for logits in stepped_logits(runtime, random_prompts([9, 40]), prompt_lens=[8, 30], chunk=16):
        assert logits.isfinite().all()
        assert logits.std() > 0.05


def in_delta(name: str, change: Callable[[KimiDelta], KimiDelta]) -> Change:
    return in_mixers(name, KimiDelta, change)


def in_latents(name: str, change: Callable[[LatentAttention], LatentAttention]) -> Change:
    return in_mixers(name, LatentAttention, change)


def in_lightning(name: str, change: Callable[[LightningAttention], LightningAttention]) -> Change:
    return in_mixers(name, LightningAttention, change)


def other_score(routing: Routing) -> Routing:
    return replace(routing, score=Score.SIGMOID if routing.score is Score.SOFTMAX else Score.SOFTMAX)


def with_parts(layer: KimiDelta, change: Callable[[list[Tensor]], list[Tensor]]) -> KimiDelta:
    """The layer with other rows for queries, keys, values, shares, decays and gates."""
    spec = layer.spec
    size, weight = spec.num_heads * spec.key_dim, dense(layer.inputs).weight
    side = (len(weight) - 3 * size - spec.num_heads) // 2
    parts = torch.split(weight, [size, size, size, spec.num_heads, side, side])
    return replace(layer, inputs=Linear(torch.cat(change(list(parts)))))


def swapped(first: int, second: int) -> Callable[[KimiDelta], KimiDelta]:
    def change(parts: list[Tensor]) -> list[Tensor]:
        parts[first], parts[second] = parts[second], parts[first]
        return parts

    return lambda layer: with_parts(layer, change)


def without_shares(layer: KimiDelta) -> KimiDelta:
    return with_parts(layer, lambda parts: [*parts[:3], parts[3] * 0.0, *parts[4:]])


def without_past_inputs(layer: KimiDelta) -> KimiDelta:
    weight = layer.conv.weight.clone()
    weight[:, :-1] = 0.0
    return replace(layer, conv=layer.conv._replace(weight=weight))


def other_second(layer: KimiDelta) -> KimiDelta:
    assert layer.second is not None
    return replace(layer, second=SecondProducts(layer.second.gate, layer.second.decay))


def other_bound(layer: KimiDelta) -> KimiDelta:
    assert layer.decay_bound is not None
    return replace(layer, decay_bound=layer.decay_bound / 2.0)


def without_gates(layer: LatentAttention) -> LatentAttention:
    assert layer.gated
    weight = dense(layer.down).weight.clone()
    weight[-layer.spec.num_q_heads :] = 0.0
    return replace(layer, down=Linear(weight, dense(layer.down).bias))


def in_residual(name: str, **fields: float) -> Change:
    def define(definition: DecoderDefinition) -> DecoderDefinition:
        layers = []
        for layer in definition.layers:
            assert isinstance(layer.residual, ResidualFactors)
            layers.append(replace(layer, residual=replace(layer.residual, **fields)))
        return replace(definition, layers=tuple(layers))

    return Change(name, define=define)


def without_residuals(definition: DecoderDefinition) -> DecoderDefinition:
    return replace(definition, layers=tuple(replace(layer, residual=None) for layer in definition.layers))


def same_depth(definition: DecoderDefinition) -> DecoderDefinition:
    """Heads of all layers forget at the same rates."""
    layers = [
        replace(layer, attention=replace(layer.attention, depth=0.0))  # type: ignore[arg-type]
        if layer.attention.spec is not None and layer.attention.spec.kind is SpecKind.RECURRENT
        else layer
        for layer in definition.layers
    ]
    return replace(definition, layers=tuple(layers))


COMMON = [
    in_definition("norm epsilon", norm_epsilon=0.5),
    in_routing("share of the chosen experts", other_share),
    in_routing("number of experts a token", lambda x: replace(x, experts_per_token=x.experts_per_token - 1)),
    in_kind("query scale", SpecKind.RECURRENT, scale=1e-4),
]
KIMI_DELTA = [
    *COMMON,
    in_kind("score scale", SpecKind.LATENT, scale=1.0),
    in_latents("latent norm", without_latent_norm),
    in_routing("scores of the router", other_score),
    in_routing("scaling factor", lambda x: replace(x, scale=1.0)),
    in_expert_layers("shared experts", without_shared),
    in_expert_layers("correction", without_correction),
    in_kind("delta rule", SpecKind.RECURRENT, delta_rule=False),
    in_kind("length of keys", SpecKind.RECURRENT, unit_keys=False),
    in_delta("decay", lambda x: replace(x, log_rates=torch.full_like(x.log_rates, -50.0))),
    in_delta("bias of the decay", lambda x: replace(x, decay_bias=torch.zeros_like(x.decay_bias))),
    in_delta("order of the decay's bias", lambda x: replace(x, decay_bias=x.decay_bias.flip(0))),
    in_delta("convolution", without_past_inputs),
    in_delta("norm of the output", lambda x: replace(x, norm=no_norm(x.norm))),
    in_delta("shares", without_shares),
    in_delta("queries and keys", swapped(0, 1)),
    in_delta("decays and gates", swapped(4, 5)),
]
GROUPS = [in_routing("group limit", lambda x: replace(x, groups=None))]
LATENT_BIAS = [
    in_latents("biases of what x gives", lambda x: replace(x, down=without_bias(x.down))),
    in_latents("output bias", lambda x: replace(x, output=without_bias(x.output))),
]
BAILING = [
    *KIMI_DELTA,
    *GROUPS,
    in_rotary("rotary base", lambda rotary: replace(rotary, theta=rotary.theta * 10)),
    in_latents("gates of the heads", without_gates),
]
MINIMAX = [
    *COMMON,
    in_kind("score scale", SpecKind.SOFTMAX, scale=1.0),
    in_rotary("rotary base", lambda rotary: replace(rotary, theta=rotary.theta * 10)),
    in_lightning("decay", lambda x: replace(x, decay=torch.zeros_like(x.decay))),
    in_lightning("order of the decays", lambda x: replace(x, decay=x.decay.flip(0))),
    Change("decay by layer", define=same_depth),
    in_lightning("norm of the output", lambda x: replace(x, norm=no_norm(x.norm))),
    Change("what the parts add to", define=without_residuals),
    in_residual("what attention keeps", attention_kept=1.0),
    in_residual("what attention adds", attention_added=1.0),
    in_residual("what the feed-forward keeps", feed_forward_kept=1.0),
    in_residual("what the feed-forward adds", feed_forward_added=1.0),
]
FEATURES: dict[str, list[Change]] = {
    "kimi_linear": [
        *KIMI_DELTA,
        *GROUPS,
        in_rotary("no rotation", lambda rotary: replace(rotary, theta=100.0, rotated_dim=None)),
        in_delta("second products", other_second),
    ],
    "kimi_linear_low": [*KIMI_DELTA, *LATENT_BIAS, in_latents("query norm", without_query_norm)],
    "bailing_hybrid": [
        *BAILING,
        in_delta("bound of the decay", other_bound),
        in_delta("kind of the decay", lambda x: replace(x, decay_bound=None)),
    ],
    "bailing_hybrid_free": [
        *BAILING,
        *LATENT_BIAS,
        in_delta("kind of the decay", lambda x: replace(x, decay_bound=-5.0)),
    ],
    "minimax": MINIMAX,
    "minimax_window": [*MINIMAX, in_kind("window", SpecKind.SOFTMAX, window=None)],
}
CASES = [(family, change) for family, changes in FEATURES.items() for change in changes]


def test_every_family_has_features() -> None:
    assert set(FEATURES) == set(KIMI)


@pytest.mark.parametrize("family", KIMI)
def test_an_unchanged_model_is_within_the_tolerance(hybrids: Models, family: str) -> None:
    assert error_of(*hybrids[family], Change("nothing")) <= TOLERANCE


@pytest.mark.prove
@pytest.mark.parametrize(("family", "change"), of_families(CASES, "kimi_linear", "minimax"))
def test_disabling_a_feature_would_be_seen(hybrids: Models, family: str, change: Change) -> None:
    assert error_of(*hybrids[family], change) >= VISIBLE


def test_norms_of_a_divided_stream_are_those_of_the_whole_one() -> None:
    norm = NormDefinition(0.05)
    x = torch.randn(3, 8)
    whole, divided = (torch.nn.functional.rms_norm(x / by, (8,), eps=norm.of_divided(by).epsilon) for by in (1.0, 0.3))
    torch.testing.assert_close(divided, whole)


@pytest.mark.parametrize("family", KIMI)
def test_a_decoder_with_or_without_its_head_gives_the_vectors_of_transformers(
    hybrids: Models, family: str, tmp_path: Path
) -> None:
    model, _ = hybrids[family]
    texts, settings = random_prompts([1, 9, 4, 25], seed=2), EngineConfig(max_model_len=32)
    expected = torch.stack([reference_vector(model.model, text, "lasttoken") for text in texts])
    for name, saved in {"whole": model, "bare": model.model}.items():
        folder = save_embedder(saved, tmp_path / name, pooling="lasttoken")
        torch.testing.assert_close(vectors(open_tiny(folder, settings), texts), expected, atol=3e-5, rtol=0)
