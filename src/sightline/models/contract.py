"""What the engine knows about any model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import AttentionSpec
from sightline.layers.scratch import Scratch
from sightline.models.weights import WeightReader


class Model(ABC):
    """A network with its weights. Its forward takes no batch but a planned one."""

    @property
    @abstractmethod
    def turns(self) -> bool:
        """Whether its products gain by activations that lie feature after feature in memory."""

    @abstractmethod
    def reserve(self, scratch: Scratch) -> None:
        """Asks for every buffer that any step will use."""

    @abstractmethod
    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        """Logits of the batch's wanted tokens, [num_logits, vocab_size] fp32, in memory of their own."""


class ModelDefinition(ABC):
    """What a config describes, known before any weight is read."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def max_positions(self) -> int: ...

    @abstractmethod
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One spec for each layer, in order."""

    @abstractmethod
    def load(self, weights: WeightReader) -> Model:
        """Builds the network. Every tensor of the checkpoint must be taken."""
