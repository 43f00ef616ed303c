"""A field is understood if the definition depends on it; that the code looks at it proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sightline.core.errors import UnsupportedModelError
from sightline.models.config_reader import INFORMATIONAL, ConfigReader
from sightline.models.field_effects import fields_without_effect
from sightline.models.foreign_fields import FOREIGN_FIELDS, is_neutral

_TRAINING = """
activation_dropout apply_spec_augment attention_probs_dropout_prob attn_pdrop audio_token_id autocast_kernel_dtype
aux_loss_coef bi_data boa_token_id boi_token_id boi_token_index bos_index chunk_size_lm_head chunkwise_kernel
classifier_activation classifier_bias classifier_dropout classifier_dropout_prob classifier_proj_size cls_token_id
decoder_layerdrop default_language disable_ngram_loss dropout dropout_p emb_pdrop embd_pdrop embed_dropout
embed_init_std embedding_dropout embedding_initializer_range encoder_layerdrop encoder_no_repeat_ngram_size
end_n_top eoa_token_id eoa_token_index eod_token_id eoi_token_id eoi_token_index eos_index forced_eos_token_id
hash_seed hidden_dropout_prob image_token_id image_token_index init_device init_std initializer_cutoff_factor
initializer_factor input_jitter_noise lang_id languages layerdrop learnable_sink_init linear_dt_init_floor
local_attention_probs_dropout_prob lsh_attention_probs_dropout_prob mask_feature_length mask_feature_min_masks
mask_feature_prob mask_index mask_time_length mask_time_min_masks mask_time_prob mask_token_id
max_inference_chunksize mlp_dropout mode mtp_loss_scaling_factor num_logits_to_keep output_router_logits pad_index
resid_dropout resid_pdrop residual_dropout return_last_states router_aux_loss_coef router_jitter_noise seed
sequence_kernel start_n_top step_kernel summary_activation summary_first_dropout summary_last_dropout
summary_proj_to_labels summary_type summary_use_proj suppress_tokens time_step_init_scheme unk_index
use_associative_scan use_mamba_kernels use_mambapy use_mem_eff_path video_token_id vision_end_token_id
vision_start_token_id w_init_variance_scale z_loss_coefficient
"""
"""Fields of transformers' configs that do not change a forward: training, dropout, special tokens, other heads."""


def unreached(config: Mapping[str, object], family: Callable[[ConfigReader], object]) -> list[str]:
    reader = ConfigReader(config, "test")
    definition = family(reader)
    found = fields_without_effect(
        config, lambda changed: family(ConfigReader(changed, "test")), definition, reader.choices
    )
    return [".".join(path) for path in found]


def test_a_field_that_is_read_and_not_used_is_found() -> None:
    def family(config: ConfigReader) -> object:
        config.positive("shadowed", 1.0)
        return config.count("used")

    assert unreached({"used": 3, "shadowed": 2.0, "unknown": True, "null": None}, family) == ["shadowed", "unknown"]


def test_a_field_that_is_only_checked_for_one_value_is_understood() -> None:
    def family(config: ConfigReader) -> object:
        config.require("act", "silu")
        config.require("number", 4)
        return 1

    assert unreached({"act": "silu", "number": 4}, family) == []


def test_of_a_string_with_several_valid_values_the_others_are_tried() -> None:
    def family(config: ConfigReader) -> object:
        config.choice("checked", ("a", "b"), "a")
        return config.choice("used", ("a", "b"), "a")

    assert unreached({"checked": "a", "used": "a"}, family) == ["checked"]


def test_fields_of_sections_and_lists_count_each_for_itself() -> None:
    def family(config: ConfigReader) -> object:
        section = config.optional_section("rope") or {}
        return section.get("factor"), config.optional_list("kinds")

    config = {"rope": {"factor": 2.0, "left": 3, "deeper": {"x": 1}}, "kinds": [1, 2], "empty": []}
    assert unreached(config, family) == ["rope.left", "rope.deeper.x", "empty"]


@pytest.mark.parametrize("value", [True, 0, 1, 7, 0.0, 2.5, "x", [], [3], ["x"], [True]])
def test_a_value_of_every_type_has_others_to_try(value: object) -> None:
    assert unreached({"field": value}, lambda config: repr(config._get("field", None))) == []
    assert unreached({"field": value}, lambda config: 1) == ["field"]


def test_an_error_that_is_no_refusal_is_not_taken_for_one() -> None:
    def define(config: Mapping[str, object]) -> int:
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        fields_without_effect({"field": 1}, define, 1, {})


def test_every_field_that_some_causal_model_of_transformers_has_is_known() -> None:
    names = {each.name for each in fields(PreTrainedConfig)}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config = CONFIG_MAPPING[model_type]
        names |= {each.name for each in fields(config)} | set(config.attribute_map)
    assert names - FOREIGN_FIELDS - INFORMATIONAL - set(_TRAINING.split()) == set()


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("is_causal", True, True),
        ("is_causal", False, False),
        ("logit_scale", 1.0, True),
        ("logit_scale", 0, False),
        ("residual_multiplier", 0.5, False),
        ("attention_multiplier", 1.0, False),
        ("clip_qkv", None, True),
        ("qk_layernorm", False, True),
        ("no_rope_layers", [], True),
        ("no_rope_layers", [1], False),
    ],
)
def test_when_a_field_of_another_family_changes_nothing(name: str, value: object, neutral: bool) -> None:
    assert name in FOREIGN_FIELDS
    assert is_neutral(name, value) is neutral


def test_a_refusal_is_the_one_error_that_counts_as_one() -> None:
    def define(config: Mapping[str, object]) -> int:
        if config["field"] != 1:
            raise UnsupportedModelError("only 1")
        return 1

    assert fields_without_effect({"field": 1}, define, 1, {}) == []
