"""Definitions of feed-forward layers, and how checkpoints store them.

Owns the tensor names. Does not know model families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from sightline.core.errors import CheckpointError
from sightline.distributed.ranks import Rank
from sightline.kernels.packed_weights import WeightForm
from sightline.layers.absent import AbsentMlp
from sightline.layers.activation import Activation, Gate
from sightline.layers.linear import Linear, Projection
from sightline.layers.mlp import GatedMlp, SelfGatedMlp
from sightline.layers.moe import Expert, ExpertBank, ExpertCompute, ExpertMlp, NarrowExperts, SeparateExperts
from sightline.layers.routing import Routing
from sightline.models.contract import ExpertStack
from sightline.models.parts import Nothing, RankPart, Slices, TensorCut, Zeros, columns, moved, rows
from sightline.models.weights import WeightReader

TOKEN_EXPERTS = "tid2eid"
"""The tensor that lists the experts of each token, beside the weight of the router."""


@dataclass(frozen=True)
class DenseFeedForward:
    """One gated feed-forward for every token."""

    reads_tokens: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False
    intermediate_size: int
    activation: Gate
    bias: bool = False
    joint: bool = False
    """True if gate and up are stored as one projection, `gate_up_proj`."""

    def num_weights(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.intermediate_size

    def expert_stacks(self, prefix: str) -> tuple[ExpertStack, ...]:
        del prefix
        return ()

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[DenseFeedForward]:
        """Some of the features, and of the outputs that they add to."""
        own = rank.share(self.intermediate_size)
        cuts = {
            **rows([f"{prefix}.gate_proj", f"{prefix}.up_proj"], own),
            **rows([f"{prefix}.gate_up_proj"], own, moved(own, self.intermediate_size)),
            **columns(f"{prefix}.down_proj", rank, own),
        }
        return RankPart(replace(self, intermediate_size=len(own)), cuts, is_summed=True)

    def load(self, weights: WeightReader, prefix: str, hidden_size: int) -> GatedMlp:
        size, bias = self.intermediate_size, self.bias
        if not self.joint:
            gate_up, down = _load_projections(weights, prefix, hidden_size, size, bias=bias)
        else:
            gate_up = weights.projection({f"{prefix}.gate_up_proj": 2 * size}, hidden_size, bias=bias)
            down = weights.projection({f"{prefix}.down_proj": hidden_size}, size, bias=bias)
        return GatedMlp(gate_up, down, self.activation)


@dataclass(frozen=True)
class SelfGatedFeedForward:
    """One feed-forward for every token whose gate is its up projection."""

    reads_tokens: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False
    intermediate_size: int
    activation: Activation
    bias: bool = False

    def num_weights(self, hidden_size: int) -> int:
        return 2 * hidden_size * self.intermediate_size

    def expert_stacks(self, prefix: str) -> tuple[ExpertStack, ...]:
        del prefix
        return ()

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[SelfGatedFeedForward]:
        """Some of the features, and of the outputs that they add to."""
        own = rank.share(self.intermediate_size)
        cuts = rows([f"{prefix}.up_proj"], own) | columns(f"{prefix}.down_proj", rank, own)
        return RankPart(replace(self, intermediate_size=len(own)), cuts, is_summed=True)

    def load(self, weights: WeightReader, prefix: str, hidden_size: int) -> SelfGatedMlp:
        up, down = _load_up_and_down(weights, prefix, hidden_size, self.intermediate_size, bias=self.bias)
        return SelfGatedMlp(up, down, self.activation)


@dataclass(frozen=True)
class AbsentFeedForward:
    """Stands for no feed-forward: the layer only mixes tokens."""

    reads_tokens: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False

    def num_weights(self, hidden_size: int) -> int:
        del hidden_size
        return 0

    def expert_stacks(self, prefix: str) -> tuple[ExpertStack, ...]:
        del prefix
        return ()

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[AbsentFeedForward]:
        del prefix, rank
        return RankPart(self)

    def load(self, weights: WeightReader, prefix: str, hidden_size: int) -> AbsentMlp:
        del weights, prefix, hidden_size
        return AbsentMlp()


class ExpertStorage(Enum):
    """How a checkpoint lays out its experts."""

    SEPARATE = "separate"
    """Three tensors per expert, under its number. The router is called `gate`. No biases."""
    STACKED = "stacked"
    """All experts in one tensor, inputs first, gate and up interleaved. The router is called `router`. All biases."""


@dataclass(frozen=True)
class NarrowInputs:
    """The projection to the features that experts take, and that of their sum back."""

    size: int
    bias: bool


@dataclass(frozen=True)
class ExpertFeedForward:
    """A mixture of experts: each token uses a few of many feed-forwards."""

    has_experts: ClassVar[bool] = True
    intermediate_size: int
    """The size of one expert."""
    routing: Routing
    gate: Gate
    storage: ExpertStorage
    gates_itself: bool = False
    """True if the gate of an expert is its up projection. Such experts are stored separately, two tensors each."""
    narrow: NarrowInputs | None = None
    """A projection of the inputs to fewer features, if experts have one."""
    shared: DenseFeedForward | SelfGatedFeedForward | None = None
    """A feed-forward that every token uses in addition to its chosen experts."""
    shared_as: str = "shared_experts"
    """The name of that feed-forward inside the layer; empty if its tensors are beside those of the experts."""
    shared_is_gated: bool = False
    """True if the sigmoid of a product with the input multiplies its result. The weight's name ends with `_gate`."""
    listed_tokens: int | None = None
    """The size of the vocabulary if a table lists the experts of each token; None if the router chooses them."""
    held: range | None = None
    """The experts that a rank has; None if it has all. Tokens choose among all, and others add what those give."""

    @property
    def reads_tokens(self) -> bool:
        """True if a token's experts depend on the token itself, and not only on its state."""
        return self.listed_tokens is not None

    def num_weights(self, hidden_size: int) -> int:
        """Weights that a token is multiplied with: the router, and the experts that it uses."""
        width = hidden_size if self.narrow is None else self.narrow.size
        experts = len(self._parts) * self.routing.experts_per_token * self.intermediate_size * width
        around = 0 if self.narrow is None else 2 * hidden_size * self.narrow.size
        shared = 0 if self.shared is None else self.shared.num_weights(hidden_size)
        return hidden_size * self.routing.num_experts + experts + around + shared

    @property
    def _parts(self) -> tuple[str, ...]:
        """The projections of an expert."""
        return ("up", "down") if self.gates_itself else ("gate", "up", "down")

    def expert_stacks(self, prefix: str) -> tuple[ExpertStack, ...]:
        """The experts that are stored under `prefix`."""
        unused = 1.0 - self.routing.experts_per_token / self.routing.num_experts
        if self.storage is ExpertStorage.STACKED:
            names = [f"{prefix}.experts.{part}_proj" for part in ("gate_up", "down")]
            return (ExpertStack(tuple(names), (WeightForm.MXFP4,), unused),)
        names = [f"{prefix}.experts.{number}.{part}_proj.weight" for number in self._held for part in self._parts]
        return (ExpertStack(tuple(names), (WeightForm.FP8_BLOCKS, WeightForm.MXFP4), unused),)

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[ExpertFeedForward]:
        """Some of the experts, whole, and some features of the shared feed-forward. The router is whole."""
        if self.routing.num_experts < rank.size:
            return RankPart(self, whole=(f"{self.routing.num_experts} experts are fewer than {rank.size} ranks",))
        held, stack = rank.share(self.routing.num_experts), f"{prefix}.experts"
        cuts: dict[str, TensorCut] = {}
        if self.storage is ExpertStorage.STACKED:
            names = [f"{stack}.{part}_proj{kind}" for part in ("gate_up", "down") for kind in ("", "_bias")]
            cuts |= {name: Slices(0, (held,)) for name in names}
        else:
            others = set(range(self.routing.num_experts)) - set(held)
            parts = [f"{part}_proj.weight" for part in self._parts]
            cuts |= {f"{stack}.{number}.{part}": Nothing() for number in others for part in parts}
        if self.narrow is not None and not rank.leads:
            cuts[f"{prefix}.fc2_latent_proj.bias"] = Zeros()
        shared = self.shared
        if shared is not None:
            part = shared.of_rank(f"{prefix}.{self.shared_as}".rstrip("."), rank)
            shared, cuts = part.definition, {**cuts, **part.cuts}
        return RankPart(replace(self, held=held, shared=shared), cuts, is_summed=True)

    @property
    def _held(self) -> range:
        return range(self.routing.num_experts) if self.held is None else self.held

    def load(self, weights: WeightReader, prefix: str, hidden_size: int) -> ExpertMlp:
        stacked = self.storage is ExpertStorage.STACKED
        router = "router" if stacked else "gate"
        sizes = {f"{prefix}.{router}": self.routing.num_experts}
        return ExpertMlp(
            router=weights.projection(sizes, hidden_size, bias=stacked, dtype=torch.float32),
            routing=self.routing,
            bank=self._load_bank(weights, f"{prefix}.experts", hidden_size)
            if self.narrow is None
            else self._load_narrow(weights, prefix, self.narrow, hidden_size),
            correction=self._load_correction(weights, f"{prefix}.{router}"),
            shared=self._load_shared(weights, f"{prefix}.{self.shared_as}".rstrip("."), hidden_size),
            listed=self._load_list(weights, f"{prefix}.{router}.{TOKEN_EXPERTS}"),
        )

    def _load_narrow(self, weights: WeightReader, prefix: str, narrow: NarrowInputs, hidden_size: int) -> NarrowExperts:
        return NarrowExperts(
            bank=self._load_bank(weights, f"{prefix}.experts", narrow.size),
            inwards=weights.projection({f"{prefix}.fc1_latent_proj": narrow.size}, hidden_size, bias=narrow.bias),
            outwards=weights.projection({f"{prefix}.fc2_latent_proj": hidden_size}, narrow.size, bias=narrow.bias),
        )

    def _load_shared(self, weights: WeightReader, prefix: str, hidden_size: int) -> GatedMlp | SelfGatedMlp | None:
        if self.shared is None:
            return None
        shared = self.shared.load(weights, prefix, hidden_size)
        if not self.shared_is_gated:
            return shared
        assert isinstance(shared, GatedMlp), "a feed-forward that gates itself has no gate for its rows"
        return replace(shared, row_gate=weights.projection({f"{prefix}_gate": 1}, hidden_size, bias=False))

    def _load_correction(self, weights: WeightReader, prefix: str) -> Tensor | None:
        if not self.routing.corrected:
            return None
        return weights.take(f"{prefix}.e_score_correction_bias", (self.routing.num_experts,), dtype=torch.float32)

    def _load_list(self, weights: WeightReader, name: str) -> Tensor | None:
        """The experts of each token."""
        if self.listed_tokens is None:
            return None
        num_experts = self.routing.num_experts
        listed = weights.take(name, (self.listed_tokens, self.routing.experts_per_token), torch.int64)
        if not listed.is_meta and not bool(((listed >= 0) & (listed < num_experts)).all()):
            raise CheckpointError(
                f"expected {name} to list experts from 0 to {num_experts - 1}, got {int(listed.min())} to "
                f"{int(listed.max())}; the file is damaged: get it again"
            )
        return listed

    def _load_bank(self, weights: WeightReader, prefix: str, hidden_size: int) -> ExpertBank:
        separate = self.storage is ExpertStorage.SEPARATE
        if weights.expert_compute is ExpertCompute.ONE_BY_ONE:
            load = self._load_separate if separate else self._load_stacked
            return SeparateExperts(load(weights, prefix, hidden_size), self.held)
        # Imported here: it needs Triton, which an installation for CPUs does not have.
        from sightline.models.expert_stacks import ExpertSizes, stack_separate, stack_stacked

        sizes = ExpertSizes(self._held, self.intermediate_size, hidden_size, others=self.held is not None)
        if separate:
            return stack_separate(weights, prefix, sizes, self.gate, parts=self._parts)
        return stack_stacked(weights, prefix, sizes, self.gate)

    def _load_separate(self, weights: WeightReader, prefix: str, hidden_size: int) -> tuple[Expert, ...]:
        load, size = _load_up_and_down if self.gates_itself else _load_projections, self.intermediate_size
        return tuple(
            Expert(*load(weights, f"{prefix}.{number}", hidden_size, size, bias=False), self.gate, self.gates_itself)
            for number in self._held
        )

    def _load_stacked(self, weights: WeightReader, prefix: str, hidden_size: int) -> tuple[Expert, ...]:
        num_experts, size = len(self._held), self.intermediate_size
        gate_up = weights.take(f"{prefix}.gate_up_proj", (num_experts, hidden_size, 2 * size))
        gate_up_bias = weights.take(f"{prefix}.gate_up_proj_bias", (num_experts, 2 * size))
        down = weights.take(f"{prefix}.down_proj", (num_experts, size, hidden_size))
        down_bias = weights.take(f"{prefix}.down_proj_bias", (num_experts, hidden_size))
        return tuple(
            Expert(
                gate_up=Linear(_side_by_side(gate_up[number].t()), _side_by_side(gate_up_bias[number])),
                down=Linear(down[number].t().contiguous(), down_bias[number]),
                gate=self.gate,
            )
            for number in range(num_experts)
        )


def _load_projections(
    weights: WeightReader, prefix: str, hidden_size: int, intermediate_size: int, *, bias: bool
) -> tuple[Projection, Projection]:
    """The joined gate and up projection, and the down projection."""
    sizes = {f"{prefix}.gate_proj": intermediate_size, f"{prefix}.up_proj": intermediate_size}
    gate_up = weights.projection(sizes, hidden_size, bias=bias)
    return gate_up, weights.projection({f"{prefix}.down_proj": hidden_size}, intermediate_size, bias=bias)


def _load_up_and_down(
    weights: WeightReader, prefix: str, hidden_size: int, intermediate_size: int, *, bias: bool
) -> tuple[Projection, Projection]:
    up = weights.projection({f"{prefix}.up_proj": intermediate_size}, hidden_size, bias=bias)
    return up, weights.projection({f"{prefix}.down_proj": hidden_size}, intermediate_size, bias=bias)


def _side_by_side(interleaved: Tensor) -> Tensor:
    """Reorders rows (gate, up, gate, up, ...) to all gates, then all ups."""
    return torch.cat((interleaved[::2], interleaved[1::2]))


FeedForward = DenseFeedForward | SelfGatedFeedForward | ExpertFeedForward | AbsentFeedForward
FeedForwardLayer = GatedMlp | SelfGatedMlp | ExpertMlp | AbsentMlp
