"""Kimi Linear: Kimi delta attention, latent attention without positions in some layers, and experts.

The latent layers have the dimensions that others rotate, and leave them as they are.
"""

from __future__ import annotations

from sightline.core.errors import UnsupportedModelError
from sightline.layers.rotary import RotarySpec
from sightline.models.attention import LatentAttentionDefinition
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.grouped_experts import corrected_routing, read_experts, typed_expert_layers
from sightline.models.hybrid_config import EXPERT_NAMES, MAX_SIZE, delta_spec, hybrid_kinds
from sightline.models.latent_config import INNER_NORMS, latent_spec
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.recurrent.kimi_delta import KimiDeltaDefinition
from sightline.models.shared_config import FULL, LINEAR

SECTION = "linear_attn_config"
"""The section that describes the recurrent layers in the published configs. transformers writes plain fields."""
_SECTION_KEYS = frozenset({"full_attn_layers", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size"})
_LATENT_FIELDS = """
    attention_bias kv_lora_rank num_attention_heads q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
"""


def kimi_linear(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of Kimi Linear."""
    config.also_called(EXPERT_NAMES)
    # `head_dim` has no effect: latent and recurrent layers have fields of their own for the sizes of heads.
    config.informational("head_dim", "output_router_logits")
    config.require("hidden_act", "silu")
    config.require("quantization_config", None)
    config.require("mla_use_nope", None, True)
    config.require("moe_router_activation_func", None, "sigmoid")
    config.require("moe_layer_freq", None, 1)
    config.require("num_nextn_predict_layers", None, 0)
    config.require("use_grouped_topk", None, True)
    config.may_idle("no layer rotates", "rope_theta", "rope_scaling", "rope_parameters")
    routing = corrected_routing(config, num_groups=1, groups_per_token=1, scale=2.446)
    experts = read_experts(config, routing, num_shared=1)
    feed_forwards = typed_expert_layers(config, experts, first=1)
    latent, recurrent = _latent(config), _recurrent(config)
    still = RotarySpec(latent.spec.rope_dim, 1.0, rotated_dim=0)
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(
            LayerDefinition(latent, still, feed_forward)
            if kind == FULL
            else LayerDefinition(recurrent, None, feed_forward)
            for kind, feed_forward in zip(_kinds(config), feed_forwards, strict=True)
        ),
        norm_epsilon=config.positive("rms_norm_eps", 1e-5),
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
    )


def _latent(config: ConfigReader) -> LatentAttentionDefinition:
    config.may_idle("no layer has latent attention", *_LATENT_FIELDS.split())
    return LatentAttentionDefinition(
        spec=latent_spec(config),
        query_rank=config.optional_count("q_lora_rank"),
        paired_neighbours=False,
        norms=INNER_NORMS,
        bias=config.boolean("attention_bias", default=False),
    )


def _recurrent(config: ConfigReader) -> KimiDeltaDefinition:
    fields = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    config.may_idle("no layer is recurrent", *fields)
    keys, defaults = ("num_heads", "head_dim", "short_conv_kernel_size"), (32, 128, 4)
    num_heads, head_dim, width = (
        _stated(config, key, field, default) for key, field, default in zip(keys, fields, defaults, strict=True)
    )
    norms = NormDefinition(config.positive("rms_norm_eps", 1e-5))
    spec = delta_spec(num_heads, head_dim, width)
    return KimiDeltaDefinition(spec, rank=head_dim, rates_shape=(1, 1, num_heads, 1), decay_bound=None, norms=norms)


def _stated(config: ConfigReader, key: str, field: str, default: int) -> int:
    """A number that the section states under `key`, or else the config under `field`. They must not differ."""
    section = config.section(SECTION, _SECTION_KEYS)
    if key not in section:
        return config.count(field, default, most=MAX_SIZE)
    value = section.count(key, most=MAX_SIZE)
    config.require(field, value)
    return value


def _kinds(config: ConfigReader) -> tuple[str, ...]:
    """The kind of each layer: from `layer_types`, or from the lists of the section, which count from 1."""
    section = config.section(SECTION, _SECTION_KEYS)
    lists = [section.optional_list(name) for name in ("full_attn_layers", "kda_layers")]
    config.may_idle("layer_types has the kinds", f"{SECTION}.full_attn_layers", f"{SECTION}.kda_layers")
    full, recurrent = lists
    if full is None or recurrent is None:
        return hybrid_kinds(config, lambda index: FULL if index and index % 4 == 0 else LINEAR)
    num_layers = config.num_layers()
    if sorted([*full, *recurrent], key=str) != sorted(range(1, num_layers + 1), key=str):
        raise UnsupportedModelError(
            f"{SECTION}: expected every layer from 1 to {num_layers} once in full_attn_layers or kda_layers, got "
            f"{full} and {recurrent}"
        )
    return hybrid_kinds(config, lambda index: FULL if index + 1 in full else LINEAR)
