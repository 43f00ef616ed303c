"""Which family a checkpoint belongs to. The only place that knows architectures by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.config_reader import ConfigReader
from sightline.models.contract import ModelDefinition
from sightline.models.gemma3 import gemma3
from sightline.models.llama import llama

Family = Callable[[ConfigReader], ModelDefinition]

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": llama,
    "Gemma3ForCausalLM": gemma3,
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
