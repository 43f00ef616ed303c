"""Experts whose weights are stacked, computed all at once on the device.

Every launch has a size that the host knows before the step, and nothing is read back: a step can be captured in a CUDA
graph. Does not know how checkpoints store experts. Needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.kernels.triton.expert_groups import TILE_FIELDS, group_choices, tile_table
from sightline.kernels.triton.experts import (
    GroupedChoices,
    StackedWeights,
    choose_tiles,
    combine_parts,
    down_product,
    gate_up_product,
)
from sightline.kernels.triton.routing import RoutingRule, ScoreKind, choose_experts
from sightline.layers.activation import Gate
from sightline.layers.moe import ExpertBank
from sightline.layers.routing import Groups, Routing, Score, Share
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.triton_operations import gate_rule

_ONE_GROUP = Groups(1, 1, ranked_by=1)
_SCORES = {
    Score.SOFTMAX: ScoreKind.SOFTMAX,
    Score.SIGMOID: ScoreKind.SIGMOID,
    Score.SQRT_SOFTPLUS: ScoreKind.SQRT_SOFTPLUS,
}


class StackedBuffers:
    """What the tokens of a step chose, their order by expert, and the results of the two products."""

    def __init__(self, scratch: Scratch, per_token: int, size: int, hidden: int) -> None:
        self.experts = scratch.take_rows("experts.chosen", per_token, torch.int32)
        self.weights = scratch.take_rows("experts.weights", per_token, torch.float32)
        self.order = scratch.take_rows("experts.order", per_token, torch.int32).view(-1)
        self.tiles = scratch.take_rows("experts.tiles", TILE_FIELDS * per_token, torch.int32)
        self.inner = scratch.take_rows("experts.inner", per_token * size).view(-1, size)
        self.parts = scratch.take_rows("experts.parts", per_token * hidden).view(-1, hidden)


@dataclass(frozen=True, eq=False)
class StackedExperts(ExpertBank):
    """The weights of all experts, one tensor for each projection."""

    gate_up: StackedWeights
    """[num_experts, 2 * size, hidden]: all gates, then all ups; [num_experts, size, hidden] with `gates_itself`."""
    down: StackedWeights
    """[num_experts, hidden, size]."""
    gate: Gate
    overlaps: bool
    """Has the same meaning as in `TritonOperations`."""
    gates_itself: bool = False
    """True if the ups are the gates too."""
    held: range | None = None
    """The experts whose weights are here, if other ranks have the others."""

    def reserve(self, scratch: Scratch, per_token: int) -> None:
        self._buffers(scratch, per_token)

    def choose(
        self, routing: Routing, logits: Tensor, correction: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        buffers = self._buffers(scratch, routing.experts_per_token)
        rule = routing_rule(routing)
        choose_experts(logits, correction, rule, buffers.experts, buffers.weights, overlaps=self.overlaps)
        return self._own(buffers)

    def weigh(self, routing: Routing, logits: Tensor, chosen: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        buffers = self._buffers(scratch, routing.experts_per_token)
        buffers.experts.copy_(chosen)
        buffers.weights.copy_(routing.weigh(logits, chosen))
        return self._own(buffers)

    def _own(self, buffers: StackedBuffers) -> tuple[Tensor, Tensor]:
        """The choices in numbers of the experts that are here. Others get the number behind these and no weight."""
        if self.held is not None:
            buffers.experts.sub_(self.held.start)
            others = (buffers.experts < 0) | (buffers.experts >= len(self.held))
            buffers.experts.masked_fill_(others, len(self.held))
            buffers.weights.masked_fill_(others, 0.0)
        return buffers.experts, buffers.weights

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, sink: Sink, scratch: Scratch) -> None:
        num_choices, per_token, num_experts = experts.numel(), experts.shape[1], self.down.weight.shape[0]
        buffers, overlaps = self._buffers(scratch, per_token), self.overlaps
        config = choose_tiles(num_choices, self.down, x.dtype)
        tiles = tile_table(buffers.tiles, num_choices, num_experts, config.rows)
        group_choices(experts, num_experts, config.rows, buffers.order, tiles, overlaps=overlaps)
        choices = GroupedChoices(buffers.order, tiles, per_token)
        gate_up_product(
            x,
            self.gate_up,
            gate_rule(self.gate),
            choices,
            buffers.inner,
            config,
            gates_itself=self.gates_itself,
            overlaps=overlaps,
        )
        down_product(buffers.inner, self.down, choices, buffers.parts, config, overlaps=overlaps)
        skips = self.held is not None
        combine_parts(buffers.parts, weights, sink.target, adds=sink.adds, skips=skips, overlaps=overlaps)

    def _buffers(self, scratch: Scratch, per_token: int) -> StackedBuffers:
        size, hidden = self.gate_up.weight.shape[1] // (1 if self.gates_itself else 2), self.down.weight.shape[1]
        return scratch.of(StackedBuffers, per_token, size, hidden)


def routing_rule(routing: Routing) -> RoutingRule:
    """The routing as the kernel reads it."""
    groups = routing.groups or _ONE_GROUP
    return RoutingRule(
        score=_SCORES[routing.score],
        normalised=routing.share is Share.OF_CHOSEN,
        scale=routing.scale,
        num_groups=groups.num_groups,
        groups_per_token=groups.groups_per_token,
        ranked_by=groups.ranked_by,
    )
