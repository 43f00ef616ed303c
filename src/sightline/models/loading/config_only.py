"""A model of which there is only a config: enough to say what it would ask for, and nothing to run.

Owns the reading of a config.json that stands alone. Does not know what the config means.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import torch

from sightline.core.errors import CheckpointError
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.generation import GenerationDefaults
from sightline.models.loading.safetensors.folder import read_config
from sightline.text.tokenizers.tokenizer import Tokenizer


class ConfigCheckpoint(Checkpoint):
    """Has no tensors: what weights take of the memory is not known."""

    def __init__(self, path: Path) -> None:
        config, _ = read_config(path)
        super().__init__(path, MappingProxyType(config), MappingProxyType({}), GenerationDefaults(frozenset()))

    def load_tokenizer(self) -> Tokenizer:
        self._refuse("a tokenizer")

    def _read(self, name: str) -> torch.Tensor:
        self._refuse(name)

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.location}: expected {what}, got a config alone. Give the folder of the model.")
