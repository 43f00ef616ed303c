"""The published GLM configs leave nothing unread, and mean what transformers takes them to mean."""

from __future__ import annotations

import pytest
import torch
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from sightline.attention.spec import SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.layers.activation import Activation
from sightline.layers.rotary import RotarySpec, inverse_frequencies
from sightline.layers.routing import Routing, Score, Share
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward
from sightline.models.registry import define_model
from support.definitions import rotary_of, softmax_of

AIR: dict[str, object] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
WHOLE = AIR | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "use_qk_norm": True,
}


def define(config: dict[str, object]) -> DecoderDefinition:
    definition = define_model(config, Ledger(strict=True))
    assert isinstance(definition, DecoderDefinition)
    return definition


def test_what_the_published_configs_mean() -> None:
    air, whole = define(AIR), define(WHOLE)
    assert (len(air.layers), len(whole.layers)) == (46, 92)
    attention = softmax_of(whole.layers[0])
    assert attention.spec == SoftmaxSpec(96, 8, 128, 128**-0.5, None)
    assert (attention.tensors.qkv_bias, attention.tensors.output_bias) == (True, False)
    assert attention.tensors.qk_norm is not None
    assert softmax_of(air.layers[0]).tensors.qk_norm is None
    assert whole.layers[0].rotary == RotarySpec(128, 1e6, rotated_dim=64)
    assert attention.tensors.rotated_dim == 64
    assert [layer.feed_forward for layer in whole.layers[:3]] == [DenseFeedForward(12288, Activation.SILU)] * 3
    experts = whole.layers[3].feed_forward
    assert isinstance(experts, ExpertFeedForward)
    assert experts.routing == Routing(160, 8, Share.OF_CHOSEN, Score.SIGMOID, corrected=True, scale=2.5)
    assert experts.shared == DenseFeedForward(1536, Activation.SILU)


def test_the_layers_for_prediction_have_experts_even_if_no_other_layer_has() -> None:
    definition = define(WHOLE | {"first_k_dense_replace": 92, "num_nextn_predict_layers": 2})
    assert len(definition.predictors) == 2
    assert not any(isinstance(layer.feed_forward, ExpertFeedForward) for layer in definition.layers)
    assert all(isinstance(layer.feed_forward, ExpertFeedForward) for layer in definition.predictors)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 3.0}])
def test_the_frequencies_of_a_part_are_those_of_transformers(share: float, scaling: dict[str, object]) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share} | scaling
    settings = Glm4MoeConfig(hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters=dict(rope))
    expected = Glm4MoeRotaryEmbedding(settings).inv_freq
    fields = {name: value for name, value in AIR.items() if name not in ("rope_theta", "partial_rotary_factor")}
    got = inverse_frequencies(rotary_of(define(fields | {"head_dim": 32, "rope_parameters": rope}).layers[0]))
    assert got.shape == (16,)
    assert torch.equal(got[: len(expected)], expected)
    assert torch.equal(got[len(expected) :], torch.zeros(16 - len(expected)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial_rotary_factor": 0.03}, "rotates an even number of dimensions from 2 to 128, got 0.03: 3 dimensions"),
        ({"partial_rotary_factor": 1.5}, "rotates an even number of dimensions from 2 to 128, got 1.5"),
        ({"partial_rotary_factor": None}, "partial_rotary_factor to be a finite number above 0, got None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "got partial_rotary_factor = 0.5 and"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotated in part is not supported yet"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 changes the result"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' changes the result"),
        ({"sliding_window": 64}, "sliding_window = 64 changes the result"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' changes the result"),
        ({"num_mtp_layers": 1}, "num_mtp_layers = 1 changes the result"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        define(AIR | fields)
