"""A checkpoint that is only a config.json: enough to tell what a model would need, not to run it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import torch

from sightline.core.errors import CheckpointError
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.loading.generation import GenerationDefaults
from sightline.models.loading.safetensors.folder import read_config
from sightline.text.tokenizers.tokenizer import Tokenizer


class ConfigCheckpoint(Checkpoint):
    """A config without a file of weights. `tensors` are those that it describes, if somebody found out."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo] = MappingProxyType({})) -> None:
        config, self.packed_as = read_config(path)
        super().__init__(path, MappingProxyType(config), tensors, GenerationDefaults(frozenset()))

    def load_tokenizer(self) -> Tokenizer:
        self._refuse("a tokenizer")

    def _read(self, name: str) -> torch.Tensor:
        self._refuse(name)

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.location}: expected {what}, got a config alone. Give the folder of the model.")
