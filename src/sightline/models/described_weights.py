"""The weights of a model as its config describes them: names, shapes and forms, without a file.

A model is built once on torch's meta device, and what it asks for are its tensors. Does not know model families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from sightline.core.ledger import Ledger
from sightline.kernels.packed_weights import WeightForm
from sightline.models.contract import Definition
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.loading.config_only import ConfigCheckpoint
from sightline.models.weights import WeightReader

DESCRIBED_DTYPE = torch.bfloat16


def asked_tensors(described: Checkpoint, load: Callable[[WeightReader], object]) -> dict[str, TensorInfo]:
    """Returns the tensors that a model asks for while it is loaded. They take no memory."""
    reader = _ShapeReader(described)
    load(reader)
    return reader.asked


def with_described_weights(
    checkpoint: ConfigCheckpoint, definition: Definition, load: Callable[[WeightReader], object]
) -> ConfigCheckpoint:
    """The checkpoint with the tensors that its config describes; experts are packed if the config says so."""
    tensors = asked_tensors(checkpoint, load)
    form = WeightForm.PLAIN if checkpoint.packed_as is None else checkpoint.packed_as.expert_form
    for stack in definition.expert_stacks:
        if form in stack.forms:
            for name in stack.names:
                tensors[name] = replace(tensors[name], packed=form, stored_as=form.name)
    return ConfigCheckpoint(checkpoint.location, MappingProxyType(tensors))


class _ShapeReader(WeightReader):
    """Records which tensors a model asks for, and gives it tensors without memory."""

    def __init__(self, described: Checkpoint) -> None:
        super().__init__(described, DESCRIBED_DTYPE, torch.device("meta"), Ledger(), lambda _done, _total: None)
        self.asked: dict[str, TensorInfo] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self._claim(name, shape).shape, dtype=dtype or DESCRIBED_DTYPE, device=self.device)

    def _claim(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        return self.asked.setdefault(name, TensorInfo(shape, DESCRIBED_DTYPE, "BF16"))
