"""Which family a checkpoint belongs to. The only place that knows architectures by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.config_reader import ConfigReader
from sightline.models.contract import ModelDefinition
from sightline.models.deepseek import deepseek_v2, deepseek_v3
from sightline.models.gemma import gemma2, gemma3
from sightline.models.gpt_oss import gpt_oss
from sightline.models.llama import llama, mistral
from sightline.models.qwen import qwen2, qwen3, qwen3_moe

Family = Callable[[ConfigReader], ModelDefinition]

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
    listed = config.get("architectures")
    architectures = [str(name) for name in listed] if isinstance(listed, (list, tuple)) else []
    for architecture in architectures:
        if architecture in FAMILIES:
            reader = ConfigReader(config, architecture)
            definition = FAMILIES[architecture](reader)
            reader.finish(ledger)
            return definition
    raise UnsupportedModelError(
        f"expected one of the architectures {', '.join(sorted(FAMILIES))}, got "
        f"{', '.join(architectures) or 'none'} (model_type {config.get('model_type')!r})"
    )
