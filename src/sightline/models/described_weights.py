"""The weights of a model as its config describes them: names, shapes and forms, without a file.

A model is built once on torch's meta device, and what it asks for are its tensors. Does not know model families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.kernels.packed_weights import WeightForm
from sightline.layers.linear import Projection
from sightline.models.contract import Definition
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.loading.config_only import ConfigCheckpoint
from sightline.models.weights import WeightReader
from sightline.text.tokenizers.tokenizer import Tokenizer

ModelT = TypeVar("ModelT")
DESCRIBED_DTYPE = torch.bfloat16


def load_without_memory(
    described: Checkpoint, load: Callable[[WeightReader], ModelT]
) -> tuple[ModelT, dict[str, TensorInfo]]:
    """Returns a model whose weights have shapes and no memory, and the tensors that it asked for."""
    reader = _ShapeReader(_WithoutTensors(described))
    return load(reader), reader.asked


def with_described_weights(
    checkpoint: ConfigCheckpoint, definition: Definition, load: Callable[[WeightReader], object]
) -> ConfigCheckpoint:
    """The checkpoint with the tensors that its config describes; experts are packed if the config says so."""
    _, tensors = load_without_memory(checkpoint, load)
    form = WeightForm.PLAIN if checkpoint.packed_as is None else checkpoint.packed_as.expert_form
    for stack in definition.expert_stacks:
        if form in stack.forms:
            for name in stack.names:
                tensors[name] = replace(tensors[name], packed=form, stored_as=form.name)
    return ConfigCheckpoint(checkpoint.location, MappingProxyType(tensors))


class _WithoutTensors(Checkpoint):
    """A model of which nothing is stored, so that no tensor is left over."""

    def __init__(self, described: Checkpoint) -> None:
        super().__init__(described.location, described.config, MappingProxyType({}), described.generation)

    def load_tokenizer(self) -> Tokenizer:
        raise CheckpointError(f"{self.location}: expected no use of a tokenizer, got one")

    def _read(self, name: str) -> Tensor:
        raise CheckpointError(f"{self.location}: expected no use of the values of {name}, got one")


class _ShapeReader(WeightReader):
    """Records which tensors a model asks for, and gives it tensors without memory."""

    def __init__(self, described: Checkpoint) -> None:
        super().__init__(described, DESCRIBED_DTYPE, torch.device("meta"), Ledger(), lambda _done, _total: None)
        self.asked: dict[str, TensorInfo] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self._claim(name, shape).shape, dtype=dtype or DESCRIBED_DTYPE, device=self.device)

    def projection(
        self, sizes: Mapping[str, int], in_features: int, *, bias: bool, dtype: torch.dtype | None = None
    ) -> Projection:
        # Joining tensors without memory takes torch longer than all the rest.
        for name, size in sizes.items():
            self._claim(f"{name}.weight", (size, in_features))
            if bias:
                self._claim(f"{name}.bias", (size,))
        total, kind = sum(sizes.values()), dtype or DESCRIBED_DTYPE
        weight = torch.empty((total, in_features), dtype=kind, device=self.device)
        return self.make_linear(weight, torch.empty(total, dtype=kind, device=self.device) if bias else None)

    def _claim(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        return self.asked.setdefault(name, TensorInfo(shape, DESCRIBED_DTYPE, "BF16"))
