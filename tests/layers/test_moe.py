"""Grouping tokens by expert gives what one token after another gives, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.layers.activation import Activation, ClampedSwiglu, Gate
from sightline.layers.linear import Linear, Projection
from sightline.layers.mlp import GatedMlp
from sightline.layers.moe import Expert, ExpertMlp, SeparateExperts
from sightline.layers.routing import Routing, Share
from sightline.layers.sink import Added, Sink, Written
from sightline.layers.source import Given
from support.layers import TORCH, dense, experts_of, feed, project, scratch_for

HIDDEN, INTERMEDIATE, NUM_EXPERTS, PER_TOKEN = 12, 10, 6, 3
CLAMPED = ClampedSwiglu(alpha=1.7, limit=0.8)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_layer(share: Share = Share.OF_CHOSEN, gate: Gate = Activation.SILU, *, bias: bool = False) -> ExpertMlp:
    def linear(outputs: int, inputs: int, seed: int) -> Linear:
        return Linear(normal(outputs, inputs, seed=seed), normal(outputs, seed=seed + 1) if bias else None)

    experts = tuple(
        Expert(linear(2 * INTERMEDIATE, HIDDEN, 10 * i), linear(HIDDEN, INTERMEDIATE, 10 * i + 5), gate)
        for i in range(NUM_EXPERTS)
    )
    return ExpertMlp(linear(NUM_EXPERTS, HIDDEN, 999), Routing(NUM_EXPERTS, PER_TOKEN, share), SeparateExperts(experts))


def one_token(layer: ExpertMlp, x: Tensor) -> Tensor:
    """The layer written for one token [hidden], in double precision and without its code."""

    def apply(projection: Projection, value: Tensor) -> Tensor:
        linear = dense(projection)
        product = linear.weight.double() @ value
        return product if linear.bias is None else product + linear.bias.double()

    logits = apply(layer.router, x.double())
    chosen = logits.argsort(descending=True)[:PER_TOKEN].tolist()
    shares = logits.exp() / (logits.exp() if layer.routing.share is Share.OF_ALL else logits[chosen].exp()).sum()
    result = torch.zeros(HIDDEN, dtype=torch.float64)
    for number in chosen:
        expert = experts_of(layer)[number]
        gate, up = apply(expert.gate_up, x.double()).chunk(2)
        if isinstance(expert.gate, ClampedSwiglu):
            gate = torch.minimum(gate, torch.tensor(expert.gate.limit))
            up = torch.maximum(torch.minimum(up, torch.tensor(expert.gate.limit)), torch.tensor(-expert.gate.limit))
            inner = (up + 1) * gate / (1 + torch.exp(-expert.gate.alpha * gate))
        else:
            inner = up * gate / (1 + torch.exp(-gate))
        result += shares[number] * apply(expert.down, inner)
    return result


@pytest.mark.parametrize("share", Share)
@pytest.mark.parametrize("gate", [Activation.SILU, CLAMPED])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_grouped_tokens_equal_one_after_another(share: Share, gate: Gate, bias: bool, num_tokens: int) -> None:
    layer = make_layer(share, gate, bias=bias)
    x = normal(num_tokens, HIDDEN, seed=77)
    expected = torch.stack([one_token(layer, token) for token in x])
    torch.testing.assert_close(feed(layer, x), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 9, 40])
@pytest.mark.parametrize("sink", [Written, Added])
def test_what_all_tokens_share_is_added_once(num_tokens: int, sink: type[Sink]) -> None:
    layer = make_layer()
    shared = GatedMlp(Linear(normal(2 * 7, HIDDEN, seed=1)), Linear(normal(HIDDEN, 7, seed=2)), Activation.SILU)
    x, stream = normal(num_tokens, HIDDEN, seed=77), normal(num_tokens, HIDDEN, seed=78)
    before = stream.clone() if sink is Added else torch.zeros_like(stream)
    replace(layer, shared=shared)(Given(x), sink(stream), scratch_for(x))
    torch.testing.assert_close(stream, before + feed(layer, x) + feed(shared, x), rtol=1e-5, atol=1e-5)


def test_the_correction_chooses_and_does_not_weigh() -> None:
    layer = make_layer(Share.OF_ALL)
    x = normal(8, HIDDEN, seed=4)
    correction = torch.tensor([0.0, 9.0, 0.0, 9.0, 0.0, 9.0])
    corrected = replace(layer, routing=replace(layer.routing, corrected=True), correction=correction)
    scores = project(layer.router, x).softmax(dim=-1)
    expected = sum(scores[:, i : i + 1] * experts_of(layer)[i](x, scratch_for(x)) for i in (1, 3, 5))
    torch.testing.assert_close(feed(corrected, x), expected, rtol=1e-4, atol=1e-4)


def test_no_token_gives_no_output() -> None:
    assert feed(make_layer(bias=True), torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


def test_a_token_that_is_not_finite_reaches_no_other() -> None:
    layer = make_layer()
    x = normal(9, HIDDEN, seed=3)
    expected = feed(layer, x)
    poisoned = x.clone()
    poisoned[[2, 8]] = torch.nan
    got = feed(layer, poisoned)
    finite = [0, 1, 3, 4, 5, 6, 7]
    torch.testing.assert_close(got[finite], expected[finite])
    assert got[[2, 8]].isnan().all()


def test_all_tokens_on_the_same_experts() -> None:
    layer = make_layer()
    x = normal(1, HIDDEN, seed=5).expand(7, HIDDEN)
    torch.testing.assert_close(feed(layer, x), feed(layer, x[:1]).expand(7, HIDDEN), rtol=1e-5, atol=1e-5)


def test_weights_add_up_to_one_among_the_chosen_and_to_less_among_all() -> None:
    logits = normal(20, NUM_EXPERTS, seed=2)
    experts, of_chosen = Routing(NUM_EXPERTS, PER_TOKEN, Share.OF_CHOSEN).choose(logits)
    same_experts, of_all = Routing(NUM_EXPERTS, PER_TOKEN, Share.OF_ALL).choose(logits)
    assert torch.equal(experts, same_experts)
    torch.testing.assert_close(of_chosen.sum(dim=-1), torch.ones(20))
    torch.testing.assert_close(of_all, logits.softmax(dim=-1).gather(1, experts))
    assert (of_all.sum(dim=-1) < 1.0).all()


def test_the_router_chooses_in_fp32_under_a_smaller_dtype() -> None:
    layer = make_layer()
    x = normal(5, HIDDEN, seed=1).bfloat16()
    low = ExpertMlp(
        layer.router,
        layer.routing,
        SeparateExperts(tuple(Expert(lowered(x.gate_up), lowered(x.down), x.gate) for x in experts_of(layer))),
    )
    assert feed(low, x).isfinite().all()
    assert low.routing.choose(project(low.router, x.float()))[1].dtype == torch.float32
    assert low.buffers(scratch_for(x)).logits.dtype == torch.float32


def lowered(projection: Projection) -> Linear:
    return Linear(dense(projection).weight.bfloat16())


def gated(kind: Gate, gate: Tensor, up: Tensor) -> Tensor:
    out = torch.full_like(gate, torch.nan)
    TORCH.gate(kind, gate, up, out)
    return out


def test_gates() -> None:
    gate, up = normal(4, 3, seed=1), normal(4, 3, seed=2)
    torch.testing.assert_close(gated(Activation.SILU, gate, up), F.silu(gate) * up)
    torch.testing.assert_close(gated(Activation.GELU_TANH, gate, up), F.gelu(gate, approximate="tanh") * up)
    far = gated(CLAMPED, torch.tensor([100.0, -100.0]), torch.tensor([-100.0, 100.0]))
    limit = CLAMPED.limit
    at_limit = limit * torch.sigmoid(torch.tensor(CLAMPED.alpha * limit)) * (1 - limit)
    torch.testing.assert_close(far, torch.stack([at_limit, torch.tensor(0.0)]))


@pytest.mark.parametrize("per_token", [0, 7])
def test_more_experts_a_token_than_there_are_make_no_sense(per_token: int) -> None:
    with pytest.raises(ValueError, match=f"expected from 1 to 6 experts for a token, got {per_token}"):
        Routing(6, per_token, Share.OF_ALL)
