"""Networks that draft for a model: how they are described, before any weight is read, and how they are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from sightline.models.contract import NO_TAPS, Definition, Model, ModelDefinition, Taps
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.weights import WeightReader


class DraftDefinition(ABC):
    """The networks of one drafter. Each has a cache of its own, in the pages of the sequence that it drafts for."""

    @property
    @abstractmethod
    def taps(self) -> Taps:
        """The states of the model that the networks take."""

    @property
    @abstractmethod
    def networks(self) -> tuple[Definition, ...]: ...

    @abstractmethod
    def load(self, target: Model, weights: WeightReader) -> tuple[Model, ...]:
        """Builds each network. They may use the target's own embedding and output projection."""


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

    def load(self, target: Model, weights: WeightReader) -> tuple[Model, ...]:
        del target
        return (self.definition.load(weights),)


@dataclass(frozen=True)
class DraftSource:
    """A drafter's networks, and where their weights are."""

    definition: DraftDefinition
    checkpoint: Checkpoint
