"""LFM2, dense and with experts: most layers are short convolutions, the others softmax attention."""

from __future__ import annotations

from sightline.attention.spec import ConvolutionSpec, SoftmaxSpec
from sightline.layers.activation import Activation
from sightline.layers.rotary import RotarySpec
from sightline.layers.routing import Routing, Score, Share
from sightline.models.attention import AttentionDefinition, AttentionTensors, SoftmaxAttentionDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward, ExpertStorage, FeedForward
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.recurrent.short_convolution import ShortConvolutionDefinition
from sightline.models.shared_config import FULL, one_rotary

CONV = "conv"
THETA = 1_000_000.0
_FOR_TRAINING = """
    block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init output_router_logits
"""
_EXPERT_FIELDS = """
    moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok routed_scaling_factor use_expert_bias
"""


def lfm2(config: ConfigReader) -> DecoderDefinition:
    """Reads an LFM2 config."""
    config.also_called({"intermediate_size": ("block_ff_dim",)})
    return _decoder(config, (_dense(config, _adjusted(config)),) * config.num_layers())


def lfm2_moe(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of LFM2 with experts, which all layers but the first have.

    transformers adds 1e-6 to the sum by which the weights of a token's experts are divided; here it is less.
    """
    config.may_idle("no layer has experts", *_EXPERT_FIELDS.split())
    config.may_idle("every layer has experts", "intermediate_size")
    dense, experts = _dense(config, config.count("intermediate_size")), _experts(config)
    num_dense = config.count("num_dense_layers", 2, least=0)
    return _decoder(config, tuple(dense if index < num_dense else experts for index in range(config.num_layers())))


def _decoder(config: ConfigReader, feed_forwards: tuple[FeedForward, ...]) -> DecoderDefinition:
    config.also_called({"tie_word_embeddings": ("tie_embedding",)})
    config.informational(*_FOR_TRAINING.split())
    hidden_size, epsilon = config.count("hidden_size"), config.positive("norm_eps", 1e-5)
    for name, *neutral in (
        ("block_dim", None, hidden_size),
        ("block_norm_eps", None, epsilon),
        ("block_use_swiglu", None, True),
        ("conv_dim", None, hidden_size),
        ("conv_dim_out", None, hidden_size),
        ("num_heads", None, config.heads()[0]),
        ("quantization_config", None),
        ("use_pos_enc", None, True),
    ):
        config.require(name, *neutral)
    attention, rotary = _attention(config, epsilon)
    mixers: dict[str, tuple[AttentionDefinition, RotarySpec | None]] = {
        FULL: (attention, rotary),
        CONV: (_convolution(config, hidden_size), None),
    }
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings", 128_000),
        hidden_size=hidden_size,
        layers=tuple(
            LayerDefinition(*mixers[kind], feed_forward)
            for kind, feed_forward in zip(_kinds(config), feed_forwards, strict=True)
        ),
        norm_epsilon=epsilon,
        tied_embedding=config.boolean("tie_word_embeddings", default=True),
    )


def _kinds(config: ConfigReader) -> tuple[str, ...]:
    """`FULL` or `CONV` for each layer: from `layer_types`, or the layers of `full_attn_idxs` are `FULL`, or all are."""
    config.may_idle("layer_types lists the kinds", "full_attn_idxs")
    listed = config.optional_kinds("layer_types", (FULL, CONV))
    if listed is not None:
        return listed
    layers = range(config.num_layers())
    full = frozenset(layers) if config.optional_list("full_attn_idxs") is None else config.indices("full_attn_idxs")
    return tuple(FULL if layer in full else CONV for layer in layers)


def _attention(config: ConfigReader, epsilon: float) -> tuple[SoftmaxAttentionDefinition, RotarySpec]:
    num_heads, num_kv_heads = config.heads()
    head_dim = config.count("head_dim", config.count("hidden_size") // num_heads, null_is_default=True)
    spec = SoftmaxSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    rotary = one_rotary(config, head_dim, config.count("max_position_embeddings", 128_000), THETA)
    return SoftmaxAttentionDefinition(spec, AttentionTensors(NormDefinition(epsilon))), rotary


def _convolution(config: ConfigReader, hidden_size: int) -> ShortConvolutionDefinition:
    config.may_idle(f"no layer is {CONV}", "conv_L_cache", "conv_bias")
    width = config.count("conv_L_cache", 3, least=2)
    return ShortConvolutionDefinition(
        ConvolutionSpec(hidden_size, width), bias=config.boolean("conv_bias", default=False)
    )


def _dense(config: ConfigReader, size: int) -> DenseFeedForward:
    config.require("hidden_act", None, "silu")
    return DenseFeedForward(size, Activation.SILU)


def _adjusted(config: ConfigReader) -> int:
    """The size of a feed-forward: two thirds of the config's, times a factor, rounded up, if it is to be adjusted."""
    config.may_idle("sizes are not adjusted", "block_ffn_dim_multiplier", "block_multiple_of")
    config.may_idle("the size is the same after rounding", "block_ffn_dim_multiplier", "block_multiple_of")
    size, multiple = config.count("intermediate_size"), config.count("block_multiple_of", 256)
    factor = config.optional_positive("block_ffn_dim_multiplier", absent=1.0)
    if not config.boolean("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


def _experts(config: ConfigReader) -> ExpertFeedForward:
    share = Share.OF_CHOSEN if config.boolean("norm_topk_prob", default=True) else Share.OF_ALL
    routing = Routing(
        config.count("num_experts", 32, most=MAX_LAYERS),
        config.count("num_experts_per_tok", 4),
        share,
        Score.SIGMOID,
        corrected=config.boolean("use_expert_bias", default=True),
        scale=config.positive("routed_scaling_factor", 1.0),
    )
    return ExpertFeedForward(
        intermediate_size=config.count("moe_intermediate_size", 1792),
        routing=routing,
        gate=Activation.SILU,
        storage=ExpertStorage.SEPARATE,
    )
