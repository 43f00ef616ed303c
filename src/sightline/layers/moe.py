"""Mixture-of-experts layers: each token goes through a few of many feed-forwards.

Owns the contract of a bank, which holds a layer's experts, and the bank that computes one expert after another.
`stacked_experts` has the one that computes all of them at once on a GPU. Apart from rounding, a token's result does not
depend on the other tokens. Does not know how a token chooses experts, nor how checkpoints store them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sightline.layers.activation import Gate
from sightline.layers.linear import Projection
from sightline.layers.mlp import GatedMlp
from sightline.layers.routing import Routing
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Given, Source


@dataclass(frozen=True, eq=False)
class Expert:
    """One feed-forward of the mixture."""

    gate_up: Projection
    """Gate and up side by side: [2 * intermediate, hidden]."""
    down: Projection
    gate: Gate

    def __call__(self, x: Tensor, scratch: Scratch) -> Tensor:
        """The result for x [num_rows, hidden], some of the step's tokens."""
        gate, up = _product(self.gate_up, x, scratch).chunk(2, dim=-1)
        gated = scratch.empty_rows(x.shape[0], self.down.in_features, x, turns=self.gate_up.turns)
        scratch.operations.gate(self.gate, gate, up, gated)
        return _product(self.down, gated, scratch)


class ExpertCompute(Enum):
    """How the experts of a layer are computed."""

    ONE_BY_ONE = "one by one"
    """A product per chosen expert: `SeparateExperts`."""
    AT_ONCE = "at once"
    """All of them in the same launches, with Triton: `StackedExperts`."""
    AT_ONCE_IN_FP8 = "at once, in fp8"
    """Like `AT_ONCE`, but experts that are stored in fp8 also round their inputs to it. Needs a GPU that can."""


class ExpertBank(ABC):
    """All experts of a layer."""

    @abstractmethod
    def reserve(self, scratch: Scratch, per_token: int) -> None:
        """Leases what the bank needs for tokens that use so many experts each."""

    @abstractmethod
    def choose(
        self, routing: Routing, logits: Tensor, correction: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """Experts and their fp32 weights, as `Routing.choose` returns them, in an integer dtype of the bank's own."""

    @abstractmethod
    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, sink: Sink, scratch: Scratch) -> None:
        """Gives the sink the weighted sum of the chosen experts' outputs for x [num_tokens, hidden].

        Experts and weights are [num_tokens, per_token], from `choose`.
        """


@dataclass(frozen=True, eq=False)
class SeparateExperts(ExpertBank):
    """One product per chosen expert, with all of its tokens. The host reads how many tokens each expert has."""

    experts: tuple[Expert, ...]

    def reserve(self, scratch: Scratch, per_token: int) -> None:
        """Leases nothing: how many tokens an expert gets is known only during the step."""

    def choose(
        self, routing: Routing, logits: Tensor, correction: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        del scratch
        return routing.choose(logits, correction)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, sink: Sink, scratch: Scratch) -> None:
        num_tokens, hidden = x.shape
        per_token = experts.shape[1]
        # Choice i belongs to token i // per_token; sorted by expert, each expert's choices are one slice.
        by_expert = experts.flatten().argsort()
        inputs = x.index_select(0, by_expert // per_token)
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        outputs = torch.empty_like(inputs)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                chosen = slice(start, start + count)
                outputs.index_copy_(0, by_expert[chosen], expert(inputs[chosen], scratch))
            start += count
        by_token = outputs.view(num_tokens, per_token, hidden)
        sink.take(torch.bmm(weights.to(x.dtype).unsqueeze(1), by_token).squeeze(1))


class RouterBuffers:
    """The router's logits."""

    def __init__(self, scratch: Scratch, num_experts: int) -> None:
        self.logits = scratch.take("router.logits", num_experts, torch.float32)


@dataclass(frozen=True, eq=False)
class ExpertMlp:
    """The layer: the weighted sum of the chosen experts' outputs, plus that of the shared feed-forward."""

    router: Projection
    """Its weights are fp32: a rounded logit could choose another expert."""
    routing: Routing
    bank: ExpertBank
    correction: Tensor | None = None
    """[num_experts] fp32 if the routing is corrected, otherwise None."""
    shared: GatedMlp | None = None
    """A feed-forward that every token goes through, with weight 1."""

    def buffers(self, scratch: Scratch) -> RouterBuffers:
        if self.shared is not None:
            self.shared.buffers(scratch)
        self.bank.reserve(scratch, self.routing.experts_per_token)
        return scratch.of(RouterBuffers, self.routing.num_experts)

    def __call__(self, source: Source, sink: Sink, scratch: Scratch) -> None:
        """Gives the result for the source to the sink."""
        x = source.rows(scratch.operations)
        logits = scratch.of(RouterBuffers, self.routing.num_experts).logits
        self.router(x, logits)
        experts, weights = self.bank.choose(self.routing, logits, self.correction, scratch)
        self.bank(x, experts, weights, sink, scratch)
        if self.shared is not None:
            self.shared(Given(x), sink.onto(), scratch)


def _product(projection: Projection, x: Tensor, scratch: Scratch) -> Tensor:
    out = scratch.empty_rows(x.shape[0], projection.out_features, x, turns=projection.turns)
    projection(x, out)
    return out
