"""The interface of models and their definitions, as the engine sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sightline.attention.groups import LayerGroup, Lenders, group_layers
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import AttentionSpec, IndexingSpec
from sightline.core.batch import RowMask
from sightline.core.errors import ConfigError
from sightline.distributed.ranks import Division
from sightline.kernels.packed_weights import WeightForm
from sightline.layers.scratch import Scratch
from sightline.models.parts import RankPart
from sightline.models.weights import WeightReader


class ExpertStack(NamedTuple):
    """The experts of a layer, as a checkpoint stores them."""

    names: tuple[str, ...]
    """The names of their matrices."""
    forms: tuple[WeightForm, ...]
    """The packed forms that they keep, if all are stored in one of them and experts are computed at once."""
    unused_share: float
    """The share of them that a token does not use."""


@dataclass(frozen=True)
class Taps:
    """Which states of a network are given to others beside its logits, concatenated for each token in this order."""

    streams: tuple[int, ...] = ()
    """States between the layers: i is what layer i takes; the number of layers is what the last one gives."""
    final: bool = False
    """The state after the final norm."""

    @property
    def count(self) -> int:
        return len(self.streams) + self.final


NO_TAPS = Taps()


class GivenStates:
    """The states that a network is given for each token of a step."""

    def __init__(self, scratch: Scratch, width: int) -> None:
        self.states = scratch.take_rows("states.given", width)


class MadeStates:
    """The states that a network gives for each token of a step."""

    def __init__(self, scratch: Scratch, width: int) -> None:
        self.states = scratch.take_rows("states.made", width)


class Model(ABC):
    """A network with its weights. Its forward takes only planned batches.

    It returns logits, or hidden states if it was built without an output projection. Beside tokens it may take a state
    for each of them, and beside logits it may give one: drafters continue from the states of the network that they
    draft for. It reads them from `GivenStates` and leaves them in `MadeStates`; `Runner` fills and copies those.
    """

    @property
    def states_in(self) -> int:
        """The width of the state that it takes for each token; 0 if it takes none."""
        return 0

    @property
    def states_out(self) -> int:
        """The width of the state that it gives for each token; 0 if it gives none."""
        return 0

    @property
    @abstractmethod
    def turns(self) -> bool:
        """True if the model's products are faster with feature-major activations."""

    @abstractmethod
    def reserve(self, scratch: Scratch) -> None:
        """Allocates every buffer that any step will use."""

    @abstractmethod
    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        """Logits [num_logits, vocab_size] or states [num_logits, hidden_size] of the tokens that the batch asks for.

        They are fp32 and do not share memory with the scratch.
        """


class Definition(ABC):
    """A model as its config describes it, known before any weight is read."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def max_positions(self) -> int: ...

    @abstractmethod
    def attention_specs(self) -> tuple[AttentionSpec | None, ...]:
        """The attention spec of each layer; None for a layer that is only a feed-forward."""

    @property
    def lenders(self) -> Lenders:
        """The layers that read another layer's cache entries and have no keys and values of their own."""
        return {}

    @property
    def indexers(self) -> Mapping[int, IndexingSpec]:
        """The layers that choose which tokens they, and layers behind them, attend to."""
        return {}

    def groups(self, network: str = "", target: Sequence[LayerGroup] = ()) -> tuple[LayerGroup, ...]:
        """The layers in groups whose names begin with that of the network.

        `target` are the groups of the model that it drafts for, if it does, whose cache it may read.
        """
        del target
        return group_layers(self.attention_specs(), network, self.lenders, self.indexers)

    def step_costs(self) -> tuple[float, float]:
        """Costs of a token's logits, and of attending to one other token, relative to a token in the layers.

        Both are 0 if a definition does not know them.
        """
        return 0.0, 0.0

    @property
    def exchanges_rows(self) -> bool:
        """True if this is a rank's part, and replicas compute some layers together: they run steps of one size."""
        return False

    @property
    def copies(self) -> frozenset[str]:
        """Tensors that a checkpoint may store although they repeat others. They are compared and then dropped."""
        return frozenset()

    @property
    def beside_prefixes(self) -> tuple[str, ...]:
        """What the names of tensors begin with that a checkpoint may store for other networks. They are not loaded."""
        return ()

    @property
    def expert_stacks(self) -> tuple[ExpertStack, ...]:
        """The experts of each layer that has some."""
        return ()


class ModelDefinition(Definition):
    """The definition of a model that generates text."""

    @abstractmethod
    def load(self, weights: WeightReader, taps: Taps = NO_TAPS) -> Model:
        """Builds the network, which gives the states that `taps` names. Every tensor of the checkpoint must be used."""

    def of_rank(self, division: Division, *, whole_vocabulary: bool = False) -> RankPart[ModelDefinition]:
        """The part of a rank. With `whole_vocabulary`, each rank has the vectors and logits of all tokens."""
        del whole_vocabulary
        raise ConfigError(
            f"expected a model that can be divided for {division.layers}, got one that cannot; use one rank"
        )


@dataclass(frozen=True)
class EmbedderDefinition(Definition):
    """The definition of a model that computes a state for each token of a text."""

    num_tokens: int
    """The size of the vocabulary."""
    num_positions: int
    hidden_size: int

    @property
    def vocab_size(self) -> int:
        return self.num_tokens

    @property
    def max_positions(self) -> int:
        return self.num_positions

    @property
    def state_size(self) -> int:
        """The size of a token's state."""
        return self.hidden_size

    @property
    @abstractmethod
    def token_weights(self) -> int:
        """Weights of the layers that each token is multiplied with: of experts, only those that it uses."""

    def step_costs(self) -> tuple[float, float]:
        """Counts multiplications."""
        token: float = self.token_weights
        context: float = 0
        for spec in (*self.attention_specs(), *self.indexers.values()):
            of_token, of_pair = (0, 0) if spec is None else spec.step_costs()
            token, context = token + of_token, context + of_pair
        return self.hidden_size * self.num_tokens / token, context / token

    @property
    @abstractmethod
    def mask(self) -> RowMask:
        """Which tokens of a text attend to which."""

    @abstractmethod
    def load_states(self, weights: WeightReader) -> Model:
        """Builds the network without an output projection. Every other tensor of the checkpoint must be used."""
