"""Configs of every family with one thing changed, and what transformers computes for each.

A config is complete: it has every field that transformers writes. Weights are those of the unchanged config.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    BailingHybridConfig,
    BertConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniMaxConfig,
    MistralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.initialization import no_init_weights

from sightline.models.config_reader import INFORMATIONAL

Config = dict[str, Any]

COSTLY = frozenset({"block_size"})
"""Fields by which transformers allocates memory, whose effect a few values show."""


class Absent(Enum):
    """Stands for no value."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT
"""A mutated value: the field is taken away."""
VOCAB = 31
TOKENS = [3, 17, 5, 29, 8, 11, 2, 23, 14, 6, 19, 27]
WEIGHT_SCALE = 0.3
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

SIZES: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN: Config = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}
LLAMA3: Config = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "q_lora_rank": 14,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
}
INDEX: Config = {"index_topk": 5, "index_n_heads": 16, "index_head_dim": 14}

PARTIAL: Config = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
DELTA: Config = {
    "layer_types": [LINEAR, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}

HYBRID_LATENT: Config = {
    **{name: value for name, value in (SIZES | LATENT).items() if name not in ("head_dim", "rms_norm_eps")},
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
del HYBRID_LATENT["n_routed_experts"], HYBRID_LATENT["first_k_dense_replace"], HYBRID_LATENT["q_lora_rank"]
HYBRID_LATENT["num_local_experts"] = 8


def older_form(config: Config) -> Config:
    """`rope_parameters` as they were written before transformers 5."""
    rope = config.pop("rope_parameters")
    if FULL in rope:
        theta, local = rope[FULL].pop("rope_theta"), rope[SLIDING].pop("rope_theta")
        return config | {"rope_theta": theta, "rope_local_base_freq": local, "rope_scaling": rope[FULL]}
    return config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}


BASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, rope_theta=100.0, attention_bias=True),
    "llama3": lambda: LlamaConfig(**SIZES, rope_parameters={**LLAMA3, "rope_theta": 100.0}, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(
        **SIZES, sliding_window=5, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    ),
    "qwen2": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1, rope_parameters=dict(YARN)
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, sliding_window=5, max_window_layers=1, rope_theta=100.0),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=5,
        rope_theta=100.0,
        norm_topk_prob=True,
    ),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        sliding_window=5,
        rope_theta=100.0,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES,
        sliding_window=5,
        layer_types=[SLIDING, FULL],
        query_pre_attn_scalar=5,
        final_logit_softcapping=30.0,
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        global_head_dim=16,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=30.0,
        rope_parameters={
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 300.0},
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES,
        sliding_window=5,
        num_local_experts=6,
        num_experts_per_tok=2,
        swiglu_limit=1.5,
        rope_parameters=YARN | {"truncate": False},
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **SIZES | LATENT,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        rope_parameters=YARN | {"mscale": 1.5, "mscale_all_dim": 1.5},
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SIZES | LATENT, n_group=4, topk_group=2, rope_parameters=YARN | {"mscale": 2.5, "mscale_all_dim": 1.2}
    ),
    "deepseek_v32": lambda: DeepseekV32Config(
        **SIZES | LATENT | INDEX, n_group=4, topk_group=2, rope_parameters=YARN | {"mscale": 2.5, "mscale_all_dim": 1.2}
    ),
    "deepseek_v4": lambda: DeepseekV4Config(
        **{name: value for name, value in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}
        | {"num_hidden_layers": 3},
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        layer_types=[SLIDING, "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        partial_rotary_factor=0.5,
        rope_theta=100.0,
        compress_rope_theta=300.0,
        rope_parameters={name: value for name, value in YARN.items() if name != "rope_theta"},
        sliding_window=5,
        q_lora_rank=14,
        o_groups=2,
        o_lora_rank=6,
        index_n_heads=16,
        index_head_dim=6,
        index_topk=3,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        hc_eps=0.02,
        swiglu_limit=0.8,
    ),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **SIZES | LATENT | INDEX, n_group=1, topk_group=1, indexer_types=["full", "shared"], rope_theta=100.0
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SIZES,
        moe_intermediate_size=16,
        num_experts_per_tok=3,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        use_qk_norm=True,
        attention_bias=True,
        rope_theta=100.0,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES,
        **DELTA,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=12,
        num_experts=6,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        rope_parameters=dict(PARTIAL),
        attention_bias=True,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **SIZES, **DELTA, rope_parameters=PARTIAL | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **{name: value for name, value in SIZES.items() if name != "intermediate_size"},
        **DELTA,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=12,
        num_experts=6,
        num_experts_per_tok=2,
        rope_parameters=dict(PARTIAL),
    ),
    "kimi_linear": lambda: KimiLinearConfig(
        **HYBRID_LATENT, linear_head_dim=6, linear_num_heads=3, layer_types=[LINEAR, FULL], rms_norm_eps=0.05
    ),
    "bailing_hybrid": lambda: BailingHybridConfig(
        **HYBRID_LATENT | {"head_dim": 6},
        layer_types=[LINEAR, FULL],
        first_k_dense_replace=1,
        rope_parameters=YARN | {"mscale": 2.5, "mscale_all_dim": 1.2},
        rope_theta=100.0,
        rms_norm_eps=0.05,
    ),
    "minimax": lambda: MiniMaxConfig(
        **SIZES,
        num_local_experts=6,
        num_experts_per_tok=2,
        layer_types=[LINEAR, FULL],
        sliding_window=5,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        full_attn_alpha_factor=1.5,
        full_attn_beta_factor=0.6,
        linear_attn_alpha_factor=0.7,
        linear_attn_beta_factor=1.2,
        mlp_alpha_factor=1.3,
        mlp_beta_factor=0.8,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **{name: value for name, value in SIZES.items() if name not in ("num_hidden_layers", "rms_norm_eps")},
        layers_block_type=[LINEAR, "mlp", FULL, "moe"],
        layer_norm_epsilon=0.05,
        ssm_state_size=6,
        mamba_num_heads=4,
        time_step_limit=[0.3, 1.5],
        mamba_head_dim=8,
        n_groups=2,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=12,
        routed_scaling_factor=1.7,
        use_bias=True,
        mlp_bias=True,
    ),
    "granite_hybrid": lambda: GraniteMoeHybridConfig(
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        layer_types=[LINEAR, FULL],
        mamba_n_heads=4,
        time_step_limit=[0.3, 1.5],
        mamba_n_groups=2,
        mamba_d_state=6,
        num_local_experts=6,
        shared_intermediate_size=20,
        embedding_multiplier=3.0,
        logits_scaling=2.5,
        residual_multiplier=0.4,
        attention_multiplier=0.5,
        position_embedding_type="rope",
        rope_theta=100.0,
        attention_bias=True,
    ),
    "granite_hybrid_dense": lambda: GraniteMoeHybridConfig(
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        layer_types=[LINEAR, FULL],
        mamba_n_heads=4,
        time_step_limit=[0.3, 1.5],
        mamba_d_state=6,
        num_local_experts=0,
        shared_intermediate_size=20,
        residual_multiplier=0.4,
        tie_word_embeddings=True,
    ),
    "lfm2": lambda: Lfm2Config(
        **{name: value for name, value in SIZES.items() if name not in ("head_dim", "rms_norm_eps")},
        layer_types=["conv", FULL],
        norm_eps=0.05,
        block_multiple_of=7,
        block_ffn_dim_multiplier=1.5,
        rope_theta=100.0,
        conv_bias=True,
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **{name: value for name, value in SIZES.items() if name not in ("head_dim", "rms_norm_eps")},
        layer_types=["conv", FULL],
        norm_eps=0.05,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        routed_scaling_factor=1.7,
        rope_theta=100.0,
    ),
    "bert": lambda: BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=32,
        layer_norm_eps=0.05,
    ),
}
OLDER = ("llama3", "qwen2", "gemma3", "gpt_oss", "deepseek_v3", "glm4_moe")
"""Bases that are mutated in the older form of their rope fields too."""


@dataclass
class Subject:
    """A base, saved in a folder, with what both engines compute for it."""

    name: str
    config: Config
    folder: Path
    weights: Mapping[str, Tensor]
    """As transformers names them."""
    is_older: bool = False
    """Its rope fields are in the form of transformers 4."""
    results: dict[str, Tensor | Exception] = field(default_factory=dict)

    def reference(self, config: Config) -> Tensor:
        """What transformers computes for the config, [tokens, vocabulary or hidden]. Raises what it raises."""
        key = json.dumps(config, sort_keys=True)
        if key not in self.results:
            try:
                self.results[key] = reference(config, self.weights)
            except Exception as error:
                self.results[key] = error
        result = self.results[key]
        if isinstance(result, Exception):
            raise result
        return result

    def known_fields(self) -> set[str]:
        """Every field that transformers' class for the family declares."""
        cls = CONFIG_MAPPING[self.config["model_type"]]
        return {each.name for each in fields(cls)} | set(cls.attribute_map)


def make_subject(name: str, folder: Path, *, older: bool = False) -> Subject:
    torch.manual_seed(7)
    settings = BASES[name]()
    settings._attn_implementation = "eager"
    model = make_network(settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 0.0 if parameter.dim() > 1 else float(parameter.mean())
            parameter.copy_(centre + WEIGHT_SCALE * torch.randn(parameter.shape, generator=generator))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.3, generator=generator)
            if buffer_name.endswith("tid2eid"):
                ranks = torch.rand(len(buffer), settings.n_routed_experts, generator=generator)
                buffer.copy_(ranks.argsort(dim=1)[:, : buffer.shape[1]])
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    whole = json.loads(settings.to_json_string(use_diff=False))
    config = {key: value for key, value in whole.items() if key != "per_layer_config"} | config
    config = older_form(config) if older else config
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    return Subject(f"{name}, older form" if older else name, config, folder, weights, older)


def make_network(settings: PreTrainedConfig) -> PreTrainedModel:
    maker = AutoModel if settings.model_type == "bert" else AutoModelForCausalLM
    return maker.from_config(settings, attn_implementation="eager", dtype=torch.float32).eval()


def reference(config: Config, weights: Mapping[str, Tensor]) -> Tensor:
    settings = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    for name in ("chunk_size", "mamba_chunk_size"):
        # Texts are padded to whole chunks, in memory.
        if isinstance(getattr(settings, name, None), int):
            setattr(settings, name, min(getattr(settings, name), 64))
    with no_init_weights():
        model = make_network(settings)
    if settings.model_type == "nemotron_h":
        for layer in model.model.layers:
            # transformers limits the time of a token from below, by another field, in steps of several tokens only.
            layer.mixer.time_step_limit = tuple(settings.time_step_limit)
    if settings.tie_word_embeddings and settings.model_type != "bert":
        weights = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"{missing} {unexpected}")
        model.tie_weights()
    else:
        model.load_state_dict(weights)
    with torch.no_grad():
        result = model(torch.tensor([TOKENS]), use_cache=False, return_dict=True)
    found: Tensor = result.last_hidden_state[0] if settings.model_type == "bert" else result.logits[0]
    return found


Mutation = tuple[tuple[str, ...], object]
"""The path of a field, and its other value."""


def mutated(config: Config, mutation: Mutation) -> Config:
    path, value = mutation
    result = copy.deepcopy(config)
    section = result
    for name in path[:-1]:
        section = section[name]
    if value is ABSENT:
        del section[path[-1]]
    else:
        section[path[-1]] = copy.deepcopy(value)
    return result


def mutations(config: Config, siblings: Mapping[str, list[object]]) -> Iterator[Mutation]:
    """Every field with other values, then the fields that only siblings have. `siblings` has the values of a field."""
    for name, value in config.items():
        yield from _of_field((name,), value, siblings.get(name, []))
    for name, values in siblings.items():
        if name not in config:
            yield from (((name,), value) for value in _distinct(values + _switched(values)))


def _of_field(path: tuple[str, ...], value: object, elsewhere: list[object]) -> Iterator[Mutation]:
    # A few values show that it has no effect, and transformers takes milliseconds for each.
    if path[0] in INFORMATIONAL or path[0] in COSTLY:
        yield from ((path, other) for other in (*_others(value)[:2], None, ABSENT) if other != value)
        return
    others = [other for other in elsewhere if other != value] if len(path) == 1 else []
    yield from ((path, other) for other in _distinct([*_others(value), *others[:3], None, ABSENT]) if other != value)
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _of_field((*path, name), inner, [])
        yield (*path, "novelty"), 3.0


def _others(value: object) -> list[object]:
    match value:
        case bool():
            return [not value, int(value), "nonsense"]
        case int():
            return [value + 1, max(value - 1, 0), 2 * value, 0, -1, float(value), "nonsense", 10**9]
        case float():
            whole = [int(value)] if value.is_integer() else []
            return [2.0 * value, value / 2.0, 0.0, -1.0, *whole, "nonsense", float("inf"), 1e30]
        case str():
            return ["nonsense", "null", 3]
        case []:
            return [[0], [1], ["nonsense"], "nonsense"]
        case list():
            return [[], value[:-1], value[::-1], [*value, value[-1]], ["nonsense", *value[1:]], "nonsense"]
        case dict():
            return [{}, "nonsense", []]
    return [3, True, 0.5, "nonsense"]


def _switched(values: list[object]) -> list[object]:
    """Values under which a feature that is off in every sibling is on."""
    if any(isinstance(value, bool) for value in values):
        return [True, False]
    return [3, 0.5] if all(value is None for value in values) else []


def _distinct(values: list[object]) -> list[object]:
    by_text = {repr(value): value for value in values if value is ABSENT or value is None or value == value}
    return list(by_text.values())


def sibling_values(configs: list[Config]) -> dict[str, list[object]]:
    """By field: every value that it has in one of the configs."""
    found: dict[str, list[object]] = {}
    for config in configs:
        for name, value in config.items():
            found.setdefault(name, []).append(value)
    return {name: _distinct(values) for name, values in found.items()}
