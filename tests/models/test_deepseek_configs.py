"""The published DeepSeek configs leave nothing unread, mean what transformers takes them to mean, or are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.attention.spec import LatentSpec
from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.layers.activation import Activation
from sightline.layers.rotary import RotarySpec, YarnScaling
from sightline.layers.routing import Groups, Routing, Score, Share
from sightline.models.decoder import Decoder, DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from support.attention_cases import CPU
from support.definitions import latent_of
from support.tiny_models import make_model

YARN: dict[str, object] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
COMMON: dict[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
}
V2_LITE = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": YARN,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2 = V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3 = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2 = V3 | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
PUBLISHED = {"v2-lite": V2_LITE, "v2": V2, "v3": V3, "kimi-k2": KIMI_K2}


def define(config: dict[str, object]) -> DecoderDefinition:
    definition = define_model(config, Ledger(strict=True))
    assert isinstance(definition, DecoderDefinition)
    return definition


def experts_of(config: dict[str, object]) -> ExpertFeedForward:
    feed_forward = define(config).layers[-1].feed_forward
    assert isinstance(feed_forward, ExpertFeedForward)
    return feed_forward


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_config_as_it_is_published_leaves_nothing_unread(config: dict[str, object]) -> None:
    assert len(define(config).layers) == config["num_hidden_layers"]


def test_how_they_route() -> None:
    assert experts_of(V2_LITE).routing == Routing(64, 6, Share.OF_ALL)
    limited = Routing(160, 6, Share.OF_ALL, groups=Groups(8, 3, ranked_by=1), scale=16.0)
    assert experts_of(V2).routing == limited
    corrected = Routing(256, 8, Share.OF_CHOSEN, Score.SIGMOID, Groups(8, 4, ranked_by=2), corrected=True, scale=2.5)
    assert experts_of(V3).routing == corrected
    one_group = Routing(384, 8, Share.OF_CHOSEN, Score.SIGMOID, corrected=True, scale=2.827)
    assert experts_of(KIMI_K2).routing == one_group


def test_which_layers_have_experts_and_what_all_tokens_share() -> None:
    def kinds(**fields: object) -> list[bool]:
        layers = define(V3 | {"num_hidden_layers": 6} | fields).layers
        return [isinstance(layer.feed_forward, ExpertFeedForward) for layer in layers]

    assert kinds() == [False, False, False, True, True, True]
    assert kinds(first_k_dense_replace=0) == [True] * 6
    assert kinds(first_k_dense_replace=1, moe_layer_freq=2) == [False, False, True, False, True, False]
    assert define(V3).layers[0].feed_forward == DenseFeedForward(18432, Activation.SILU)
    assert experts_of(V3).shared == DenseFeedForward(2048, Activation.SILU)
    assert experts_of(V2_LITE).shared == DenseFeedForward(2816, Activation.SILU)
    assert experts_of(V3 | {"n_shared_experts": None}).shared is None


@pytest.mark.parametrize(("config", "mscale"), [(V2_LITE, 0.707), (V3, 1.0)])
def test_yarn_scales_the_scores_and_leaves_cosines_where_both_mscale_are_the_same(
    config: dict[str, object], mscale: float
) -> None:
    layer = define(config).layers[0]
    growth = 0.1 * mscale * math.log(40) + 1.0
    assert latent_of(layer).spec.scale == pytest.approx(192**-0.5 * growth**2)
    yarn = YarnScaling(40.0, 32.0, 1.0, 4096, truncate=True, attention_factor=1.0)
    assert layer.rotary == RotarySpec(64, 10000.0, yarn)


def test_without_yarn_scores_have_the_plain_scale() -> None:
    layer = define(V3 | {"rope_scaling": None}).layers[0]
    heads = {"num_q_heads": 128, "latent_dim": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128}
    assert layer.attention.spec == LatentSpec(**heads, scale=192**-0.5)
    assert layer.rotary == RotarySpec(64, 10000.0)
    unsaid = {name: value for name, value in YARN.items() if name != "mscale_all_dim"}
    assert latent_of(define(V3 | {"rope_scaling": unsaid}).layers[0]).spec.scale == 192**-0.5


def test_queries_and_pairs() -> None:
    lite, third = latent_of(define(V2_LITE).layers[0]), latent_of(define(V3).layers[0])
    assert (lite.query_rank, third.query_rank) == (None, 1536)
    assert lite.paired_neighbours
    assert third.paired_neighbours
    assert not latent_of(define(V3 | {"rope_interleave": False}).layers[0]).paired_neighbours
    assert latent_of(define(V3 | {"rms_norm_eps": 1e-3}).layers[0]).norms.epsilon == 1e-6


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        *((config, "quantization_config", {"quant_method": "fp8"}) for config in PUBLISHED.values()),
        *((config, "hidden_act", "gelu") for config in PUBLISHED.values()),
        *((config, "num_key_value_heads", 8) for config in PUBLISHED.values()),
        *((config, "head_dim", 128) for config in PUBLISHED.values()),
        *((config, "qk_head_dim", 128) for config in PUBLISHED.values()),
        (V2, "scoring_func", "sigmoid"),
        (V2, "norm_topk_prob", True),
        (V2, "rope_interleave", False),
        (V2, "mlp_bias", True),
        (V3, "scoring_func", "softmax"),
        (V3, "topk_method", "greedy"),
    ],
)
def test_a_field_that_changes_the_result_and_is_not_supported_is_refused(
    config: dict[str, object], field: str, value: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{field} = .* changes the result and is not supported"):
        define(config | {field: value})


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (V2, {"topk_method": "noaux_tc"}, "topk_method to be one of greedy, group_limited_greedy, got 'noaux_tc'"),
        (V2, {"n_group": None}, "expected n_group and topk_group"),
        (V2, {"n_group": 7}, "160 experts in equal groups"),
        (V2, {"topk_group": 9}, "from 1 to 8 groups for a token, got 9"),
        (V2, {"num_experts_per_tok": 61}, "at most the 60 experts of a token's groups, got 61"),
        (V3, {"n_group": 256}, "equal groups of at least 2"),
        (V3, {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers to be an integer from 0 to 4096"),
        (V3, {"num_experts_per_tok": 0}, "num_experts_per_tok to be an integer from 1"),
        (V3, {"n_routed_experts": 10**6}, "n_routed_experts to be an integer from 1 to 4096"),
        (V3, {"rope_scaling": YARN | {"type": "dynamic"}}, "would depend on the rows beside it"),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": "1"}}, "a finite number above 0 for mscale_all_dim"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(
    config: dict[str, object], fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        define(config | fields)


PREDICTOR = {
    "model.layers.3.eh_proj.weight": torch.ones(48, 96),
    "model.layers.3.mlp.gate.weight": torch.ones(12, 48),
    "model.layers.3.shared_head.head.weight": torch.ones(101, 48),
}


def folder_with_predictor(folder: Path, num_predictors: int) -> Path:
    make_model("deepseek_v3").save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | PREDICTOR, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": num_predictors}))
    return folder


def load(folder: Path, ledger: Ledger) -> Decoder:
    checkpoint = open_checkpoint(folder, ledger)
    definition = define_model(checkpoint.config, ledger)
    assert isinstance(definition, DecoderDefinition)
    return definition.load(WeightReader(checkpoint, torch.float32, CPU, ledger, lambda done, total: None))


def test_layers_that_guess_further_tokens_are_left_and_named(tmp_path: Path) -> None:
    folder, ledger = folder_with_predictor(tmp_path, 1), Ledger()
    assert len(load(folder, ledger).states.layers) == 3
    [entry] = ledger.notes
    assert entry.subject == "multi-token prediction"
    assert "3 tensors model.layers.3.* are not loaded" in entry.fact
    assert len(load(folder, Ledger(strict=True)).states.layers) == 3, "the answers are the same"


def test_layers_beyond_the_last_that_the_config_does_not_speak_of_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got 3 that it would ignore: model\.layers\.3"):
        load(folder_with_predictor(tmp_path, 0), Ledger())
