"""Configs of Kimi Linear, Bailing hybrids and MiniMax mean what transformers takes them to mean, or are refused."""

from __future__ import annotations

import json

import pytest
from transformers import BailingHybridConfig, MiniMaxConfig

from sightline.attention.kinds import SpecKind
from sightline.attention.spec import LatentSpec, RecurrentSpec, SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.layers.activation import Activation
from sightline.layers.rotary import RotarySpec, inverse_frequencies
from sightline.layers.routing import Groups, Routing, Score, Share
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward
from sightline.models.layer_definition import ResidualFactors
from sightline.models.recurrent.kimi_delta import KimiDeltaDefinition
from sightline.models.recurrent.lightning import LightningDefinition
from sightline.models.registry import define_model
from support.definitions import latent_of, softmax_of

LATENT_LAYERS = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR: dict[str, object] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": LATENT_LAYERS,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in LATENT_LAYERS],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
BAILING: dict[str, object] = {
    **json.loads(BailingHybridConfig().to_json_string(use_diff=False)),
    "architectures": ["BailingHybridForCausalLM"],
}
MINIMAX: dict[str, object] = {
    **json.loads(MiniMaxConfig().to_json_string(use_diff=False)),
    "architectures": ["MiniMaxForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attn_alpha_factor": 3.5,
    "linear_attn_beta_factor": 2.0,
}
PUBLISHED = {"kimi-linear": KIMI_LINEAR, "bailing-hybrid": BAILING, "minimax": MINIMAX}


def define(config: dict[str, object], ledger: Ledger | None = None) -> DecoderDefinition:
    return define_model(config, ledger or Ledger(strict=True))


def delta_of(definition: DecoderDefinition, layer: int) -> KimiDeltaDefinition:
    attention = definition.layers[layer].attention
    assert isinstance(attention, KimiDeltaDefinition)
    return attention


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_whole_config_leaves_nothing_unread(config: dict[str, object]) -> None:
    assert len(define(config).layers) == config["num_hidden_layers"]


def test_a_config_of_kimi_linear_gives_its_layers() -> None:
    definition = define(KIMI_LINEAR)
    kinds = [spec.kind for spec in definition.attention_specs() if spec is not None]
    assert [index + 1 for index, kind in enumerate(kinds) if kind is SpecKind.LATENT] == LATENT_LAYERS
    latent = latent_of(definition.layers[3])
    heads = {"num_q_heads": 32, "latent_dim": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128}
    assert latent.spec == LatentSpec(**heads, scale=192**-0.5)
    assert (latent.query_rank, latent.gated, latent.norms.epsilon) == (None, False, 1e-6)
    recurrent = delta_of(definition, 0)
    delta = {"delta_rule": True, "channel_decay": True, "unit_keys": True, "conv_width": 4}
    assert recurrent.spec == RecurrentSpec(32, 32, 128, 128, 128**-0.5, **delta)  # type: ignore[arg-type]
    assert (recurrent.rank, recurrent.decay_bound, recurrent.norms.epsilon) == (128, None, 1e-5)
    assert definition.layers[0].feed_forward == DenseFeedForward(9216, Activation.SILU)
    experts = definition.layers[1].feed_forward
    assert isinstance(experts, ExpertFeedForward)
    assert experts.routing == Routing(256, 8, Share.OF_CHOSEN, Score.SIGMOID, corrected=True, scale=2.446)
    assert experts.shared == DenseFeedForward(1024, Activation.SILU)
    assert definition.max_positions == 1048576


def test_latent_layers_of_kimi_linear_have_rope_dimensions_that_do_not_turn() -> None:
    definition = define(KIMI_LINEAR)
    assert definition.layers[0].rotary is None
    rotary = definition.layers[3].rotary
    assert rotary == RotarySpec(64, 1.0, rotated_dim=0)
    assert inverse_frequencies(rotary).tolist() == [0.0] * 32


def test_fields_of_the_section_may_be_plain_fields_and_kinds_may_be_listed() -> None:
    """As transformers writes them."""
    plain = {name: value for name, value in KIMI_LINEAR.items() if name != "linear_attn_config"}
    kinds = ["full_attention" if layer in LATENT_LAYERS else "linear_attention" for layer in range(1, 28)]
    heads = {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    assert define(plain | heads | {"layer_types": kinds}) == define(KIMI_LINEAR)


def test_a_config_of_a_bailing_hybrid_gives_its_layers() -> None:
    definition = define(BAILING)
    assert [layer.rotary is not None for layer in definition.layers] == [(index + 1) % 6 == 0 for index in range(42)]
    latent, recurrent = latent_of(definition.layers[5]), delta_of(definition, 0)
    assert latent.gated
    assert latent.paired_neighbours
    assert definition.layers[5].rotary == RotarySpec(64, 6e6)
    assert recurrent.spec.key_dim == 128
    assert (recurrent.rank, recurrent.decay_bound) == (None, -5.0)
    experts = definition.layers[2].feed_forward
    assert isinstance(experts, ExpertFeedForward)
    limited = Groups(8, 4, ranked_by=2)
    assert experts.routing == Routing(512, 8, Share.OF_CHOSEN, Score.SIGMOID, limited, corrected=True, scale=2.5)
    assert not any(isinstance(layer.feed_forward, ExpertFeedForward) for layer in definition.layers[:2])
    assert [each.prefix for each in definition.beside] == ["model.layers.42."]
    assert definition.predictors == ()


def test_recurrent_heads_of_a_bailing_hybrid_are_those_of_head_dim_unless_they_have_their_own() -> None:
    own = {name: value for name, value in BAILING.items() if not name.startswith("linear_")}
    assert delta_of(define(own | {"head_dim": 96}), 0).spec.key_dim == 96
    assert delta_of(define(BAILING | {"head_dim": 64}), 0).spec.key_dim == 128
    assert delta_of(define(BAILING | {"kda_safe_gate": False}), 0).decay_bound is None


def test_a_config_of_minimax_gives_its_layers() -> None:
    definition = define(MINIMAX)
    lightning = definition.layers[1].attention
    assert isinstance(lightning, LightningDefinition)
    plain = {"delta_rule": False, "channel_decay": False, "unit_keys": False, "conv_width": 0}
    assert lightning.spec == RecurrentSpec(32, 32, 128, 128, 1.0, **plain)  # type: ignore[arg-type]
    assert softmax_of(definition.layers[3]).spec == SoftmaxSpec(32, 8, 128, 128**-0.5)
    assert definition.layers[1].residual == ResidualFactors(1.0, 2.0, 1.0, 1.0)
    assert definition.layers[3].residual == ResidualFactors(3.5, 1.0, 1.0, 1.0)
    experts = definition.layers[0].feed_forward
    assert isinstance(experts, ExpertFeedForward)
    assert experts.routing == Routing(8, 2, Share.OF_CHOSEN)
    assert experts.shared is None
    # Heads forget more slowly from the first to the last, and in upper layers.
    rates = [layer.attention.rates() for layer in definition.layers[:3]]  # type: ignore[union-attr]
    assert all(bool((each.diff() < 0.0).all()) for each in rates)
    assert bool((rates[0] > rates[1]).all())
    assert bool((rates[1] > rates[2]).all())


def test_a_predictor_that_cannot_be_used_is_not_offered_to_a_drafter() -> None:
    assert define(BAILING | {"num_nextn_predict_layers": 0}).beside == ()
    assert define(BAILING).predictors == ()


SECTION = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        *((config, {"hidden_act": "gelu"}, "hidden_act = 'gelu' changes") for config in PUBLISHED.values()),
        *((config, {"is_causal": False}, "is_causal = False") for config in PUBLISHED.values()),
        *((config, {"quantization_config": {"a": 1}}, "quantization_config") for config in PUBLISHED.values()),
        (KIMI_LINEAR, {"mla_use_nope": False}, "mla_use_nope = False changes"),
        (KIMI_LINEAR, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        (KIMI_LINEAR, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1 changes"),
        (KIMI_LINEAR, {"num_key_value_heads": 8}, "num_key_value_heads = 8 changes"),
        (KIMI_LINEAR, {"n_group": 2}, "n_group = 2 and num_expert_group = 1, which are the same"),
        (KIMI_LINEAR, {"linear_head_dim": 64}, "linear_head_dim = 64 changes"),
        (KIMI_LINEAR, {"linear_attn_config": SECTION | {"novelty": 1}}, "an object of full_attn_layers"),
        (
            KIMI_LINEAR,
            {"linear_attn_config": SECTION | {"full_attn_layers": [1], "kda_layers": [1, 2]}},
            "every layer from 1 to 27 once",
        ),
        (KIMI_LINEAR, {"linear_attn_config": SECTION | {"short_conv_kernel_size": 1}}, "at least 2 tokens"),
        (BAILING, {"kda_lower_bound": 5.0}, "a finite number below 0, got 5.0"),
        (BAILING, {"short_conv_kernel_size": 3}, "which are the same"),
        (BAILING, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        (MINIMAX, {"mlp_beta_factor": 1e30}, "mlp_beta_factor from 0.0001 to 10000.0"),
        (MINIMAX, {"rotary_dim": 64}, "rotary_dim = 64 changes the result of other families"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, object], fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        define(config | fields)
