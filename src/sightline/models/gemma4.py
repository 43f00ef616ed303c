"""Gemma 4 (text): layers with and without a sliding window, of different head sizes, the last of which read the keys
and values of earlier layers. A second embedding of each token has a part for every layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sightline.attention.spec import SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.layers.rotary import ProportionalScaling, RotarySpec
from sightline.models.attention import AttentionTensors, BorrowedAttentionDefinition, SoftmaxAttentionDefinition
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.per_layer_inputs import PerLayerDefinition
from sightline.models.rope_config import DEFAULT_THETA, rotary_spec
from sightline.models.shared_config import FULL, ROPE_IDLE, SLIDING, layer_kinds, layer_windows

_PERIOD = 6
"""By default every sixth layer has full attention."""
_PROPORTIONAL = "proportional"
_DEFAULT_ROPE: Mapping[str, Mapping[str, object]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": _PROPORTIONAL, "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


class _HeadSizes(NamedTuple):
    num_kv_heads: int
    head_dim: int


def gemma4(config: ConfigReader) -> DecoderDefinition:
    """Reads a Gemma 4 text config. Experts (`enable_moe_block`) are not supported."""
    config.require("hidden_activation", "gelu_pytorch_tanh")
    config.require("use_bidirectional_attention", None, "vision")
    config.require("enable_moe_block", False)
    config.require("quantization_config", None)
    config.may_idle("no layer has a window", "sliding_window")
    hidden_size = config.count("hidden_size")
    kinds = read_kinds(config)
    norms = NormDefinition(config.positive("rms_norm_eps", 1e-6))
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings", 131_072),
        hidden_size=hidden_size,
        layers=read_layers(config, kinds, lenders_of(config, kinds), norms),
        norm_epsilon=norms.epsilon,
        tied_embedding=config.boolean("tie_word_embeddings", default=True),
        embedding_scale=hidden_size**0.5,
        sandwich_norms=True,
        logit_softcap=config.optional_positive("final_logit_softcapping"),
        per_layer=_per_layer(config),
        scaled_layers=True,
    )


def read_kinds(config: ConfigReader) -> tuple[str, ...]:
    """`FULL` or `SLIDING` for each layer. The last one must have full attention."""
    kinds = layer_kinds(config, lambda index: SLIDING if (index + 1) % _PERIOD else FULL)
    if kinds[-1] != FULL:
        raise UnsupportedModelError(f"gemma4: expected the last layer to be {FULL}, got {kinds[-1]} in layer_types")
    return kinds


def lenders_of(config: ConfigReader, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """For each layer, the one whose keys and values it reads: the last of its kind that has its own."""
    first = len(kinds) - config.count("num_kv_shared_layers", 0, least=0, most=len(kinds) - 1)
    own = kinds[:first]
    missing = set(kinds[first:]) - set(own)
    if missing:
        raise UnsupportedModelError(
            f"gemma4: expected {' and '.join(sorted(missing))} among the first {first} layers, whose cache the others "
            "share, got none; correct layer_types or num_kv_shared_layers"
        )
    lenders = {kind: max(index for index, each in enumerate(own) if each == kind) for kind in set(own)}
    return (*(None for _ in own), *(lenders[kind] for kind in kinds[first:]))


def read_layers(
    config: ConfigReader, kinds: Sequence[str], lenders: Sequence[int | None], norms: NormDefinition
) -> tuple[LayerDefinition, ...]:
    """The layers. Those that have a lender have queries alone."""
    num_heads, _ = config.heads()
    bias = config.boolean("attention_bias", default=False)
    config.may_idle("no layer shares the cache of another", "use_double_wide_mlp")
    is_wide = config.boolean("use_double_wide_mlp", default=False)
    keys_only = config.boolean("attention_k_eq_v", default=False)
    sizes = _head_sizes(config, kinds, keys_only=keys_only)
    rotaries = _rotaries(config, {kind: sizes[kind].head_dim for kind in set(kinds)})
    intermediate = config.count("intermediate_size")
    layers = []
    for kind, lender, window in zip(kinds, lenders, layer_windows(kinds, _window(config)), strict=True):
        spec = SoftmaxSpec(num_heads, sizes[kind].num_kv_heads, sizes[kind].head_dim, 1.0, window)
        wide = 2 if is_wide and lender is not None else 1
        feed_forward = DenseFeedForward(wide * intermediate, Activation.GELU_TANH)
        if lender is not None:
            borrowed = BorrowedAttentionDefinition(spec, norms, bias)
            layers.append(LayerDefinition(borrowed, rotaries[kind], feed_forward, lender))
            continue
        shares_keys = keys_only and kind == FULL
        tensors = AttentionTensors(norms, bias, bias, value_norm=norms, values_are_keys=shares_keys)
        layers.append(LayerDefinition(SoftmaxAttentionDefinition(spec, tensors), rotaries[kind], feed_forward))
    return tuple(layers)


def _window(config: ConfigReader) -> int:
    return config.count("sliding_window", 512)


def _per_layer(config: ConfigReader) -> PerLayerDefinition | None:
    config.may_idle("layers have no inputs of their own", "vocab_size_per_layer_input")
    size = config.count("hidden_size_per_layer_input", 256, least=0)
    # A model without this embedding may state that it has no words.
    num_tokens = config.count("vocab_size_per_layer_input", 262_144, least=0)
    if size == 0:
        return None
    if num_tokens < config.count("vocab_size"):
        raise UnsupportedModelError(
            f"gemma4: expected vocab_size_per_layer_input of at least vocab_size, got {num_tokens}; tokens beyond it "
            "would have no input"
        )
    return PerLayerDefinition(num_tokens, size, Activation.GELU_TANH)


def _head_sizes(config: ConfigReader, kinds: Sequence[str], *, keys_only: bool) -> dict[str, _HeadSizes]:
    """The key heads and their size for each kind of layer, from the newer or the older form of the config."""
    _, num_kv_heads = config.heads()
    usual = _HeadSizes(num_kv_heads, config.count("head_dim", 256))
    config.may_idle("per_layer_config has the sizes of heads", "global_head_dim", "num_global_key_value_heads")
    wide = config.count("global_head_dim", 512)
    of_full = config.optional_count("num_global_key_value_heads")
    by_layer = config.optional_section("per_layer_config")
    if by_layer is None:
        config.may_idle("only layers whose values are their keys have that number", "num_global_key_value_heads")
        return {SLIDING: usual, FULL: _HeadSizes(of_full or num_kv_heads if keys_only else num_kv_heads, wide)}
    found: dict[str, _HeadSizes] = {}
    for index, kind in enumerate(kinds):
        sizes = _changed(usual, by_layer.get(str(index)), index)
        if found.setdefault(kind, sizes) != sizes:
            raise UnsupportedModelError(
                f"gemma4: expected per_layer_config to give all layers of kind {kind} the same heads, got "
                f"{found[kind]} and {sizes}"
            )
    unknown = set(by_layer) - {str(index) for index in range(len(kinds))}
    if unknown:
        raise UnsupportedModelError(f"gemma4: expected per_layer_config of {len(kinds)} layers, got {sorted(unknown)}")
    return found


def _changed(usual: _HeadSizes, section: object, index: int) -> _HeadSizes:
    """The sizes of a layer with its section of `per_layer_config`, or None."""
    if section is None:
        return usual
    names = {"head_dim", "num_key_value_heads"}
    if not isinstance(section, Mapping) or set(section) - names:
        raise UnsupportedModelError(
            f"gemma4: expected head_dim and num_key_value_heads in per_layer_config.{index}, got {section!r}"
        )
    reader = ConfigReader(section, f"gemma4: per_layer_config.{index}")
    return _HeadSizes(reader.count("num_key_value_heads", usual.num_kv_heads), reader.count("head_dim", usual.head_dim))


def _rotaries(config: ConfigReader, head_dims: Mapping[str, int]) -> dict[str, RotarySpec]:
    """The rotary embedding of each kind of layer."""
    config.may_idle(ROPE_IDLE, "rope_parameters")
    sections = config.optional_section("rope_parameters")
    if sections is not None and set(sections) != {FULL, SLIDING}:
        raise UnsupportedModelError(
            f"gemma4: expected rope_parameters for {FULL} and {SLIDING}, got {', '.join(sorted(sections))}"
        )
    specs = {}
    for kind, head_dim in head_dims.items():
        section = (sections or _DEFAULT_ROPE)[kind]
        if not isinstance(section, Mapping):
            raise UnsupportedModelError(f"gemma4: expected rope_parameters.{kind} to be an object, got {section!r}")
        if "rope_theta" not in section:
            raise UnsupportedModelError(f"gemma4: expected rope_theta in rope_parameters.{kind}, got none; set it")
        specs[kind] = _rotary(section, head_dim, config)
    return specs


def _rotary(section: Mapping[str, object], head_dim: int, config: ConfigReader) -> RotarySpec:
    if section.get("rope_type") != _PROPORTIONAL:
        return rotary_spec(section, head_dim, DEFAULT_THETA, config.count("max_position_embeddings", 131_072))
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
    if set(section) - known:
        names = ", ".join(sorted(set(section) - known))
        raise UnsupportedModelError(f"rope: expected settings out of {', '.join(sorted(known))}, got {names}")
    reader = ConfigReader(section, "rope")
    share = reader.positive("partial_rotary_factor", 1.0)
    if share > 1.0 or head_dim % 2:
        raise UnsupportedModelError(
            f"rope: expected a partial_rotary_factor up to 1 of heads of an even size, got {share} of {head_dim}"
        )
    turning = math.floor(share * head_dim / 2)
    scaling = ProportionalScaling(reader.positive("factor", 1.0), turning)
    return RotarySpec(head_dim, reader.positive("rope_theta"), scaling)
