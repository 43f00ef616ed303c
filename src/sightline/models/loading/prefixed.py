"""Adds the prefix `model.` to the tensor names of checkpoints that lack it.

A decoder that was saved without its output projection, as embedding models are, has tensors `layers.0…` where the whole
model has `model.layers.0…`.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import torch

from sightline.kernels.block_weights import BlockWeights
from sightline.kernels.coded_weights import CodedWeights
from sightline.models.loading.checkpoint import Checkpoint
from sightline.text.tokenizers.tokenizer import Tokenizer

PREFIX = "model."
_TELLING = "embed_tokens.weight"
"""A tensor that every decoder has: under this name if the prefix is missing."""


class PrefixedCheckpoint(Checkpoint):
    """A view of another checkpoint with the prefix before every name."""

    def __init__(self, bare: Checkpoint) -> None:
        self._bare = bare
        tensors = {PREFIX + name: info for name, info in bare.tensors.items()}
        super().__init__(bare.location, bare.config, MappingProxyType(tensors), bare.generation)

    def load_scales(self, name: str) -> torch.Tensor | None:
        return self._bare.load_scales(name.removeprefix(PREFIX))

    def file_of(self, name: str) -> Path:
        return self._bare.file_of(name.removeprefix(PREFIX))

    def load_tokenizer(self) -> Tokenizer:
        return self._bare.load_tokenizer()

    def _read(self, name: str) -> torch.Tensor:
        return self._bare.load(name.removeprefix(PREFIX))

    def _read_packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._bare.load_packed(name.removeprefix(PREFIX))

    def _read_codes(self, name: str) -> CodedWeights:
        return self._bare.load_codes(name.removeprefix(PREFIX))

    def _read_blocks(self, name: str) -> BlockWeights:
        return self._bare.load_blocks(name.removeprefix(PREFIX))


def with_prefix(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with the prefix if its names lack it."""
    return PrefixedCheckpoint(checkpoint) if _TELLING in checkpoint.tensors else checkpoint
