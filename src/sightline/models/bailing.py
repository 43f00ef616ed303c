"""Bailing hybrids, published as Ling and Ring: Kimi delta attention, gated latent attention in some layers, experts."""

from __future__ import annotations

from sightline.core.errors import UnsupportedModelError
from sightline.models.attention import LatentAttentionDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import BesideTensors, DecoderDefinition, layer_prefix
from sightline.models.grouped_experts import corrected_routing, read_experts, typed_expert_layers
from sightline.models.hybrid_config import EXPERT_NAMES, MAX_SIZE, delta_spec, hybrid_kinds
from sightline.models.latent_config import INNER_NORMS, latent_spec
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.recurrent.kimi_delta import KimiDeltaDefinition
from sightline.models.rope_config import rotary_spec, yarn_score_scale
from sightline.models.shared_config import FULL, LINEAR, rope_section

_NAMES = {
    **EXPERT_NAMES,
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "linear_conv_kernel_dim": ("short_conv_kernel_size",),
}
_THETA = 6_000_000.0
_LATENT_FIELDS = "attention_bias kv_lora_rank qk_nope_head_dim qk_rope_head_dim rope_theta rope_parameters v_head_dim"
_RECURRENT_FIELDS = "kda_safe_gate linear_conv_kernel_dim linear_head_dim linear_num_heads"


def bailing_hybrid(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of a Bailing hybrid."""
    config.also_called(_NAMES)
    config.informational("mtp_loss_scaling_factor", "output_router_logits")
    config.require("hidden_act", "silu")
    config.require("quantization_config", None)
    config.may_idle("no layer has latent attention", *_LATENT_FIELDS.split())
    config.may_idle("no layer is recurrent", *_RECURRENT_FIELDS.split())
    config.may_idle("no layer is recurrent, or decays are not bounded", "kda_lower_bound")
    config.may_idle("layer_types lists the kinds, or the same layers have latent attention", "layer_group_size")
    routing = corrected_routing(config, num_groups=8, groups_per_token=4, scale=2.5)
    feed_forwards = typed_expert_layers(config, read_experts(config, routing, num_shared=1), first=2)
    period = config.count("layer_group_size", 6)
    kinds = hybrid_kinds(config, lambda index: LINEAR if (index + 1) % period else FULL)
    num_positions = config.count("max_position_embeddings")
    num_predictors = config.count("num_nextn_predict_layers", 1, least=0, most=MAX_LAYERS)
    rope = rope_section(config)
    if "factor" in rope and "original_max_position_embeddings" not in rope:
        # transformers takes its own default, whatever length the config has under its other name.
        raise UnsupportedModelError(
            "rope: expected original_max_position_embeddings beside a factor, got none; set the length before scaling"
        )
    latent = LatentAttentionDefinition(
        spec=latent_spec(config, yarn_score_scale(rope)),
        query_rank=None,
        paired_neighbours=True,
        norms=INNER_NORMS,
        bias=config.boolean("attention_bias", default=False),
        gated=True,
    )
    recurrent = _recurrent(config)
    rotary = rotary_spec(rope, latent.spec.rope_dim, _THETA, num_positions)
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=num_positions,
        hidden_size=config.count("hidden_size"),
        layers=tuple(
            LayerDefinition(latent, rotary, feed_forward)
            if kind == FULL
            else LayerDefinition(recurrent, None, feed_forward)
            for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
        ),
        norm_epsilon=config.positive("rms_norm_eps", 1e-6),
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
        beside=tuple(
            BesideTensors(
                f"{layer_prefix(index)}.",
                "multi-token prediction",
                "they predict tokens after the next one, which does not need them and which no drafter can use yet",
            )
            for index in range(len(kinds), len(kinds) + num_predictors)
        ),
    )


def _recurrent(config: ConfigReader) -> KimiDeltaDefinition:
    """transformers replaces `head_dim` by that of the rotation when it writes a config, and adds `linear_head_dim`."""
    config.may_idle("linear_head_dim has the size of recurrent heads", "head_dim")
    num_heads = config.count("linear_num_heads", config.count("num_attention_heads"), most=MAX_LAYERS)
    head_dim = config.count("linear_head_dim", config.count("head_dim", 128, most=MAX_SIZE), most=MAX_SIZE)
    spec = delta_spec(num_heads, head_dim, config.count("linear_conv_kernel_dim", 4, most=MAX_SIZE))
    bound = config.negative("kda_lower_bound", -5.0)
    return KimiDeltaDefinition(
        spec,
        rank=None,
        rates_shape=(num_heads,),
        decay_bound=bound if config.boolean("kda_safe_gate", default=True) else None,
        norms=NormDefinition(config.positive("rms_norm_eps", 1e-6)),
    )
