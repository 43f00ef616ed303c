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
from sightline.layers.mlp import GatedMlp, SelfGatedMlp
from sightline.layers.routing import Routing
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink, Written
from sightline.layers.source import Given, Source
from sightline.layers.step_tokens import TokenBuffers


@dataclass(frozen=True, eq=False)
class Expert:
    """One feed-forward of the mixture."""

    gate_up: Projection
    """Gate and up side by side: [2 * intermediate, hidden]; with `gates_itself` only up."""
    down: Projection
    gate: Gate
    gates_itself: bool = False
    """True if up is the gate too."""

    def __call__(self, x: Tensor, scratch: Scratch) -> Tensor:
        """The result for x [num_rows, hidden], some of the step's tokens."""
        product = _product(self.gate_up, x, scratch)
        gate, up = (product, product) if self.gates_itself else product.chunk(2, dim=-1)
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
        """Leases the memory that the bank needs if each token uses `per_token` experts."""

    @abstractmethod
    def choose(
        self, routing: Routing, logits: Tensor, correction: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """Experts and their fp32 weights, as `Routing.choose` returns them, in an integer dtype of the bank's own."""

    @abstractmethod
    def weigh(self, routing: Routing, logits: Tensor, chosen: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Like `choose`, of experts [num_tokens, per_token] that were chosen without the logits."""

    @abstractmethod
    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, sink: Sink, scratch: Scratch) -> None:
        """Gives the sink the weighted sum of the chosen experts' outputs for x [num_tokens, hidden].

        Experts and weights are [num_tokens, per_token], from `choose`.
        """


@dataclass(frozen=True, eq=False)
class SeparateExperts(ExpertBank):
    """One product per chosen expert, with all of its tokens. The host reads how many tokens each expert has."""

    experts: tuple[Expert, ...]
    held: range | None = None
    """Their numbers, if other ranks have the others, which add what those give; None if these are all."""

    def reserve(self, scratch: Scratch, per_token: int) -> None:
        """Leases nothing: how many tokens an expert gets is known only during the step."""

    def choose(
        self, routing: Routing, logits: Tensor, correction: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        del scratch
        return routing.choose(logits, correction)

    def weigh(self, routing: Routing, logits: Tensor, chosen: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        del scratch
        return chosen, routing.weigh(logits, chosen)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, sink: Sink, scratch: Scratch) -> None:
        num_tokens, hidden = x.shape
        per_token = experts.shape[1]
        # Choice i belongs to token i // per_token; sorted by expert, each expert's choices are one slice.
        by_expert = experts.flatten().argsort()
        inputs = x.index_select(0, by_expert // per_token)
        held = range(len(self.experts)) if self.held is None else self.held
        counts = experts.flatten().bincount(minlength=held.stop).tolist()
        start = sum(counts[: held.start])
        outputs = torch.empty_like(inputs) if self.held is None else torch.zeros_like(inputs)
        for expert, count in zip(self.experts, counts[held.start : held.stop], strict=True):
            if count:
                chosen = slice(start, start + count)
                outputs.index_copy_(0, by_expert[chosen], expert(inputs[chosen], scratch))
            start += count
        by_token = outputs.view(num_tokens, per_token, hidden)
        sink.take(torch.bmm(weights.to(x.dtype).unsqueeze(1), by_token).squeeze(1))


class NarrowBuffers:
    """The inputs of narrow experts, and the sums of their outputs."""

    def __init__(self, scratch: Scratch, size: int) -> None:
        self.inputs = scratch.take("experts.narrow_inputs", size)
        self.sums = scratch.take("experts.narrow_sums", size)


@dataclass(frozen=True, eq=False)
class NarrowExperts(ExpertBank):
    """Experts that take a projection of x to fewer features, and whose sum is projected back."""

    bank: ExpertBank
    inwards: Projection
    outwards: Projection

    def reserve(self, scratch: Scratch, per_token: int) -> None:
        scratch.of(NarrowBuffers, self.inwards.out_features)
        self.bank.reserve(scratch, per_token)

    def choose(
        self, routing: Routing, logits: Tensor, correction: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        return self.bank.choose(routing, logits, correction, scratch)

    def weigh(self, routing: Routing, logits: Tensor, chosen: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        return self.bank.weigh(routing, logits, chosen, scratch)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, sink: Sink, scratch: Scratch) -> None:
        buffers = scratch.of(NarrowBuffers, self.inwards.out_features)
        self.inwards(x, buffers.inputs)
        self.bank(buffers.inputs, experts, weights, Written(buffers.sums), scratch)
        sink.take_product(self.outwards, buffers.sums)


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
    shared: GatedMlp | SelfGatedMlp | None = None
    """A feed-forward that every token goes through, with weight 1 or the one that its own gate gives it."""
    listed: Tensor | None = None
    """[vocab_size, experts_per_token] int64: the experts of each token, whose weights alone the router then gives; None
    if the router chooses them."""

    def buffers(self, scratch: Scratch) -> RouterBuffers:
        if self.shared is not None:
            self.shared.buffers(scratch)
        if self.listed is not None:
            scratch.of(TokenBuffers)
        self.bank.reserve(scratch, self.routing.experts_per_token)
        return scratch.of(RouterBuffers, self.routing.num_experts)

    def __call__(self, source: Source, sink: Sink, scratch: Scratch) -> None:
        """Gives the result for the source to the sink."""
        x = source.rows(scratch.operations)
        logits = scratch.of(RouterBuffers, self.routing.num_experts).logits
        self.router(x, logits)
        if self.listed is None:
            experts, weights = self.bank.choose(self.routing, logits, self.correction, scratch)
        else:
            chosen = self.listed.index_select(0, scratch.of(TokenBuffers).tokens)
            experts, weights = self.bank.weigh(self.routing, logits, chosen, scratch)
        self.bank(x, experts, weights, sink, scratch)
        if self.shared is not None:
            self.shared(Given(x), sink.onto(), scratch)


def _product(projection: Projection, x: Tensor, scratch: Scratch) -> Tensor:
    out = scratch.empty_rows(x.shape[0], projection.out_features, x, turns=projection.turns)
    projection(x, out)
    return out
