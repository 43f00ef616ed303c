"""What the engine knows about any model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import AttentionSpec
from sightline.core.batch import RowMask
from sightline.layers.scratch import Scratch
from sightline.models.weights import WeightReader


class Model(ABC):
    """A network with its weights. Its forward takes no batch but a planned one.

    What it tells of a token is logits, or the token's state where it was built without an output projection.
    """

    @property
    @abstractmethod
    def turns(self) -> bool:
        """Whether its products gain by activations that lie feature after feature in memory."""

    @abstractmethod
    def reserve(self, scratch: Scratch) -> None:
        """Asks for every buffer that any step will use."""

    @abstractmethod
    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        """Of the batch's wanted tokens: logits [num_logits, vocab_size], or states [num_logits, hidden_size].

        In fp32, in memory of their own.
        """


class Definition(ABC):
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

    @property
    def copies(self) -> frozenset[str]:
        """Names of tensors that a checkpoint may store although they repeat others. They are compared, not kept."""
        return frozenset()


class ModelDefinition(Definition):
    """Of a model that goes on with a text."""

    @abstractmethod
    def load(self, weights: WeightReader) -> Model:
        """Builds the network. Every tensor of the checkpoint must be taken."""


class EmbedderDefinition(Definition):
    """Of a model that tells what a text is about."""

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Numbers in a token's state."""

    @property
    @abstractmethod
    def mask(self) -> RowMask:
        """Which tokens of a text see which."""

    @abstractmethod
    def load_states(self, weights: WeightReader) -> Model:
        """Builds the network up to the states. A tensor that is not taken must be known to be of no use for them."""
