"""Granite 4: Mamba-2 or attention, then a feed-forward and, in models with experts, experts beside it.

Embeddings, scores, logits and all that a layer adds to the stream are multiplied by numbers of the config.
"""

from __future__ import annotations

from sightline.attention.spec import SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.layers.rotary import RotarySpec
from sightline.layers.routing import Share
from sightline.models.attention import AttentionDefinition, AttentionTensors, SoftmaxAttentionDefinition
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward, ExpertStorage, FeedForward
from sightline.models.layer_definition import LayerDefinition
from sightline.models.mamba_config import KINDS, mamba_spec, time_limits
from sightline.models.recurrent.mamba import MambaDefinition
from sightline.models.shared_config import FULL, LINEAR, one_rotary, read_routing

ROPE, NOPE = "rope", "nope"
_MAMBA_FIELDS = """
    mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias
    time_step_limit
"""


def granite_hybrid(config: ConfigReader) -> DecoderDefinition:
    """Reads a Granite 4 config."""
    config.also_called({"layer_types": ("layers_block_type",)})
    config.informational("mamba_chunk_size", "output_router_logits", "router_aux_loss_coef", "init_method")
    config.require("hidden_act", "silu")
    config.require("normalization_function", None, "rmsnorm")
    config.require("quantization_config", None)
    config.may_idle(f"no layer is {LINEAR}", *_MAMBA_FIELDS.split())
    attention, rotary = _attention(config)
    mixers: dict[str, tuple[AttentionDefinition, RotarySpec | None]] = {
        LINEAR: (_mamba(config), None),
        FULL: (attention, rotary),
    }
    feed_forward = _feed_forward(config)
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(LayerDefinition(*mixers[kind], feed_forward) for kind in _kinds(config)),
        norm_epsilon=config.positive("rms_norm_eps", 1e-6),
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / config.positive("logits_scaling", 1.0),
    )


def _kinds(config: ConfigReader) -> tuple[str, ...]:
    listed = config.optional_kinds("layer_types", (LINEAR, FULL, *KINDS))
    return (LINEAR,) * config.num_layers() if listed is None else tuple(KINDS.get(kind, kind) for kind in listed)


def _mamba(config: ConfigReader) -> MambaDefinition:
    size = config.count("mamba_expand", 2) * config.count("hidden_size")
    num_heads = config.count("mamba_n_heads", 128)
    if size % num_heads:
        raise UnsupportedModelError(
            f"expected {num_heads} Mamba heads (mamba_n_heads) of equal sizes, got {size} values "
            "(mamba_expand * hidden_size)"
        )
    config.require("mamba_d_head", None, "auto", size // num_heads)
    spec = mamba_spec(
        num_heads=num_heads,
        num_groups=config.count("mamba_n_groups", 1),
        head_dim=size // num_heads,
        state_size=config.count("mamba_d_state", 256),
        conv_width=config.count("mamba_d_conv", 4),
    )
    return MambaDefinition(
        spec,
        norm_epsilon=config.positive("rms_norm_eps", 1e-6),
        norm_groups=1,
        time_limits=time_limits(config),
        bias=config.boolean("mamba_proj_bias", default=False),
        conv_bias=config.boolean("mamba_conv_bias", default=True),
    )


def _attention(config: ConfigReader) -> tuple[SoftmaxAttentionDefinition, RotarySpec | None]:
    """The attention, and its rotary embedding unless it knows no positions."""
    fields = ("attention_bias", "attention_multiplier", "num_attention_heads", "num_key_value_heads")
    config.may_idle(f"no layer is {FULL}", *fields, "position_embedding_type")
    config.may_idle("attention knows no positions", "rope_parameters", "rope_scaling", "rope_theta")
    num_heads, num_kv_heads = config.heads()
    head_dim = config.count("head_dim", config.count("hidden_size") // num_heads, null_is_default=True)
    spec = SoftmaxSpec(num_heads, num_kv_heads, head_dim, config.positive("attention_multiplier", 1.0))
    bias = config.boolean("attention_bias", default=False)
    rotates = config.optional_choice("position_embedding_type", (ROPE, NOPE)) == ROPE
    tensors = AttentionTensors(qkv_bias=bias, output_bias=bias, rotates=rotates)
    rotary = one_rotary(config, head_dim, config.count("max_position_embeddings"))
    return SoftmaxAttentionDefinition(spec, tensors), rotary if rotates else None


def _feed_forward(config: ConfigReader) -> FeedForward:
    """The feed-forward that every token uses, with experts beside it if there are any."""
    config.may_idle("the model has no experts", "intermediate_size", "num_experts_per_tok")
    shared = DenseFeedForward(config.count("shared_intermediate_size", 1024), Activation.SILU, joint=True)
    if config.count("num_local_experts", 8, least=0) == 0:
        return shared
    return ExpertFeedForward(
        intermediate_size=config.count("intermediate_size"),
        routing=read_routing(config, Share.OF_CHOSEN, num_experts=8, experts_per_token=2),
        gate=Activation.SILU,
        storage=ExpertStorage.SEPARATE,
        shared=shared,
        shared_as="",
    )
