"""Configs of EAGLE-3 heads, in the two formats in which they are published.

    original      one level; `LlamaForCausalLMEagle3`, with `draft_vocab_size`
    speculators   `speculators_model_type: eagle3`; the layer's fields are in `transformer_layer_config`

Owns the fields of heads. The layer is read as that of the family that it is built like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from sightline.core.errors import UnsupportedModelError
from sightline.models.config_reader import INFORMATIONAL, ConfigReader
from sightline.models.contract import Taps
from sightline.models.decoder import DecoderDefinition
from sightline.models.eagle3 import Eagle3Definition, InputNorms
from sightline.models.llama import llama
from sightline.models.qwen import qwen3

LAYER_SECTION = "transformer_layer_config"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ORIGINAL_SECTION = "eagle_config"
_LAYERS: Mapping[str, Callable[[ConfigReader], DecoderDefinition]] = MappingProxyType({"llama": llama, "qwen3": qwen3})
"""The layers that a head may have, by `model_type`."""
_SECTION_SWITCHES: Mapping[str, bool] = MappingProxyType(
    {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
)
"""Fields of the original format's section, and the value that describes an EAGLE-3 head."""


def original_head(config: ConfigReader, target: DecoderDefinition) -> Eagle3Definition:
    """Reads a config of the original format."""
    config.require("tie_word_embeddings", None, False)
    config.require("target_layer_ids", None)
    config.require("parallel_drafting", None, False)
    section = config.optional_section(ORIGINAL_SECTION) or {}
    for name, value in section.items():
        if name != LAYER_IDS and value is not None and value is not _SECTION_SWITCHES.get(name):
            known = ", ".join(f"{switch} = {usual}" for switch, usual in _SECTION_SWITCHES.items())
            raise UnsupportedModelError(
                f"{ORIGINAL_SECTION}: expected {LAYER_IDS}, and {known}, got {name} = {value!r}: it is not supported"
            )
    outputs, inputs = section.get(LAYER_IDS), config.optional_list(LAYER_IDS)
    if outputs and inputs:
        raise UnsupportedModelError(
            f"expected {LAYER_IDS} once, got it both outside and inside {ORIGINAL_SECTION}, where it counts from "
            "another layer; remove one"
        )
    # Inside the section a number is the layer whose output is taken, outside of it the one whose input is.
    taps = _taps(outputs, 1, target) if outputs else _taps(inputs, 0, target)
    return _head(config, target, taps, norm_before_residual=config.boolean("norm_before_residual", default=False))


def speculators_head(config: ConfigReader, target: DecoderDefinition) -> Eagle3Definition:
    """Reads a config of speculators, as `flattened` gives it."""
    config.informational("embed_requires_grad", "speculators_config", "speculators_version", "speculators_model_type")
    config.may_idle("the head has an output projection of its own", "tie_word_embeddings")
    if "norm_before_residual" not in config:
        raise UnsupportedModelError(
            "expected config field norm_before_residual, got none: speculators takes it for false and vLLM for true; "
            "set it as the head was trained"
        )
    taps = _taps(config.optional_list(LAYER_IDS), 0, target)
    return _head(config, target, taps, norm_before_residual=config.boolean("norm_before_residual", default=False))


def flattened(config: Mapping[str, object]) -> Mapping[str, object]:
    """A config of speculators with the layer's fields beside those of the head."""
    layer = config.get(LAYER_SECTION)
    if not isinstance(layer, Mapping):
        raise UnsupportedModelError(f"expected config field {LAYER_SECTION} to be an object, got {layer!r}")
    head = {name: value for name, value in config.items() if name not in (LAYER_SECTION, "model_type")}
    for name in (set(head) & set(layer)) - INFORMATIONAL:
        if head[name] != layer[name]:
            raise UnsupportedModelError(
                f"expected one value of config field {name}, got {head[name]!r}, and {layer[name]!r} in "
                f"{LAYER_SECTION}; correct the one that is wrong"
            )
    return {**layer, **head}


def _taps(listed: object, offset: int, target: DecoderDefinition) -> Taps:
    """The states to take: those `listed` plus `offset`, or the usual ones if there is no list."""
    count = len(target.layers)
    streams: tuple[int, ...] = (2, count // 2, count - 3)
    if listed:
        numbers = listed if isinstance(listed, (list, tuple)) else ()
        streams = tuple(each + offset for each in numbers if isinstance(each, int) and not isinstance(each, bool))
        if len(streams) != len(numbers) or not streams:
            raise UnsupportedModelError(f"expected {LAYER_IDS} to be a list of integers, got {listed!r}")
    if list(streams) != sorted(set(streams)) or not 0 <= streams[0] <= streams[-1] <= count:
        named = f"the listed {listed!r}" if listed else "the usual ones, because the config lists none"
        raise UnsupportedModelError(
            f"expected states of ascending layers of a target with {count} layers, got {streams} ({named}); set "
            f"{LAYER_IDS} to those that the head was trained with"
        )
    return Taps(streams)


def _head(
    config: ConfigReader, target: DecoderDefinition, taps: Taps, *, norm_before_residual: bool
) -> Eagle3Definition:
    config.require("num_hidden_layers", 1)
    config.require("is_causal", None, True)
    config.may_idle(
        "the head guesses at every position of the target; beyond this many it may guess worse",
        "max_position_embeddings",
    )
    described = _LAYERS[config.choice("model_type", tuple(_LAYERS), "llama")](config)
    hidden_size = described.hidden_size
    target_size = config.count("target_hidden_size", hidden_size, null_is_default=True)
    num_drafted = config.count("draft_vocab_size", described.num_tokens, null_is_default=True)
    found = (described.num_tokens, target_size)
    if found != (target.num_tokens, target.hidden_size) or num_drafted > target.num_tokens:
        raise UnsupportedModelError(
            f"expected a head for a target with {target.num_tokens} tokens and states of width {target.hidden_size}, "
            f"got one that guesses {num_drafted} of {found[0]} tokens from states of width {found[1]}; use a head that "
            "was trained for this model"
        )
    return Eagle3Definition(
        layer=described.layers[0],
        hidden_size=hidden_size,
        num_tokens=described.num_tokens,
        num_drafted=num_drafted,
        num_positions=target.num_positions,
        norm_epsilon=described.norm_epsilon,
        target_size=target_size,
        taps=taps,
        input_norms=_input_norms(config),
        norm_before_residual=norm_before_residual,
        norm_output=config.boolean("norm_output", default=False),
    )


def _input_norms(config: ConfigReader) -> InputNorms:
    joined, each = (config.boolean(name, default=False) for name in ("norm_before_fc", "fc_norm"))
    if joined and each:
        raise UnsupportedModelError("expected norm_before_fc or fc_norm, got both; correct the one that is wrong")
    return InputNorms.JOINED if joined else InputNorms.EACH if each else InputNorms.NONE
