"""Reading of the config fields that several families share: dimensions, rotary embedding, windows, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from sightline.attention.spec import SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.layers.rotary import RotarySpec
from sightline.layers.routing import Routing, Share
from sightline.models.attention import AttentionTensors, SoftmaxAttentionDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, FeedForward
from sightline.models.layer_definition import LayerDefinition
from sightline.models.rope_config import DEFAULT_THETA, rotary_spec, same_type_key, state_once

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
NO_ROPE_SCALING: Mapping[str, object] = MappingProxyType({})
NO_TENSORS = AttentionTensors()
SAME_EXPERT_LAYERS = "the same layers have experts with a slightly different value"
ROPE_IDLE = "this kind of rotary embedding does not use it, or no layer has that kind"


def plain_decoder(
    config: ConfigReader,
    windows: Sequence[int | None],
    feed_forwards: Sequence[FeedForward],
    *,
    head_dim: int | None = None,
    theta: float = DEFAULT_THETA,
    rope: Mapping[str, object] = NO_ROPE_SCALING,
    rotated_share: float | None = None,
    sinks: bool = False,
    tensors: AttentionTensors = NO_TENSORS,
) -> DecoderDefinition:
    """The decoder of Llama, Mistral, Qwen, gpt-oss and GLM.

    `head_dim`, `theta`, the section `rope` and `rotated_share` are defaults for configs that have none. Families
    without a `rotated_share` rotate whole heads.
    """
    config.require("hidden_act", "silu")
    config.require("quantization_config", None)
    num_heads, num_kv_heads = config.heads()
    hidden_size = config.count("hidden_size")
    head_dim = config.count("head_dim", head_dim or hidden_size // num_heads, null_is_default=True)
    num_positions = config.count("max_position_embeddings")
    rotary = one_rotary(config, head_dim, num_positions, theta, rope, rotated_share)
    scale = head_dim**-0.5
    tensors = replace(tensors, rotated_dim=rotary.rotated_dim)
    specs = (SoftmaxSpec(num_heads, num_kv_heads, head_dim, scale, window, sinks=sinks) for window in windows)
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=num_positions,
        hidden_size=hidden_size,
        layers=tuple(
            LayerDefinition(SoftmaxAttentionDefinition(spec, tensors), rotary, feed_forward)
            for spec, feed_forward in zip(specs, feed_forwards, strict=True)
        ),
        norm_epsilon=config.positive("rms_norm_eps"),
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
        causal=config.boolean("is_causal", default=True),
    )


def dense_layers(config: ConfigReader, *, bias: bool = False) -> tuple[DenseFeedForward, ...]:
    """The same SiLU feed-forward in every layer."""
    return (DenseFeedForward(config.count("intermediate_size"), Activation.SILU, bias),) * config.num_layers()


def one_rotary(
    config: ConfigReader,
    head_dim: int,
    num_positions: int,
    theta: float = DEFAULT_THETA,
    default: Mapping[str, object] = NO_ROPE_SCALING,
    rotated_share: float | None = None,
) -> RotarySpec:
    """The rotary embedding of a model whose layers share one."""
    section = rope_section(config, default, rotated_share)
    return rotary_spec(section, head_dim, theta, num_positions, may_be_partial=rotated_share is not None)


def rope_section(
    config: ConfigReader,
    default: Mapping[str, object] = NO_ROPE_SCALING,
    rotated_share: float | None = None,
) -> Mapping[str, object]:
    """The rope section of a config, in its newer or older form, of a model whose layers share one.

    `default` is used if the config has neither. An empty `rope_parameters` counts as a section, as in transformers.
    `rotated_share` is the default of `partial_rotary_factor`; None if the family rotates whole heads.
    """
    if rotated_share is None:
        config.require("partial_rotary_factor", None, 1.0)
    config.may_idle(ROPE_IDLE, "rope_scaling", "rope_parameters", "original_max_position_embeddings")
    older, newer = config.optional_section("rope_scaling"), config.optional_section("rope_parameters")
    if older and newer and same_type_key(older) != same_type_key(newer):
        raise UnsupportedModelError(
            f"rope: expected rope_scaling or rope_parameters, or both alike, got {dict(older)} and {dict(newer)}; "
            "remove the one that does not hold"
        )
    section = dict(older or (default if newer is None else newer))
    if "rope_theta" in config:
        state_once(section, "rope_theta", config.positive("rope_theta"), "rope_theta")
    if "original_max_position_embeddings" in config:
        original = config.count("original_max_position_embeddings")
        state_once(section, "original_max_position_embeddings", original, "original_max_position_embeddings")
    if rotated_share is not None:
        if "partial_rotary_factor" in config:
            share = config.positive("partial_rotary_factor")
            state_once(section, "partial_rotary_factor", share, "partial_rotary_factor")
        section.setdefault("partial_rotary_factor", rotated_share)
    return section


def read_routing(config: ConfigReader, share: Share, *, num_experts: int, experts_per_token: int) -> Routing:
    """How tokens choose experts. The two counts are defaults."""
    num_experts = config.count("num_experts", num_experts)
    if "num_local_experts" in config:
        num_local = config.count("num_local_experts")
        config.require("num_experts", num_local)
        num_experts = num_local
    experts_per_token = config.count("num_experts_per_tok", experts_per_token)
    if not experts_per_token <= num_experts <= MAX_LAYERS:
        raise UnsupportedModelError(
            f"expected from {experts_per_token} experts, as many as a token takes, to {MAX_LAYERS}, got {num_experts}"
        )
    return Routing(num_experts, experts_per_token, share)


def layer_kinds(config: ConfigReader, unlisted: Callable[[int], str]) -> tuple[str, ...]:
    """`FULL` or `SLIDING` for each layer: from `layer_types`, or else by the layer's index."""
    listed = config.optional_kinds("layer_types", (FULL, SLIDING))
    return listed or tuple(unlisted(index) for index in range(config.num_layers()))


def layer_windows(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer, None for full attention."""
    if window is None and SLIDING in kinds:
        raise UnsupportedModelError(
            f"expected a sliding_window for layers of kind {SLIDING}, got null or use_sliding_window = false; "
            f"set it, or list only {FULL} in layer_types"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)
