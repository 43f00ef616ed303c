"""Finds the model family of a config. The only module that knows architectures by name.

Owns the rule that every field of a config has an effect on the definition, is refused, or is recorded in the ledger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.bailing import bailing_hybrid
from sightline.models.bert import bert
from sightline.models.config_reader import INFORMATIONAL, NOTED, ConfigReader
from sightline.models.contract import Definition, EmbedderDefinition
from sightline.models.decoder import DecoderDefinition
from sightline.models.deepseek import deepseek_v2, deepseek_v3, deepseek_v32
from sightline.models.deepseek_v4 import deepseek_v4
from sightline.models.eagle3 import Eagle3Definition
from sightline.models.eagle3_config import LAYER_SECTION, flattened, original_head, speculators_head
from sightline.models.field_effects import fields_without_effect
from sightline.models.foreign_fields import FOREIGN_FIELDS, is_neutral
from sightline.models.gemma import gemma2, gemma3
from sightline.models.gemma4 import gemma4
from sightline.models.glm import glm4_moe, glm_moe_dsa
from sightline.models.gpt_oss import gpt_oss
from sightline.models.granite import granite_hybrid
from sightline.models.kimi_linear import kimi_linear
from sightline.models.lfm2 import lfm2, lfm2_moe
from sightline.models.llama import llama, mistral
from sightline.models.minimax import minimax
from sightline.models.nemotron_h import nemotron_h
from sightline.models.qwen import qwen2, qwen3, qwen3_moe
from sightline.models.qwen_hybrid import qwen3_5, qwen3_5_moe, qwen3_next

_HEADS = re.compile("(ForCausalLM|ForConditionalGeneration|TextModel|Model)$")
_DefinitionT = TypeVar("_DefinitionT", bound=Definition)
Family = Callable[[ConfigReader], DecoderDefinition]

EMBEDDERS: Mapping[str, Callable[[ConfigReader], EmbedderDefinition]] = {
    "BertModel": bert,
}
"""Architectures that can only embed texts."""
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "GptOssForCausalLM": gpt_oss,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "DeepseekV32ForCausalLM": deepseek_v32,
    "DeepseekV4ForCausalLM": deepseek_v4,
    "Glm4MoeForCausalLM": glm4_moe,
    "GlmMoeDsaForCausalLM": glm_moe_dsa,
    "NemotronHForCausalLM": nemotron_h,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2_moe,
    "KimiLinearForCausalLM": kimi_linear,
    "BailingHybridForCausalLM": bailing_hybrid,
    "MiniMaxForCausalLM": minimax,
}
ORIGINAL_HEADS = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
"""Architectures of EAGLE-3 heads whose configs have one level."""
SPECULATORS_TYPE = "eagle3"
MODEL_TYPES: Mapping[str, str] = {
    "bert": "Bert",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "gemma4_text": "Gemma4",
    "gpt_oss": "GptOss",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "deepseek_v4": "DeepseekV4",
    "kimi_k2": "DeepseekV3",
    "glm4_moe": "Glm4Moe",
    "glm_moe_dsa": "GlmMoeDsa",
    "nemotron_h": "NemotronH",
    "granitemoehybrid": "GraniteMoeHybrid",
    "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe",
    "kimi_linear": "KimiLinear",
    "bailing_hybrid": "BailingHybrid",
    "minimax": "MiniMax",
}
"""The prefix of the architecture names of each `model_type`, the field by which transformers chooses the network."""


def define_model(config: Mapping[str, object], ledger: Ledger) -> DecoderDefinition:
    """The definition of the model that a config describes. Raises `UnsupportedModelError` for unknown architectures."""
    definition = _define(config, ledger, FAMILIES)
    if not definition.causal:
        raise UnsupportedModelError(
            "config field is_causal = False: tokens attend to the tokens after them, so the model cannot generate "
            "text; use task embed"
        )
    return definition


def define_embedder(config: Mapping[str, object], ledger: Ledger) -> EmbedderDefinition:
    """Like `define_model`, for embedding: also accepts encoders, and decoders without an output projection."""
    bare = {_bare(name): family for name, family in FAMILIES.items()}
    definition = _define(config, ledger, {**bare, **FAMILIES, **EMBEDDERS})
    if definition.lenders:
        raise UnsupportedModelError(
            f"layers {', '.join(map(str, definition.lenders))} read the cache of other layers, which is not supported "
            "for task embed yet: texts are embedded without a cache"
        )
    return definition


def define_eagle3(config: Mapping[str, object], target: DecoderDefinition, ledger: Ledger) -> Eagle3Definition:
    """The definition of an EAGLE-3 head that guesses for `target`. Raises `UnsupportedModelError` for other models."""
    listed = config.get("architectures")
    architectures = [str(name) for name in listed] if isinstance(listed, (list, tuple)) else []
    if "speculators_model_type" in config or LAYER_SECTION in config:
        kind = config.get("speculators_model_type")
        if kind != SPECULATORS_TYPE:
            raise UnsupportedModelError(f"expected speculators_model_type {SPECULATORS_TYPE!r}, got {kind!r}")
        family = partial(speculators_head, target=target)
        return _define_family(flattened(config), ledger, "EAGLE-3 of speculators", family)
    for architecture in architectures:
        if architecture in ORIGINAL_HEADS:
            return _define_family(config, ledger, architecture, partial(original_head, target=target))
    raise UnsupportedModelError(
        f"expected an EAGLE-3 head, of the architecture {' or '.join(sorted(ORIGINAL_HEADS))} or with "
        f"speculators_model_type {SPECULATORS_TYPE!r}, got {', '.join(architectures) or 'none'}"
    )


def _bare(architecture: str) -> str:
    """The name of an architecture without its head. From Gemma 3 and Qwen3.5 on the plain name is the model with
    vision."""
    with_vision = architecture.startswith(("Gemma3", "Gemma4", "Qwen3_5"))
    return architecture.replace("ForCausalLM", "TextModel" if with_vision else "Model")


def _define(
    config: Mapping[str, object], ledger: Ledger, families: Mapping[str, Callable[[ConfigReader], _DefinitionT]]
) -> _DefinitionT:
    listed = config.get("architectures")
    architectures = [str(name) for name in listed] if isinstance(listed, (list, tuple)) else []
    for architecture in architectures:
        if architecture in families:
            _check_model_type(config, architecture, ledger)
            return _define_family(config, ledger, architecture, families[architecture])
    embeds = "; it is an embedding model: use task embed" if set(architectures) & set(EMBEDDERS) else ""
    raise UnsupportedModelError(
        f"expected one of the architectures {', '.join(sorted(families))}, got "
        f"{', '.join(architectures) or 'none'} (model_type {config.get('model_type')!r}){embeds}"
    )


def _check_model_type(config: Mapping[str, object], architecture: str, ledger: Ledger) -> None:
    model_type = config.get("model_type")
    if model_type is None:
        return
    family = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        ledger.degrade(
            f"config field model_type = {model_type!r}",
            f"is not known; the architecture {architecture} decides",
            "check that the model is of that architecture",
        )
    elif _HEADS.sub("", architecture) != family:
        raise UnsupportedModelError(
            f"expected architectures and model_type of one family, got {architecture} and {model_type!r}; correct the "
            "one that is wrong in config.json"
        )


def _define_family(
    config: Mapping[str, object],
    ledger: Ledger,
    architecture: str,
    family: Callable[[ConfigReader], _DefinitionT],
) -> _DefinitionT:
    def define(changed: Mapping[str, object]) -> _DefinitionT:
        return _read(family, ConfigReader(changed, architecture))

    reader = ConfigReader(config, architecture)
    definition = _read(family, reader)
    described = {
        name: value
        for name, value in config.items()
        if name not in INFORMATIONAL and name not in reader.inert and name != "model_type"
    }
    for path in fields_without_effect(described, define, definition, reader.choices):
        name, field = path[0], ".".join(path)
        why = reader.idle.get(field, reader.idle.get(name))
        if (why is not None or name in FOREIGN_FIELDS) and is_neutral(name, config[name]):
            continue
        if why is not None:
            ledger.note(f"config field {field}", f"has no effect: {why}")
        elif name in NOTED:
            ledger.note(f"config field {name}", "has no effect: no forward depends on it")
        elif name not in FOREIGN_FIELDS:
            ledger.degrade(
                f"config field {name}",
                f"is not known to the {architecture} family and was not used",
                "check that it does not change the model's output",
            )
        else:
            raise UnsupportedModelError(
                f"{architecture}: config field {name} = {config[name]!r} changes the result of other families and is "
                "not supported in this one; use another model, or remove the field if it was left there by mistake"
            )
    return definition


def _read(family: Callable[[ConfigReader], _DefinitionT], reader: ConfigReader) -> _DefinitionT:
    """The family's definition. The definition types raise `ValueError` for values that do not fit each other."""
    try:
        return family(reader)
    except ValueError as error:
        raise UnsupportedModelError(f"the config's values do not fit each other: {error}") from error
