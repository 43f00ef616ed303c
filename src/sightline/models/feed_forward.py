"""Definitions of feed-forward layers, and how checkpoints store them.

Owns the tensor names. Does not know model families.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sightline.kernels.packed_weights import WeightForm
from sightline.layers.activation import Activation, Gate
from sightline.layers.linear import Linear, Projection
from sightline.layers.mlp import GatedMlp
from sightline.layers.moe import Expert, ExpertBank, ExpertCompute, ExpertMlp, SeparateExperts
from sightline.layers.routing import Routing
from sightline.models.contract import ExpertStack
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class DenseFeedForward:
    """One gated feed-forward for every token."""

    intermediate_size: int
    activation: Activation
    bias: bool = False

    def num_weights(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.intermediate_size

    def expert_stacks(self, prefix: str) -> tuple[ExpertStack, ...]:
        del prefix
        return ()

    def load(self, weights: WeightReader, prefix: str, hidden_size: int) -> GatedMlp:
        gate_up, down = _load_projections(weights, prefix, hidden_size, self.intermediate_size, bias=self.bias)
        return GatedMlp(gate_up, down, self.activation)


class ExpertStorage(Enum):
    """How a checkpoint lays out its experts."""

    SEPARATE = "separate"
    """Three tensors per expert, under its number. The router is called `gate`. No biases."""
    STACKED = "stacked"
    """All experts in one tensor, inputs first, gate and up interleaved. The router is called `router`. All biases."""


@dataclass(frozen=True)
class ExpertFeedForward:
    """A mixture of experts: each token uses a few of many feed-forwards."""

    intermediate_size: int
    """The size of one expert."""
    routing: Routing
    gate: Gate
    storage: ExpertStorage
    shared: DenseFeedForward | None = None
    """A feed-forward that every token uses in addition to its chosen experts."""

    def num_weights(self, hidden_size: int) -> int:
        """Weights that a token is multiplied with: the router, and the experts that it uses."""
        experts = self.routing.num_experts + 3 * self.routing.experts_per_token * self.intermediate_size
        return hidden_size * experts + (0 if self.shared is None else self.shared.num_weights(hidden_size))

    def expert_stacks(self, prefix: str) -> tuple[ExpertStack, ...]:
        """The experts that are stored under `prefix`."""
        if self.storage is ExpertStorage.STACKED:
            names = [f"{prefix}.experts.{part}_proj" for part in ("gate_up", "down")]
            return (ExpertStack(tuple(names), WeightForm.MXFP4),)
        names = [
            f"{prefix}.experts.{number}.{part}_proj.weight"
            for number in range(self.routing.num_experts)
            for part in ("gate", "up", "down")
        ]
        return (ExpertStack(tuple(names), WeightForm.FP8_BLOCKS),)

    def load(self, weights: WeightReader, prefix: str, hidden_size: int) -> ExpertMlp:
        separate = self.storage is ExpertStorage.SEPARATE
        router = "gate" if separate else "router"
        sizes = {f"{prefix}.{router}": self.routing.num_experts}
        return ExpertMlp(
            router=weights.projection(sizes, hidden_size, bias=not separate, dtype=torch.float32),
            routing=self.routing,
            bank=self._load_bank(weights, f"{prefix}.experts", hidden_size),
            correction=self._load_correction(weights, f"{prefix}.{router}"),
            shared=None if self.shared is None else self.shared.load(weights, f"{prefix}.shared_experts", hidden_size),
        )

    def _load_correction(self, weights: WeightReader, prefix: str) -> Tensor | None:
        if not self.routing.corrected:
            return None
        return weights.take(f"{prefix}.e_score_correction_bias", (self.routing.num_experts,), dtype=torch.float32)

    def _load_bank(self, weights: WeightReader, prefix: str, hidden_size: int) -> ExpertBank:
        separate = self.storage is ExpertStorage.SEPARATE
        if weights.expert_compute is ExpertCompute.ONE_BY_ONE:
            load = self._load_separate if separate else self._load_stacked
            return SeparateExperts(load(weights, prefix, hidden_size))
        # Imported here: it needs Triton, which an installation for CPUs does not have.
        from sightline.models.expert_stacks import ExpertSizes, stack_separate, stack_stacked

        stack = stack_separate if separate else stack_stacked
        sizes = ExpertSizes(self.routing.num_experts, self.intermediate_size, hidden_size)
        return stack(weights, prefix, sizes, self.gate)

    def _load_separate(self, weights: WeightReader, prefix: str, hidden_size: int) -> tuple[Expert, ...]:
        experts = []
        for number in range(self.routing.num_experts):
            gate_up, down = _load_projections(
                weights, f"{prefix}.{number}", hidden_size, self.intermediate_size, bias=False
            )
            experts.append(Expert(gate_up, down, self.gate))
        return tuple(experts)

    def _load_stacked(self, weights: WeightReader, prefix: str, hidden_size: int) -> tuple[Expert, ...]:
        num_experts, size = self.routing.num_experts, self.intermediate_size
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


def _side_by_side(interleaved: Tensor) -> Tensor:
    """Reorders rows (gate, up, gate, up, ...) to all gates, then all ups."""
    return torch.cat((interleaved[::2], interleaved[1::2]))


FeedForward = DenseFeedForward | ExpertFeedForward
