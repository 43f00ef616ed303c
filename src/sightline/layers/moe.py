"""Mixture-of-experts layers: each token goes through a few of many feed-forwards.

Owns the grouping: all tokens of an expert are computed in one product. Apart from rounding, a token's result does not
depend on the other tokens. Does not know how a token chooses experts, nor how checkpoints store them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.layers.linear import Projection
from sightline.layers.mlp import Activation, GatedMlp
from sightline.layers.routing import Routing
from sightline.layers.scratch import Scratch, empty_rows
from sightline.layers.sink import Sink


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit` and up within ±`limit`."""

    alpha: float
    limit: float


Gate = Activation | ClampedSwiglu
"""How gate and up are combined."""


@dataclass(frozen=True, eq=False)
class Expert:
    """One feed-forward of the mixture."""

    gate_up: Projection
    """Gate and up side by side: [2 * intermediate, hidden]."""
    down: Projection
    gate: Gate

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = _product(self.gate_up, x).chunk(2, dim=-1)
        return _product(self.down, gated(self.gate, gate, up))


class RouterBuffers:
    """The router's logits. Experts have no buffers: how many tokens each gets is known only during the step."""

    def __init__(self, scratch: Scratch, num_experts: int) -> None:
        self.logits = scratch.take("router.logits", num_experts, torch.float32)


@dataclass(frozen=True, eq=False)
class ExpertMlp:
    """The layer: the weighted sum of the chosen experts' outputs, plus that of the shared feed-forward."""

    router: Projection
    """Its weights are fp32: a rounded logit could choose another expert."""
    routing: Routing
    experts: tuple[Expert, ...]
    correction: Tensor | None = None
    """[num_experts] fp32 if the routing is corrected, otherwise None."""
    shared: GatedMlp | None = None
    """A feed-forward that every token goes through, with weight 1."""

    def buffers(self, scratch: Scratch) -> RouterBuffers:
        if self.shared is not None:
            self.shared.buffers(scratch)
        return scratch.of(RouterBuffers, self.routing.num_experts)

    def __call__(self, x: Tensor, sink: Sink, scratch: Scratch) -> None:
        """Gives the result for x [num_tokens, hidden] to the sink."""
        logits = self.buffers(scratch).logits
        self.router(x.float(), logits)
        experts, weights = self.routing.choose(logits, self.correction)
        sink.take(self._weighted_sum(x, experts, weights))
        if self.shared is not None:
            self.shared(x, sink.onto(), scratch)

    def _weighted_sum(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the experts' outputs, [num_tokens, hidden]."""
        num_tokens, hidden = x.shape
        per_token = self.routing.experts_per_token
        # Choice i belongs to token i // per_token; sorted by expert, each expert's choices are one slice.
        by_expert = experts.flatten().argsort()
        inputs = x.index_select(0, by_expert // per_token)
        counts = experts.flatten().bincount(minlength=self.routing.num_experts).tolist()
        outputs = torch.empty_like(inputs)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                chosen = slice(start, start + count)
                outputs.index_copy_(0, by_expert[chosen], expert(inputs[chosen]))
            start += count
        by_token = outputs.view(num_tokens, per_token, hidden)
        return torch.bmm(weights.to(x.dtype).unsqueeze(1), by_token).squeeze(1)


def _product(projection: Projection, x: Tensor) -> Tensor:
    out = empty_rows(x.shape[0], projection.out_features, x, turns=projection.turns)
    projection(x, out)
    return out


def gated(kind: Gate, gate: Tensor, up: Tensor) -> Tensor:
    """Combines gate and up, both [..., intermediate]."""
    match kind:
        case Activation():
            return kind(gate) * up
        case ClampedSwiglu(alpha, limit):
            gate = gate.clamp(max=limit)
            return (up.clamp(-limit, limit) + 1.0) * gate * torch.sigmoid(alpha * gate)
