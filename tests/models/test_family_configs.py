"""Each family's config means what transformers takes it to mean; published configs leave nothing unread."""

from __future__ import annotations

import math

import pytest
from transformers import Qwen2Config, Qwen3Config

from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.layers.activation import Activation, ClampedSwiglu
from sightline.layers.rotary import RotarySpec, YarnScaling
from sightline.layers.routing import Routing, Share
from sightline.models.attention import AttentionTensors, SoftmaxAttentionDefinition
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward
from sightline.models.norms import NormDefinition
from sightline.models.registry import define_model
from support.definitions import rotary_of, softmax_of

COMMON: dict[str, object] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "vocab_size": 100,
}
MISTRAL = COMMON | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
QWEN2 = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_window_layers": 2,
    "sliding_window": 32,
    "use_mrope": False,
    "use_sliding_window": False,
}
QWEN3 = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 32,
    "max_window_layers": 2,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
GEMMA2 = COMMON | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 144,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "tie_word_embeddings": True,
}
GPT_OSS = COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 2,
    "head_dim": 16,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
PUBLISHED = {
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gemma2": GEMMA2,
    "gpt_oss": GPT_OSS,
}


def define(config: dict[str, object], *without: str) -> DecoderDefinition:
    kept = {name: value for name, value in config.items() if name not in without}
    definition = define_model(kept, Ledger(strict=True))
    assert isinstance(definition, DecoderDefinition)
    return definition


def windows(definition: DecoderDefinition) -> list[int | None]:
    return [softmax_of(layer).spec.window for layer in definition.layers]


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_config_as_it_is_published_leaves_nothing_unread(config: dict[str, object]) -> None:
    assert len(define(config).layers) == 4


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        *((config, "quantization_config", {"quant_method": "fp8"}) for config in PUBLISHED.values()),
        *((config, "partial_rotary_factor", 0.5) for config in PUBLISHED.values()),
        *((config, "hidden_act", "gelu") for config in PUBLISHED.values()),
        (MISTRAL, "layer_types", ["full_attention"] * 4),
        (QWEN2, "use_mrope", True),
        (QWEN3_MOE, "layer_types", ["full_attention"] * 4),
        (QWEN3_MOE | {"num_local_experts": 8}, "num_experts", 9),
        (GEMMA2, "use_bidirectional_attention", True),
        (GEMMA2, "sliding_window_size", 17),
        (GPT_OSS, "experts_per_token", 4),
    ],
)
def test_a_field_that_changes_the_result_and_is_not_supported_is_refused(
    config: dict[str, object], field: str, value: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{field} = .* changes the result and is not supported"):
        define(config | {field: value})


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED.keys())
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused(config: dict[str, object], kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match="would depend on the rows beside it"):
        define(config | {"rope_scaling": {"rope_type": kind, "factor": 2.0}})


def test_mistrals_window_is_on_every_layer_unless_it_is_null() -> None:
    assert windows(define(MISTRAL | {"sliding_window": 7})) == [7] * 4
    assert windows(define(MISTRAL | {"sliding_window": None})) == [None] * 4
    assert windows(define(MISTRAL, "sliding_window")) == [4096] * 4


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 9},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "layer_types": ["sliding_attention"] + ["full_attention"] * 3},
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    ],
)
@pytest.mark.parametrize(("family", "oracle"), [("qwen2", Qwen2Config), ("qwen3", Qwen3Config)])
def test_qwen_windows_are_those_of_transformers(
    family: str, oracle: type[Qwen2Config] | type[Qwen3Config], fields: dict[str, object]
) -> None:
    config = oracle(num_hidden_layers=4, **{"sliding_window": 32, "max_window_layers": 2} | fields)
    expected = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    assert windows(define(PUBLISHED[family] | {"sliding_window": 32} | fields)) == expected


def test_layers_listed_as_windowed_need_a_window() -> None:
    with pytest.raises(UnsupportedModelError, match="expected a sliding_window for layers of kind sliding_attention"):
        define(QWEN2 | {"layer_types": ["sliding_attention"] * 4})
    for config in (GEMMA2, GPT_OSS):
        with pytest.raises(UnsupportedModelError, match="expected a sliding_window for layers"):
            define(config | {"sliding_window": None}, "sliding_window_size")


def test_qwens_window_with_experts_is_on_every_layer() -> None:
    on = QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 32}
    assert windows(define(on)) == [32] * 4
    assert windows(define(on | {"use_sliding_window": False})) == [None] * 4


def test_what_makes_the_qwens_differ() -> None:
    def attention(config: dict[str, object], *without: str) -> SoftmaxAttentionDefinition:
        return softmax_of(define(config, *without).layers[0])

    norms = NormDefinition(1e-6)
    assert attention(QWEN2).tensors == AttentionTensors(qkv_bias=True)
    assert attention(QWEN3).tensors == AttentionTensors(norms)
    biased = attention(QWEN3 | {"attention_bias": True})
    assert biased.tensors == AttentionTensors(norms, qkv_bias=True, output_bias=True)
    assert attention(QWEN2).spec.head_dim == 16
    assert attention(QWEN3, "head_dim").spec.head_dim == 128
    assert attention(QWEN3_MOE, "head_dim").spec.head_dim == 16


def test_which_of_qwens_layers_have_experts() -> None:
    def kinds(**fields: object) -> list[bool]:
        return [isinstance(layer.feed_forward, ExpertFeedForward) for layer in define(QWEN3_MOE | fields).layers]

    assert kinds() == [True] * 4
    assert kinds(decoder_sparse_step=2) == [False, True, False, True]
    assert kinds(mlp_only_layers=[0, 3]) == [False, True, True, False]
    assert kinds(mlp_only_layers=[1], decoder_sparse_step=2) == [False, False, False, True]
    dense = define(QWEN3_MOE | {"mlp_only_layers": [0]}).layers[0].feed_forward
    assert dense == DenseFeedForward(96, Activation.SILU)
    with pytest.raises(UnsupportedModelError, match="mlp_only_layers to be a list of different integers"):
        kinds(mlp_only_layers=["0"])


def experts_of(config: dict[str, object]) -> ExpertFeedForward:
    feed_forward = define(config).layers[0].feed_forward
    assert isinstance(feed_forward, ExpertFeedForward)
    return feed_forward


def test_how_qwen_routes() -> None:
    assert experts_of(QWEN3_MOE).routing == Routing(8, 2, Share.OF_CHOSEN)
    assert experts_of(QWEN3_MOE | {"norm_topk_prob": False}).routing == Routing(8, 2, Share.OF_ALL)
    assert experts_of(QWEN3_MOE | {"num_local_experts": 8}).intermediate_size == 24


@pytest.mark.parametrize("config", [QWEN3_MOE | {"num_local_experts": 8}, GPT_OSS])
@pytest.mark.parametrize(("num_experts", "per_token"), [(1, 2), (10**6, 2)])
def test_a_number_of_experts_that_makes_no_sense_is_refused(
    config: dict[str, object], num_experts: int, per_token: int
) -> None:
    counts = {"num_local_experts": num_experts, "num_experts_per_tok": per_token}
    with pytest.raises(UnsupportedModelError, match=f"expected from 2 experts, .*, got {num_experts}"):
        define(config | counts, "num_experts")


def test_gemma2s_caps_are_there_unless_they_are_null() -> None:
    absent = define(GEMMA2, "attn_logit_softcapping", "final_logit_softcapping")
    assert (softmax_of(absent.layers[0]).spec.softcap, absent.logit_softcap) == (50.0, 30.0)
    null = define(GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (softmax_of(null.layers[0]).spec.softcap, null.logit_softcap) == (None, None)
    assert softmax_of(absent.layers[0]).spec.scale == 144**-0.5


def test_gemma2s_windows_alternate_unless_the_config_lists_them() -> None:
    assert windows(define(GEMMA2)) == [16, None, 16, None]
    listed = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    assert windows(define(GEMMA2 | {"layer_types": listed})) == [None, None, 16, 16]


def test_what_makes_gpt_oss_differ() -> None:
    definition, experts = define(GPT_OSS), experts_of(GPT_OSS)
    assert windows(definition) == windows(define(GPT_OSS, "layer_types")) == [128, None, 128, None]
    assert all(softmax_of(layer).spec.sinks for layer in definition.layers)
    assert softmax_of(definition.layers[0]).tensors == AttentionTensors(qkv_bias=True, output_bias=True)
    assert experts.routing == Routing(8, 2, Share.OF_CHOSEN)
    assert experts.gate == ClampedSwiglu(alpha=1.702, limit=7.0)
    yarn = YarnScaling(32.0, 32.0, 1.0, 4096, truncate=False, attention_factor=0.1 * math.log(32.0) + 1.0)
    assert definition.layers[0].rotary == RotarySpec(16, 150000.0, yarn)
    assert define(GPT_OSS, "rope_scaling", "rope_theta").layers[0].rotary == RotarySpec(16, 150000.0, yarn)


def test_the_length_before_scaling_outside_of_the_rope_section_counts() -> None:
    definition = define(QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    scaling = rotary_of(definition.layers[0]).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.original_max_positions == 512
    outside = {"original_max_position_embeddings": 128, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    scaling = rotary_of(define(QWEN2 | outside).layers[0]).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.original_max_positions == 128
