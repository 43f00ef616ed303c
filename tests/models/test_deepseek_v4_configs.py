"""The published configs of DeepSeek V4 leave nothing unread, both forms of a config mean the same, and what is not
supported is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config

from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec, Compression
from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.core.page_shape import entries_per_page
from sightline.layers.activation import ClampedSilu
from sightline.layers.rotary import RotarySpec, YarnScaling
from sightline.layers.routing import Routing, Score, Share
from sightline.layers.stream_mix import StreamRule
from sightline.models.compressed import CompressedAttentionDefinition
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward
from sightline.models.registry import define_model

RATIOS = [0, 0, *([4, 128] * 20), 4, 0]
"""Of 43 layers, and one for multi-token prediction."""
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": RATIOS,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
}


THETA = {"rope_theta": 10000.0}


def define(config: dict[str, Any], *, strict: bool = True) -> DecoderDefinition:
    definition = define_model(config, Ledger(strict=strict))
    assert isinstance(definition, DecoderDefinition)
    return definition


def attention_of(definition: DecoderDefinition, layer: int) -> CompressedAttentionDefinition:
    attention = definition.layers[layer].attention
    assert isinstance(attention, CompressedAttentionDefinition)
    return attention


def saved_by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """The newer form."""
    given = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    made = DeepseekV4Config(**given, architectures=config["architectures"]).to_dict()
    return {name: value for name, value in made.items() if name != "torch_dtype"}


def test_a_config_as_it_is_published_gives_its_layers() -> None:
    definition = define(FLASH)
    assert len(definition.layers) == 43
    plain = CompressedSpec(64, 512, 512**-0.5, window=128, compression=None)
    sparse = Compression(4, overlap=True, rope_dim=64, norm_eps=1e-6)
    heavy = Compression(128, overlap=False, rope_dim=64, norm_eps=1e-6)
    specs = [attention_of(definition, layer).spec for layer in range(4)]
    assert specs[0] == specs[1] == plain
    assert specs[2] == CompressedSpec(64, 512, 512**-0.5, window=128, compression=sparse, top_k=512)
    assert specs[3] == CompressedSpec(64, 512, 512**-0.5, window=128, compression=heavy)
    assert set(definition.indexers) == set(range(2, 43, 2))
    assert definition.indexers[2] == CompressedIndexSpec(64, 128, 512, sparse)
    assert definition.streams == StreamRule(4, 20, 1e-6, 1e-6)
    assert definition.max_positions == 1 << 20


@pytest.mark.parametrize(("page_size", "num_bytes"), [(128, 6_880), (256, 6_880), (64, 7_040), (16, 8_000)])
def test_a_token_takes_the_bytes_that_the_documents_name(page_size: int, num_bytes: int) -> None:
    caches = [group.cache_spec(torch.bfloat16) for group in define(FLASH).groups()]
    numbers = [
        entries_per_page(page_size, pool.tokens_per_entry) * pool.num_layers * math.prod(plane.shape)
        for cache in caches
        for pool in cache.pools
        for plane in pool.planes
    ]
    assert 2 * sum(numbers) == num_bytes * page_size
    assert sum(cache.states.num_bytes for cache in caches) == 6_242_816
    text = (Path(__file__).parents[2] / "docs" / "deepseek_v4.md").read_text()
    assert f"{num_bytes:,} bytes" in text or f"takes {num_bytes:,}" in text


def test_layers_without_entries_have_a_rotation_of_their_own() -> None:
    definition = define(FLASH)
    yarn = YarnScaling(16.0, 32.0, 1.0, 65536, truncate=True, attention_factor=1.0)
    assert definition.layers[0].rotary == RotarySpec(64, 10000.0)
    assert definition.layers[2].rotary == RotarySpec(64, 160000.0, yarn, window=4)
    assert definition.layers[3].rotary == RotarySpec(64, 160000.0, yarn, window=128)


def test_the_first_layers_list_the_experts_of_each_token() -> None:
    experts = [layer.feed_forward for layer in define(FLASH).layers]
    for number, each in enumerate(experts):
        assert isinstance(each, ExpertFeedForward)
        assert each.listed_tokens == (129280 if number < 3 else None)
        corrected = number >= 3
        assert each.routing == Routing(256, 6, Share.OF_CHOSEN, Score.SQRT_SOFTPLUS, corrected=corrected, scale=1.5)
        assert each.gate == ClampedSilu(10.0)
        assert each.shared == DenseFeedForward(2048, ClampedSilu(10.0))


def test_what_transformers_writes_means_the_same() -> None:
    saved = saved_by_transformers(FLASH)
    assert {"layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"} <= set(saved)
    assert "compress_ratios" not in saved
    assert define(saved) == define(FLASH)


def test_fields_that_are_left_out_have_the_values_of_transformers() -> None:
    bare = {name: FLASH[name] for name in ("architectures", "model_type", "vocab_size", "hidden_size")}
    bare |= {"num_hidden_layers": 7}
    assert define(bare) == define(saved_by_transformers(bare))
    kinds = [attention_of(define(bare), layer).spec.tokens_per_entry for layer in range(7)]
    assert kinds == [128, 128, 128, 4, 128, 4, 128]


def test_rates_may_be_fields_of_their_own() -> None:
    own = FLASH | {"compress_rate_csa": 8, "compress_rate_hca": 64, "compress_ratios": [0, 8, 64] * 15}
    assert [attention_of(define(own), layer).spec.tokens_per_entry for layer in range(3)] == [1, 8, 64]
    section = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
    other = {name: value for name, value in own.items() if not name.startswith("compress_rate_")}
    assert define(other | {"compress_rates": section}) == define(own)


def test_the_predictors_of_a_newer_release_are_left_alone() -> None:
    """Its list of ratios is longer than its layers."""
    assert define(FLASH | {"compress_ratios": [*RATIOS, 0, 0]}) == define(FLASH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' changes"),
        ({"attention_bias": True}, "attention_bias = True changes"),
        ({"mlp_bias": True}, "mlp_bias = True changes"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 changes"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2 changes"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False changes"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' changes"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' changes"),
        ({"n_group": 8}, "n_group = 8 changes the result of other families"),
        ({"is_causal": False}, "is_causal = False"),
        ({"quantization_config": {"a": 1}}, "quantization_config"),
        ({"compress_ratios": [0, 4]}, "compress_ratios of 43 layers or more"),
        ({"compress_ratios": [3] * 43}, "out of 0, 4, 128, got"),
        ({"compress_ratios": [False] * 43}, "out of 0, 4, 128, got"),
        ({"compress_rate_csa": 128}, "two different compress_rates"),
        ({"compress_rates": {"sliding_attention": 2}}, "compress_rates"),
        ({"compress_rate_csa": 1, "compress_ratios": [1] * 43}, "at least 2 tokens per entry"),
        ({"layer_types": ["sliding_attention"] * 43}, "layer_types or compress_ratios, or both alike"),
        ({"mlp_layer_types": ["moe"] * 43}, "mlp_layer_types or num_hash_layers, or both alike"),
        ({"o_groups": 7}, "64 heads in equal groups"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor or qk_rope_head_dim, or both alike"),
        ({"qk_rope_head_dim": 63}, "an even number of rotated dimensions"),
        ({"qk_rope_head_dim": 256}, "rotat"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"main": {}, "compress": {}}}, "no rope_scaling beside them"),
        ({"rope_parameters": {"main": {}}, "rope_scaling": None}, "rope_parameters of main and compress"),
        ({"rope_parameters": {"main": {}, "compress": {}}, "rope_scaling": None}, "rope_theta in rope_parameters.main"),
        (
            {"rope_parameters": {"main": THETA, "compress": {"rope_theta": 5.0}}, "rope_scaling": None},
            "compress_rope_theta = 160000.0 and rope_theta = 5.0",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling or rope_parameters"),
        ({"num_experts_per_tok": 257}, "from 1 to 256 experts"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"hc_mult": 0}, "hc_mult"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        define(FLASH | changes)
