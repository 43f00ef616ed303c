"""Networks that draft for a model: how they are described, before any weight is read, and how they are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.layers.operations import Operations
from sightline.models.contract import NO_TAPS, Definition, Model, ModelDefinition, Taps
from sightline.models.decoder import Decoder
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.weights import WeightReader


def as_given(states: Tensor, operations: Operations) -> Tensor:
    """The states as the model gives them."""
    del operations
    return states


def _as_they_are(logits: Tensor) -> Tensor:
    return logits


def likeliest(logits: Tensor, operations: Operations) -> Tensor:
    """The likeliest token of each row of logits, [num_rows] int64 on the device."""
    packed = torch.empty((2, logits.shape[0]), dtype=torch.int64, device=logits.device)
    operations.best_tokens(logits, packed)
    return packed[0]


@dataclass(frozen=True, eq=False)
class LoadedDraft:
    """The networks of a drafter, with their weights."""

    models: tuple[Model, ...]
    """In the order of `DraftDefinition.networks`."""
    fuse: Callable[[Tensor, Operations], Tensor] = as_given
    """Turns the model's states [num_tokens, taps * width] into those that the first network takes."""
    choose: Callable[[Tensor, Operations], Tensor] = likeliest
    """The model's token that each row of a network's logits prefers, [num_rows] int64."""
    spread: Callable[[Tensor], Tensor] = _as_they_are
    """A network's logits as logits of the model's tokens, [num_rows, vocab_size] fp32 and finite."""


NO_DRAFT = LoadedDraft(())


class DraftDefinition(ABC):
    """The networks of one drafter.

    Each has a cache of its own, in the pages of the sequence that it drafts for, or reads that of the model.
    """

    @property
    @abstractmethod
    def taps(self) -> Taps:
        """The states of the model that the networks take."""

    @property
    @abstractmethod
    def networks(self) -> tuple[Definition, ...]: ...

    @property
    def target_tensors(self) -> tuple[str, ...]:
        """What the names of their tensors begin with, if they are stored in the checkpoint of the model."""
        return ()

    @abstractmethod
    def load(self, target: Decoder, weights: WeightReader) -> LoadedDraft:
        """Builds the networks. They may use the target's own embedding and output projection."""


@dataclass(frozen=True)
class DraftModel(DraftDefinition):
    """A smaller model with the same tokens, which generates by itself."""

    definition: ModelDefinition

    @property
    def taps(self) -> Taps:
        return NO_TAPS

    @property
    def networks(self) -> tuple[Definition, ...]:
        return (self.definition,)

    def load(self, target: Decoder, weights: WeightReader) -> LoadedDraft:
        del target
        return LoadedDraft((self.definition.load(weights),))


@dataclass(frozen=True)
class DraftSource:
    """A drafter's networks, and where their weights are."""

    definition: DraftDefinition
    checkpoint: Checkpoint
