"""The published configs of sparse models leave nothing unread, mean what transformers takes them to mean, or are
refused."""

from __future__ import annotations

import pytest
from transformers import GlmMoeDsaConfig

from sightline.attention.spec import IndexSpec
from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.decoder import DecoderDefinition
from sightline.models.indexer import IndexerDefinition
from sightline.models.registry import define_model
from support.definitions import latent_of

YARN: dict[str, object] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
COMMON: dict[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_topk": 2048,
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
V32 = COMMON | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": 7168,
    "index_n_heads": 64,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v32",
    "n_group": 8,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GLM_5 = COMMON | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "head_dim": 64,
    "hidden_size": 6144,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
KINDS = ["full"] * 3 + ["full" if layer % 4 == 2 else "shared" for layer in range(3, 78)]
GLM_52 = GLM_5 | {
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": KINDS,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
PUBLISHED = {"v32": V32, "glm-5": GLM_5, "glm-5.2": GLM_52}


def define(config: dict[str, object]) -> DecoderDefinition:
    definition = define_model(config, Ledger(strict=True))
    assert isinstance(definition, DecoderDefinition)
    return definition


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_config_as_it_is_published_leaves_nothing_unread(config: dict[str, object]) -> None:
    definition = define(config)
    assert len(definition.layers) == config["num_hidden_layers"]
    assert all(latent_of(layer).spec.top_k == 2048 for layer in definition.layers)
    assert latent_of(definition.layers[0]).paired_neighbours
    [predictor] = definition.predictors
    assert latent_of(predictor).indexer == latent_of(definition.layers[0]).indexer


def test_both_names_of_sparse_layers_are_read() -> None:
    assert define(GLM_5 | {"layer_types": ["deepseek_sparse_attention"] * 78}) == define(GLM_5)


def test_indexers_rotate_halves_in_deepseek_and_neighbours_in_glm() -> None:
    of_deepseek = IndexerDefinition(IndexSpec(64, 128, 2048), 64, paired_neighbours=False, norm_epsilon=1e-6)
    of_glm = IndexerDefinition(IndexSpec(32, 128, 2048), 64, paired_neighbours=True, norm_epsilon=1e-6)
    assert latent_of(define(V32).layers[0]).indexer == of_deepseek
    assert latent_of(define(GLM_5).layers[0]).indexer == of_glm
    without = {name: value for name, value in GLM_5.items() if not name.startswith(("index", "qk_", "v_", "q_lora"))}
    assert define(without).layers == define(GLM_5).layers


def indexed(definition: DecoderDefinition) -> list[int]:
    return [number for number, layer in enumerate(definition.layers) if latent_of(layer).indexer is not None]


def test_every_layer_has_an_indexer_unless_the_config_lists_those_that_have() -> None:
    assert indexed(define(V32)) == list(range(61))
    assert indexed(define(GLM_5)) == list(range(78))
    found = indexed(define(GLM_52))
    assert found[:6] == [0, 1, 2, 6, 10, 14]
    assert len(found) == 21
    assert list(define(GLM_52).indexers) == found


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3},
        {"index_topk_freq": 4, "index_skip_topk_offset": 0},
        {"index_topk_pattern": "FSSF" * 2},
        {"index_topk_pattern": ["full", "shared"] * 4},
        {
            "indexer_types": ["full", "full", "shared", "shared"] * 2,
            "index_topk_freq": 3,
            "index_topk_pattern": "F" * 8,
        },
    ],
    ids=str,
)
def test_layers_that_share_indexers_are_those_of_transformers(fields: dict[str, object]) -> None:
    config = GLM_5 | {"num_hidden_layers": 8} | fields
    known = GlmMoeDsaConfig(**{"num_hidden_layers": 8} | fields).indexer_types
    assert known is not None
    if known[0] == "shared":
        with pytest.raises(UnsupportedModelError, match="nothing was chosen before it"):
            define(config)
    else:
        assert indexed(define(config)) == [layer for layer, kind in enumerate(known) if kind == "full"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["shared"] + ["full"] * 77}, "expected an indexer in layer 0"),
        ({"indexer_types": ["full"] * 77}, "expected indexer_types of 78 entries"),
        ({"indexer_types": ["full"] * 77 + ["none"]}, "expected indexer_types of 78 entries"),
        ({"index_topk_pattern": "FX" * 39}, "expected config field index_topk_pattern to be 78 letters out of F and S"),
        ({"index_topk": 0}, "expected config field index_topk to be an integer from 1"),
        ({"index_head_dim": 32}, "expected index_head_dim to be at least 64"),
        ({"q_lora_rank": None}, "expected a q_lora_rank"),
        ({"rope_interleave": False}, "config field rope_interleave = False changes the result"),
        ({"head_dim": 100}, "config field head_dim = 100 changes the result"),
        ({"layer_types": ["full_attention"] * 78}, "expected layer_types of 78 entries out of indexed_attention"),
        ({"mlp_bias": True}, "config field mlp_bias = True changes the result"),
        ({"sliding_window": 8}, "config field sliding_window = 8 changes the result"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        define(GLM_5 | fields)


def test_an_indexer_in_a_model_without_sparse_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="config field index_"):
        define(V32 | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"})
