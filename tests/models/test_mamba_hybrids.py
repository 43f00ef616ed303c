"""Nemotron-H, Granite 4 and LFM2 give the logits of transformers however sequences are cut, and features are seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightline.attention.contract import ConvWeights
from sightline.attention.kinds import SpecKind
from sightline.core.ledger import Ledger
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.activation import Activation
from sightline.layers.attention import SoftmaxAttention
from sightline.layers.linear import Linear
from sightline.layers.mlp import SelfGatedMlp
from sightline.layers.moe import ExpertCompute, ExpertMlp, NarrowExperts, SeparateExperts
from sightline.layers.norm import GroupNorm
from sightline.layers.recurrent.mamba import Mamba
from sightline.layers.recurrent.short_convolution import ShortConvolution
from sightline.models.contract import Taps
from sightline.models.decoder_layer import DecoderLayer
from sightline.models.loading.opening import open_checkpoint
from sightline.models.random_weights import RandomCheckpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.build import assemble_runtime, build_runtime, make_store
from support.attention_cases import CPU
from support.case_marks import of_families, routine
from support.changed_runtimes import error_of
from support.features import (
    Change,
    in_definition,
    in_expert_layers,
    in_kind,
    in_layer,
    in_mixers,
    in_rotary,
    in_routing,
    other_share,
    without_correction,
)
from support.hybrid_checks import (
    ONE_SHOT,
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
from support.tiny_mamba import MAMBA_HYBRIDS
from support.tiny_models import (
    Models,
    load_runtime,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
)

MAMBA = [family for family in MAMBA_HYBRIDS if not family.startswith("lfm2")]
LFM2 = [family for family in MAMBA_HYBRIDS if family.startswith("lfm2")]


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_hybrids(tmp_path_factory, MAMBA_HYBRIDS)


@every_chunk
@pytest.mark.parametrize("family", MAMBA_HYBRIDS)
def test_stepped_logits_equal_a_full_forward(hybrids: Models, family: str, chunk: int) -> None:
    assert_steps_equal_a_full_forward(*hybrids[family], chunk)


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("nemotron_h", {SpecKind.RECURRENT: (0, 3, 4), SpecKind.SOFTMAX: (2, 6)}),
        ("nemotron_h_moe", {SpecKind.RECURRENT: (1, 4), SpecKind.SOFTMAX: (3,)}),
        ("granite_hybrid", {SpecKind.RECURRENT: (0, 2, 3), SpecKind.SOFTMAX: (1,)}),
        ("lfm2", {SpecKind.CONVOLUTION: (0, 2), SpecKind.SOFTMAX: (1, 3)}),
    ],
)
def test_layers_are_grouped_by_kind_and_feed_forwards_are_in_no_group(
    hybrids: Models, family: str, groups: dict[SpecKind, tuple[int, ...]]
) -> None:
    bindings = load_runtime(hybrids[family][1], config()).bindings
    assert {binding.group.spec.kind: binding.group.layers for binding in bindings} == groups


@pytest.mark.parametrize(
    "family", routine({name: name for name in MAMBA_HYBRIDS}, "nemotron_h", "granite_hybrid", "lfm2")
)
def test_greedy_answers_are_those_of_transformers(hybrids: Models, family: str) -> None:
    assert_greedy_answers(*hybrids[family])


def changed_config(folder: Path, into: Path, **fields: object) -> Path:
    """A copy of the model with other config fields; None takes a field away."""
    described = json.loads((folder / "config.json").read_text()) | fields
    kept = {name: value for name, value in described.items() if value is not None}
    (into / "config.json").write_text(json.dumps(kept))
    (into / "model.safetensors").symlink_to(folder / "model.safetensors")
    return into


def test_the_letters_of_a_pattern_are_the_kinds_of_layers(hybrids: Models, tmp_path: Path) -> None:
    _, folder = hybrids["nemotron_h"]
    ledger = Ledger(strict=True)
    listed = define_model(open_checkpoint(folder, ledger).config, ledger)
    older = changed_config(
        folder, tmp_path, layers_block_type=None, hybrid_override_pattern="M-*MM-*-", num_hidden_layers=8
    )
    assert define_model(open_checkpoint(older, ledger).config, ledger) == listed


@pytest.mark.parametrize("prefix", ["backbone", "model"])
def test_nemotron_h_is_read_under_either_prefix(hybrids: Models, tmp_path: Path, prefix: str) -> None:
    model, folder = hybrids["nemotron_h_moe"]
    tensors = load_file(folder / "model.safetensors")
    assert "backbone.embeddings.weight" in tensors
    renamed = {name.replace("backbone.", f"{prefix}."): each for name, each in tensors.items()}
    save_file(renamed | {"mtp.layers.0.norm.weight": torch.ones(48)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    ledger = Ledger(strict=True)
    runtime = build_runtime(config(), open_checkpoint(tmp_path, ledger), ledger)
    assert any("1 tensors mtp.* are not loaded" in note.fact for note in ledger.notes)
    assert_equal_to_transformers(model, runtime, (9,), 7, 3)


def test_granites_experts_are_read_under_the_names_that_transformers_uses_inside(
    hybrids: Models, tmp_path: Path
) -> None:
    model, folder = hybrids["granite_hybrid_moe"]
    names = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }
    tensors = load_file(folder / "model.safetensors")
    for stored, inside in names.items():
        tensors = {
            name.replace(f"block_sparse_moe.{stored}", f"block_sparse_moe.{inside}"): each
            for name, each in tensors.items()
        }
    assert "model.layers.0.block_sparse_moe.experts.gate_up_proj" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_equal_to_transformers(model, load_runtime(tmp_path, config()), (9,), 7, 3)


def test_time_is_limited_in_steps_of_any_length(hybrids: Models, tmp_path: Path) -> None:
    """transformers limits it in steps of several tokens only."""
    _, folder = hybrids["granite_hybrid"]
    limited = changed_config(folder, tmp_path, time_step_limit=[0.2, 0.4])
    model = type(hybrids["granite_hybrid"][0]).from_pretrained(limited, dtype=torch.float32)
    [sequence] = random_prompts([40])
    expected = reference_logits(model, sequence)[19:]
    assert relative_error(reference_logits(hybrids["granite_hybrid"][0], sequence)[19:], expected) >= VISIBLE
    for chunk in (1, 7, ONE_SHOT):
        [got] = stepped_logits(load_runtime(limited, config()), [sequence], [20], chunk)
        assert relative_error(got, expected) <= TOLERANCE


def test_nemotron_h_has_no_least_time_of_a_token(hybrids: Models, tmp_path: Path) -> None:
    """transformers decodes without one, and prefills with `time_step_min`."""
    model, folder = hybrids["nemotron_h"]
    described = changed_config(folder, tmp_path, time_step_min=0.9)
    other = type(model).from_pretrained(described, dtype=torch.float32)
    [sequence] = random_prompts([24])
    expected = reference_logits(model, sequence)[:-1]
    with torch.no_grad():
        cache, decoded = None, []
        for token in sequence[:-1]:
            output = other(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            decoded.append(output.logits[0, -1])
    # The first token is a prefill, and its time is limited; whatever follows is not.
    assert relative_error(reference_logits(other, sequence)[:-1], expected) >= VISIBLE
    assert relative_error(decoded[-1], reference_logits(other, sequence)[-2]) >= VISIBLE
    [got] = stepped_logits(load_runtime(described, config()), [sequence], [1], 1)
    assert relative_error(got[:-1], expected) <= TOLERANCE


def test_streams_of_a_model_with_a_residual_multiplier_are_refused(hybrids: Models) -> None:
    ledger = Ledger()
    checkpoint = open_checkpoint(hybrids["granite_hybrid"][1], ledger)
    definition = define_model(checkpoint.config, ledger)
    weights = WeightReader(checkpoint, torch.float32, CPU, ledger, lambda done, total: None)
    with pytest.raises(ValueError, match="a model with a residual multiplier are not supported yet"):
        definition.load(weights, Taps((1,)))


def in_mamba(name: str, change: Callable[[Mamba], Mamba]) -> Change:
    return in_mixers(name, Mamba, change)


def in_convolution(name: str, change: Callable[[ShortConvolution], ShortConvolution]) -> Change:
    return in_mixers(name, ShortConvolution, change)


def in_softmax(name: str, change: Callable[[SoftmaxAttention], SoftmaxAttention]) -> Change:
    return in_mixers(name, SoftmaxAttention, change)


def in_self_gated(name: str, change: Callable[[SelfGatedMlp], SelfGatedMlp]) -> Change:
    def changed(layer: DecoderLayer) -> DecoderLayer:
        return replace(layer, mlp=change(layer.mlp)) if isinstance(layer.mlp, SelfGatedMlp) else layer

    return in_layer(name, changed)


def with_rows(layer: Mamba, change: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> Mamba:
    """The layer with other rows for C, B, values, gate and times."""
    spec = layer.spec
    keys, size = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
    inputs = dense(layer.inputs)
    ends = torch.tensor([keys, keys, size, size, spec.num_heads]).cumsum(0)
    parts = change(*torch.tensor_split(inputs.weight, ends[:-1]))
    return replace(layer, inputs=Linear(torch.cat(parts), inputs.bias))


def without_past_inputs(conv: ConvWeights) -> ConvWeights:
    weight = conv.weight.clone()
    weight[:, :-1] = 0.0
    return conv._replace(weight=weight)


def one_group(layer: Mamba) -> Mamba:
    return replace(layer, norm=GroupNorm(layer.norm.weight.view(1, -1), layer.norm.epsilon))


def other_heads(layer: Mamba) -> Mamba:
    """Heads read the groups in turns instead of group by group."""
    spec = layer.spec

    def turned(values: Tensor) -> Tensor:
        heads = values.view(spec.num_key_heads, spec.group_size, spec.value_dim, -1)
        return heads.transpose(0, 1).reshape(values.shape)

    return with_rows(layer, lambda c, b, x, z, t: (c, b, turned(x), z, t))


def squared_once(layer: SelfGatedMlp) -> SelfGatedMlp:
    """The feed-forward with SiLU for ReLU."""
    return replace(layer, activation=Activation.SILU)


def not_self_gated(mlp: ExpertMlp) -> ExpertMlp:
    assert isinstance(mlp.bank, SeparateExperts)
    experts = tuple(replace(expert, gate=Activation.SILU) for expert in mlp.bank.experts)
    return replace(mlp, bank=SeparateExperts(experts))


def in_narrow(name: str, change: Callable[[NarrowExperts], NarrowExperts]) -> Change:
    def changed(mlp: ExpertMlp) -> ExpertMlp:
        assert isinstance(mlp.bank, NarrowExperts)
        return replace(mlp, bank=change(mlp.bank))

    return in_expert_layers(name, changed)


COMMON = [
    in_definition("norm epsilon", norm_epsilon=0.5),
    in_kind("score scale", SpecKind.SOFTMAX, scale=2.0),
]
OF_MAMBA = [
    in_mamba("decay", lambda x: replace(x, steps=replace(x.steps, log_rates=torch.full_like(x.skip, -50.0)))),
    in_mamba("bias of the time", lambda x: replace(x, steps=replace(x.steps, bias=torch.zeros_like(x.skip)))),
    in_mamba("limits of the time", lambda x: replace(x, steps=replace(x.steps, least=0.5, most=0.6))),
    in_mamba("skip", lambda x: replace(x, skip=torch.zeros_like(x.skip))),
    in_mamba("convolution", lambda x: replace(x, conv=without_past_inputs(x.conv))),
    in_mamba("gate of the output", lambda x: with_rows(x, lambda c, b, v, z, t: (c, b, v, z.flip(0), t))),
    in_mamba("B and C", lambda x: with_rows(x, lambda c, b, v, z, t: (b, c, v, z, t))),
    in_mamba("rows of the times", lambda x: with_rows(x, lambda c, b, v, z, t: (c, b, v, z, t.flip(0)))),
    in_mamba("groups of the heads", other_heads),
    in_mamba("epsilon of the gated norm", lambda x: replace(x, norm=GroupNorm(x.norm.weight, 0.5))),
    in_mamba("weight of the gated norm", lambda x: replace(x, norm=GroupNorm(torch.ones_like(x.norm.weight), 1e-5))),
]
OF_LFM2 = [
    in_rotary("rotary base", lambda rotary: replace(rotary, theta=rotary.theta * 10)),
    in_softmax("query and key norms", lambda x: replace(x, norms=None)),
    in_convolution("convolution", lambda x: replace(x, conv=without_past_inputs(x.conv))),
    in_convolution("rows of the gates", lambda x: replace(x, inputs=rolled(x))),
]
PROJECTION_BIAS = [
    in_mamba("bias of the inputs", lambda x: replace(x, inputs=without_bias(x.inputs))),
    in_mamba("bias of the output", lambda x: replace(x, output=without_bias(x.output))),
]
CONV_BIAS = in_mamba("bias of the convolution", lambda x: replace(x, conv=x.conv._replace(bias=None)))
ROUTING = [
    in_routing("share of the chosen experts", other_share),
    in_routing("number of experts a token", lambda x: replace(x, experts_per_token=x.experts_per_token - 1)),
]
SCALED_ROUTING = [
    *ROUTING,
    in_routing("scaling factor", lambda x: replace(x, scale=1.0)),
    in_expert_layers("correction", without_correction),
]
MULTIPLIERS = [
    in_definition("embedding multiplier", embedding_scale=1.0),
    in_definition("residual multiplier", residual_scale=1.0),
    in_definition("logits scaling", logit_scale=1.0),
]


def rolled(layer: ShortConvolution) -> Linear:
    """Another order of input gate, output gate and values."""
    inputs = dense(layer.inputs)
    return Linear(inputs.weight.roll(layer.spec.channels, 0), inputs.bias)


FEATURES: dict[str, list[Change]] = {
    "nemotron_h": [
        *COMMON,
        *OF_MAMBA,
        *PROJECTION_BIAS,
        CONV_BIAS,
        in_mamba("groups of the gated norm", one_group),
        in_self_gated("squared ReLU", squared_once),
        in_self_gated("bias of up", lambda x: replace(x, up=without_bias(x.up))),
        in_self_gated("bias of down", lambda x: replace(x, down=without_bias(x.down))),
    ],
    "nemotron_h_moe": [
        *COMMON,
        *OF_MAMBA,
        *SCALED_ROUTING,
        in_mamba("groups of the gated norm", one_group),
        in_expert_layers("squared ReLU of experts", not_self_gated),
        in_expert_layers("shared feed-forward", lambda x: replace(x, shared=None)),
    ],
    "nemotron_h_narrow": [
        *SCALED_ROUTING,
        in_narrow("bias of the inputs", lambda x: replace(x, inwards=without_bias(x.inwards))),
        in_narrow("bias of the sum", lambda x: replace(x, outwards=without_bias(x.outwards))),
        in_expert_layers("shared feed-forward", lambda x: replace(x, shared=None)),
    ],
    "granite_hybrid": [
        *COMMON,
        *OF_MAMBA,
        *MULTIPLIERS,
        *PROJECTION_BIAS,
        CONV_BIAS,
        in_softmax("query, key and value biases", lambda x: replace(x, qkv=without_bias(x.qkv))),
        in_softmax("output bias", lambda x: replace(x, output=without_bias(x.output))),
    ],
    "granite_hybrid_moe": [
        *COMMON,
        *OF_MAMBA,
        *MULTIPLIERS,
        *ROUTING,
        in_rotary("rotary base", lambda rotary: replace(rotary, theta=rotary.theta * 10)),
        in_expert_layers("shared feed-forward", lambda x: replace(x, shared=None)),
    ],
    "lfm2": [
        *COMMON,
        *OF_LFM2,
        in_convolution("bias of the convolution", lambda x: replace(x, conv=x.conv._replace(bias=None))),
        in_convolution("bias of the inputs", lambda x: replace(x, inputs=without_bias(x.inputs))),
        in_convolution("bias of the output", lambda x: replace(x, output=without_bias(x.output))),
    ],
    "lfm2_moe": [*COMMON, *OF_LFM2, *SCALED_ROUTING],
}
CASES = [(family, change) for family, changes in FEATURES.items() for change in changes]


def test_every_family_has_features() -> None:
    assert set(FEATURES) == set(MAMBA_HYBRIDS)


@pytest.mark.parametrize("family", MAMBA_HYBRIDS)
def test_an_unchanged_model_is_within_the_tolerance(hybrids: Models, family: str) -> None:
    assert error_of(*hybrids[family], Change("nothing")) <= TOLERANCE


@pytest.mark.prove
@pytest.mark.parametrize(("family", "change"), of_families(CASES, "nemotron_h"))
def test_disabling_a_feature_would_be_seen(hybrids: Models, family: str, change: Change) -> None:
    assert error_of(*hybrids[family], change) >= VISIBLE


@pytest.mark.parametrize("family", MAMBA_HYBRIDS)
def test_random_weights_have_the_tensors_of_a_saved_model_and_give_finite_logits(hybrids: Models, family: str) -> None:
    folder = hybrids[family][1]
    stored = {name: info.shape for name, info in open_checkpoint(folder, Ledger()).tensors.items()}
    made = RandomCheckpoint(folder / "config.json", CPU, Ledger(strict=True))
    assert {name: info.shape for name, info in made.tensors.items()} == stored
    runtime = build_runtime(config(), made, Ledger())
    for logits in stepped_logits(runtime, random_prompts([9, 40]), prompt_lens=[8, 30], chunk=16):
        assert logits.isfinite().all()
        assert logits.std() > 0.02


@pytest.mark.prove
@pytest.mark.parametrize("family", ["nemotron_h_moe", "granite_hybrid_moe"])
def test_experts_at_once_give_the_logits_of_transformers(hybrids: Models, family: str) -> None:
    pytest.importorskip("triton")
    model, folder = hybrids[family]
    checkpoint = open_checkpoint(folder, Ledger())
    reader = WeightReader(
        checkpoint, torch.float32, CPU, Ledger(), lambda *_: None, expert_compute=ExpertCompute.AT_ONCE
    )
    definition = define_model(checkpoint.config, Ledger())
    base, groups = load_runtime(folder, config()), definition.groups()
    runtime = assemble_runtime(
        base.config,
        definition,
        definition.load(reader),
        groups,
        base.selections,
        make_store(base.config, groups),
        inline_launcher(),
    )
    assert_equal_to_transformers(model, runtime, (7,), 6, 1)
