"""Which family a checkpoint belongs to. The only place that knows architectures by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.bert import bert
from sightline.models.config_reader import ConfigReader
from sightline.models.contract import Definition, EmbedderDefinition, ModelDefinition
from sightline.models.decoder import DecoderDefinition
from sightline.models.deepseek import deepseek_v2, deepseek_v3
from sightline.models.gemma import gemma2, gemma3
from sightline.models.gpt_oss import gpt_oss
from sightline.models.llama import llama, mistral
from sightline.models.qwen import qwen2, qwen3, qwen3_moe

_DefinitionT = TypeVar("_DefinitionT", bound=Definition)
Family = Callable[[ConfigReader], DecoderDefinition]

EMBEDDERS: Mapping[str, Callable[[ConfigReader], EmbedderDefinition]] = {
    "BertModel": bert,
}
"""Architectures that tell what a text is about, and cannot go on with it."""
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GptOssForCausalLM": gpt_oss,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
}


def define_model(config: Mapping[str, object], ledger: Ledger) -> ModelDefinition:
    """What the config describes; an unknown architecture is an error that lists the known ones."""
    return _define(config, ledger, FAMILIES)


def define_embedder(config: Mapping[str, object], ledger: Ledger) -> EmbedderDefinition:
    """As `define_model`, of a model of which only the states are wanted: a decoder will do, with or without a head."""
    bare = {_bare(name): family for name, family in FAMILIES.items()}
    return _define(config, ledger, {**bare, **FAMILIES, **EMBEDDERS})


def _bare(architecture: str) -> str:
    """What a family is called without its head. Gemma 3 with the plain name sees pictures."""
    return architecture.replace("ForCausalLM", "TextModel" if architecture.startswith("Gemma3") else "Model")


def _define(
    config: Mapping[str, object], ledger: Ledger, families: Mapping[str, Callable[[ConfigReader], _DefinitionT]]
) -> _DefinitionT:
    listed = config.get("architectures")
    architectures = [str(name) for name in listed] if isinstance(listed, (list, tuple)) else []
    for architecture in architectures:
        if architecture in families:
            reader = ConfigReader(config, architecture)
            definition = families[architecture](reader)
            reader.finish(ledger)
            return definition
    embeds = "; it embeds: use task embed" if set(architectures) & set(EMBEDDERS) else ""
    raise UnsupportedModelError(
        f"expected one of the architectures {', '.join(sorted(families))}, got "
        f"{', '.join(architectures) or 'none'} (model_type {config.get('model_type')!r}){embeds}"
    )
