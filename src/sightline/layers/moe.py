"""Expert layers: each token goes through a few of many feed-forwards.

Owns the routing and the grouping: the tokens of an expert are computed in one product, whatever rows they came from. A
token's result does not depend on the tokens beside it, but for rounding. Does not know how checkpoints store experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sightline.layers.linear import Projection
from sightline.layers.mlp import Activation
from sightline.layers.scratch import Scratch, empty_rows
from sightline.layers.sink import Sink


class Share(Enum):
    """Among which experts a chosen one's weight is its softmax probability."""

    OF_ALL = "all"
    """The weights of the chosen add up to less than 1."""
    OF_CHOSEN = "chosen"
    """They add up to 1."""


@dataclass(frozen=True)
class Routing:
    """How a token chooses: the largest router logits."""

    num_experts: int
    experts_per_token: int
    share: Share

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"expected from 1 to {self.num_experts} experts for a token, got {self.experts_per_token}")

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and their fp32 weights, both [num_tokens, experts_per_token], from [num_tokens, num_experts]."""
        logits = logits.float()
        chosen, experts = logits.topk(self.experts_per_token, dim=-1)
        if self.share is Share.OF_CHOSEN:
            return experts, chosen.softmax(dim=-1)
        return experts, (chosen - logits.logsumexp(dim=-1, keepdim=True)).exp()


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit` and up within ±`limit`."""

    alpha: float
    limit: float


Gate = Activation | ClampedSwiglu
"""How gate and up become one."""


@dataclass(frozen=True, eq=False)
class Expert:
    """One of the feed-forwards."""

    gate_up: Projection
    """Gate and up side by side: [2 * intermediate, hidden]."""
    down: Projection
    gate: Gate

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = _product(self.gate_up, x).chunk(2, dim=-1)
        return _product(self.down, gated(self.gate, gate, up))


class RouterBuffers:
    """What the router says. How many tokens an expert gets is known in the middle of the step only: no buffer fits."""

    def __init__(self, scratch: Scratch, num_experts: int) -> None:
        self.logits = scratch.take("router.logits", num_experts)


@dataclass(frozen=True, eq=False)
class ExpertMlp:
    """The layer: router, experts, and the weighted sum of what the chosen ones give."""

    router: Projection
    routing: Routing
    experts: tuple[Expert, ...]

    def buffers(self, scratch: Scratch) -> RouterBuffers:
        return scratch.of(RouterBuffers, self.routing.num_experts)

    def __call__(self, x: Tensor, sink: Sink, scratch: Scratch) -> None:
        """From x [num_tokens, hidden]."""
        num_tokens, hidden = x.shape
        per_token = self.routing.experts_per_token
        logits = self.buffers(scratch).logits
        self.router(x, logits)
        experts, weights = self.routing.choose(logits)
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
        sink.take(torch.bmm(weights.to(x.dtype).unsqueeze(1), by_token).squeeze(1))


def _product(projection: Projection, x: Tensor) -> Tensor:
    out = empty_rows(x.shape[0], projection.out_features, x, turns=projection.turns)
    projection(x, out)
    return out


def gated(kind: Gate, gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up, both [..., intermediate], as one."""
    match kind:
        case Activation():
            return kind(gate) * up
        case ClampedSwiglu(alpha, limit):
            gate = gate.clamp(max=limit)
            return (up.clamp(-limit, limit) + 1.0) * gate * torch.sigmoid(alpha * gate)
