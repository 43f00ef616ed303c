"""Qwen3-Next and Qwen3.5, dense and with experts: most layers keep a state (the gated delta rule), every fourth has
softmax attention, whose output is gated.
"""

from __future__ import annotations

from collections.abc import Sequence

from sightline.attention.spec import RecurrentSpec, SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.layers.rotary import RotarySpec
from sightline.layers.routing import Share
from sightline.models.attention import AttentionDefinition, AttentionTensors, SoftmaxAttentionDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import BesideTensors, DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward, ExpertStorage, FeedForward
from sightline.models.hybrid_config import PREDICTORS, hybrid_kinds
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.qwen import expert_layers
from sightline.models.recurrent.gated_delta import DeltaStorage, GatedDeltaDefinition
from sightline.models.rope_config import DEFAULT_THETA, rotary_spec
from sightline.models.shared_config import FULL, LINEAR, NO_ROPE_SCALING, dense_layers, read_routing, rope_section

_LINEAR_FIELDS = """
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
"""
_VISION_FIELDS = """
    image_token_id language_model_only video_token_id vision_config vision_end_token_id vision_start_token_id
"""
_MTP_FIELDS = "mtp_num_hidden_layers mtp_use_dedicated_embeddings"
_MROPE_KEYS = ("mrope_interleaved", "mrope_section")
_VISION = BesideTensors("model.visual.", "vision", "images and videos are not supported; text is served as usual")


def qwen3_next(config: ConfigReader) -> DecoderDefinition:
    """Reads a Qwen3-Next config."""
    config.informational("output_router_logits", "router_aux_loss_coef")
    share = Share.OF_CHOSEN if config.boolean("norm_topk_prob", default=True) else Share.OF_ALL
    feed_forwards = expert_layers(config, _experts(config, share, num_experts=512, experts_per_token=10))
    return _hybrid(config, feed_forwards, DeltaStorage.BY_KEY_HEAD, (PREDICTORS,))


def qwen3_5(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of Qwen3.5 without experts: of the text network, or with those of vision beside it."""
    config.informational("mlp_only_layers")
    return _beside_vision(config, dense_layers(config))


def qwen3_5_moe(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of Qwen3.5 with experts, which every layer has."""
    config.informational("output_router_logits", "router_aux_loss_coef")
    config.may_idle("every layer has experts", "intermediate_size")
    config.require("decoder_sparse_step", 1)
    config.require("mlp_only_layers", None, [])
    config.require("norm_topk_prob", True)
    experts = _experts(config, Share.OF_CHOSEN, num_experts=256, experts_per_token=8)
    return _beside_vision(config, (experts,) * config.num_layers())


def _beside_vision(config: ConfigReader, feed_forwards: Sequence[FeedForward]) -> DecoderDefinition:
    config.informational(*_VISION_FIELDS.split(), *_MTP_FIELDS.split())
    config.require("attn_output_gate", True)
    config.require("mamba_ssm_dtype", None, "float32")
    config.require("output_gate_type", None, "swish", "silu")
    return _hybrid(config, feed_forwards, DeltaStorage.SEPARATE, (PREDICTORS, _VISION))


def _experts(config: ConfigReader, share: Share, *, num_experts: int, experts_per_token: int) -> ExpertFeedForward:
    """The experts, and the one that every token uses with a gate. The two counts are defaults."""
    config.may_idle("no layer has experts", "shared_expert_intermediate_size")
    return ExpertFeedForward(
        intermediate_size=config.count("moe_intermediate_size", 512),
        routing=read_routing(config, share, num_experts=num_experts, experts_per_token=experts_per_token),
        gate=Activation.SILU,
        storage=ExpertStorage.SEPARATE,
        shared=DenseFeedForward(config.count("shared_expert_intermediate_size", 512), Activation.SILU),
        shared_as="shared_expert",
        shared_is_gated=True,
    )


def _hybrid(
    config: ConfigReader,
    feed_forwards: Sequence[FeedForward],
    storage: DeltaStorage,
    beside: tuple[BesideTensors, ...],
) -> DecoderDefinition:
    config.require("hidden_act", "silu")
    config.require("quantization_config", None)
    rotary = _rotary(config, config.count("head_dim", 256))
    norms = NormDefinition(config.positive("rms_norm_eps", 1e-6), offset=1.0)
    delta_rule = GatedDeltaDefinition(_delta_rule(config), storage, NormDefinition(norms.epsilon))
    mixers: dict[str, tuple[AttentionDefinition, RotarySpec | None]] = {
        FULL: (_attention(config, rotary, norms), rotary),
        LINEAR: (delta_rule, None),
    }
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(
            LayerDefinition(*mixers[kind], feed_forward)
            for kind, feed_forward in zip(_kinds(config), feed_forwards, strict=True)
        ),
        norm_epsilon=norms.epsilon,
        norm_offset=norms.offset,
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
        beside=beside,
    )


def _kinds(config: ConfigReader) -> tuple[str, ...]:
    """`LINEAR` or `FULL` for each layer: from `layer_types`, or else every `full_attention_interval`-th is `FULL`."""
    config.may_idle("layer_types lists the kinds, or the same layers have full attention", "full_attention_interval")
    config.may_idle(f"no layer is {LINEAR}", *_LINEAR_FIELDS.split())
    interval = config.count("full_attention_interval", 4)
    kinds = hybrid_kinds(config, lambda index: LINEAR if (index + 1) % interval else FULL)
    if FULL not in kinds:
        raise UnsupportedModelError(
            f"expected at least one layer of kind {FULL}, got {len(kinds)} of kind {LINEAR}; correct layer_types or "
            "full_attention_interval"
        )
    return kinds


def _attention(config: ConfigReader, rotary: RotarySpec, norms: NormDefinition) -> SoftmaxAttentionDefinition:
    bias = config.boolean("attention_bias", default=False)
    tensors = AttentionTensors(norms, bias, bias, rotated_dim=rotary.rotated_dim, gated=True)
    spec = SoftmaxSpec(*config.heads(), rotary.head_dim, rotary.head_dim**-0.5)
    return SoftmaxAttentionDefinition(spec, tensors)


def _delta_rule(config: ConfigReader) -> RecurrentSpec:
    key_dim = config.count("linear_key_head_dim", 128)
    return RecurrentSpec(
        num_heads=config.count("linear_num_value_heads", 32, most=MAX_LAYERS),
        num_key_heads=config.count("linear_num_key_heads", 16, most=MAX_LAYERS),
        key_dim=key_dim,
        value_dim=config.count("linear_value_head_dim", 128),
        scale=key_dim**-0.5,
        delta_rule=True,
        channel_decay=False,
        unit_keys=True,
        conv_width=config.count("linear_conv_kernel_dim", 4, most=MAX_LAYERS),
    )


def _rotary(config: ConfigReader, head_dim: int) -> RotarySpec:
    """The rotary embedding, of a quarter of each head by default."""
    fields = [f"{section}.{key}" for section in ("rope_parameters", "rope_scaling") for key in _MROPE_KEYS]
    config.may_idle("it is for images: the three positions of a text token are the same", *fields)
    section = rope_section(config, NO_ROPE_SCALING, rotated_share=0.25)
    plain = {name: value for name, value in section.items() if name not in _MROPE_KEYS}
    positions = config.count("max_position_embeddings")
    return rotary_spec(plain, head_dim, DEFAULT_THETA, positions, may_be_partial=True)
