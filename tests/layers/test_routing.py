"""A routing chooses and weighs as transformers' routers of the same kind do, and as its own words say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV4Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter

from sightline.layers.routing import Groups, Routing, Score, Share

HIDDEN, NUM_EXPERTS, PER_TOKEN = 16, 12, 4
SIGMOID = Routing(NUM_EXPERTS, PER_TOKEN, Share.OF_CHOSEN, Score.SIGMOID, Groups(4, 2, ranked_by=2), True, 2.5)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(experts: Tensor, weights: Tensor) -> Tensor:
    """[num_tokens, num_experts]: 0 for those that were not chosen."""
    return torch.zeros(len(experts), NUM_EXPERTS).scatter_(1, experts, weights)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_softmax_scores_are_those_of_deepseek_v2(method: str) -> None:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=2,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        n_group=4,
        topk_group=2,
        topk_method=method,
        routed_scaling_factor=16.0,
    )
    router = DeepseekV2TopkRouter(config)
    router.weight.data = normal(NUM_EXPERTS, HIDDEN, seed=1)
    with torch.no_grad():
        logits, weights, experts = router(normal(50, HIDDEN, seed=2))
    groups = Groups(4, 2, ranked_by=1) if method == "group_limited_greedy" else None
    routing = Routing(NUM_EXPERTS, PER_TOKEN, Share.OF_ALL, groups=groups, scale=16.0)
    torch.testing.assert_close(dense(*routing.choose(logits)), dense(experts, weights))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("n_group", "topk_group"), [(4, 2), (2, 1), (1, 1), (6, 3)])
def test_sigmoid_scores_are_those_of_deepseek_v3(norm_topk_prob: bool, n_group: int, topk_group: int) -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=2,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data = normal(NUM_EXPERTS, HIDDEN, seed=1)
    router.e_score_correction_bias.copy_(normal(NUM_EXPERTS, seed=3))
    with torch.no_grad():
        logits, weights, experts = router(normal(50, HIDDEN, seed=2))
    share = Share.OF_CHOSEN if norm_topk_prob else Share.OF_ALL
    routing = replace(SIGMOID, share=share, groups=Groups(n_group, topk_group, ranked_by=2))
    got = routing.choose(logits, router.e_score_correction_bias)
    torch.testing.assert_close(dense(*got), dense(experts, weights))


V4 = Routing(NUM_EXPERTS, PER_TOKEN, Share.OF_CHOSEN, Score.SQRT_SOFTPLUS, corrected=True, scale=1.5)


def v4_config() -> DeepseekV4Config:
    return DeepseekV4Config(
        vocab_size=9,
        hidden_size=HIDDEN,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        routed_scaling_factor=1.5,
    )


def test_roots_of_softplus_are_those_of_deepseek_v4() -> None:
    router = DeepseekV4TopKRouter(v4_config())
    router.weight.data = normal(NUM_EXPERTS, HIDDEN, seed=1)
    router.e_score_correction_bias.copy_(normal(NUM_EXPERTS, seed=3))
    with torch.no_grad():
        logits, weights, experts = router(normal(50, HIDDEN, seed=2))
    got = V4.choose(logits, router.e_score_correction_bias)
    torch.testing.assert_close(dense(*got), dense(experts, weights))


def test_listed_experts_have_the_weights_of_deepseek_v4() -> None:
    router = DeepseekV4HashRouter(v4_config())
    router.weight.data = normal(NUM_EXPERTS, HIDDEN, seed=1)
    listed = normal(9, NUM_EXPERTS, seed=4).argsort(dim=1)[:, :PER_TOKEN]
    router.tid2eid.copy_(listed)
    tokens = torch.tensor([3, 8, 0, 3, 5])
    with torch.no_grad():
        logits, weights, experts = router(normal(5, HIDDEN, seed=2), tokens)
    assert torch.equal(listed[tokens], experts)
    torch.testing.assert_close(V4.weigh(logits, listed[tokens]), weights)


def test_no_expert_of_a_closed_group_is_chosen_however_low_the_others_are() -> None:
    logits = torch.full((1, NUM_EXPERTS), -200.0)
    logits[0, :3] = 0.0  # a group with three, of which a token needs four
    correction = torch.full((NUM_EXPERTS,), -5.0)
    correction[3:6] = -4.0
    experts, weights = SIGMOID.choose(logits, correction)
    assert set(experts[0].tolist()) <= set(range(6)), "the two best groups are the first two"
    assert weights.isfinite().all()


def test_scores_that_are_all_nothing_give_weights_that_are_numbers() -> None:
    _, weights = replace(SIGMOID, groups=None, corrected=False).choose(torch.full((2, NUM_EXPERTS), -500.0))
    assert torch.equal(weights, torch.zeros(2, PER_TOKEN))


def test_a_token_that_is_not_finite_chooses_some_experts() -> None:
    experts, weights = SIGMOID.choose(torch.full((2, NUM_EXPERTS), torch.nan), torch.zeros(NUM_EXPERTS))
    assert ((experts >= 0) & (experts < NUM_EXPERTS)).all()
    assert weights.isnan().all()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (Groups(5, 2, 1), "12 experts in equal groups"),
        (Groups(12, 6, 2), "equal groups of at least 2"),
        (Groups(4, 1, 1), "at most the 3 experts of a token's groups, got 4"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups: Groups, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing(NUM_EXPERTS, PER_TOKEN, Share.OF_ALL, groups=groups)
    with pytest.raises(ValueError, match="expected from 1 to 4 groups for a token, got 5"):
        Groups(4, 5, 1)


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_infinite_corrections_open_no_group_that_is_not_chosen(infinity: float) -> None:
    routing = Routing(8, 4, Share.OF_ALL, groups=Groups(2, 1, ranked_by=1), corrected=True)
    correction = torch.tensor([0.0, infinity, infinity, 0.0, 9.0, infinity, infinity, 0.0])
    experts, weights = routing.choose(normal(3, 8, seed=4), correction)
    # Of two groups of rank inf the first, otherwise that of rank 9.
    first = 0 if infinity > 0 else 4
    assert experts.sort().values.tolist() == [list(range(first, first + 4))] * 3
    assert weights.isfinite().all()
