"""The choice of experts in one launch equals that of `Routing.choose`, in Triton's interpreter or on the card."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sightline.layers.routing import Groups, Routing, Score, Share
from support.case_marks import proofs
from support.expert_cases import check_routing, choices_of, normal

KINDS = {
    "softmax of all": Routing(12, 4, Share.OF_ALL),
    "softmax of the chosen": Routing(12, 3, Share.OF_CHOSEN),
    "sigmoid": Routing(7, 3, Share.OF_CHOSEN, Score.SIGMOID, scale=2.5),
    "sigmoid of all": Routing(7, 3, Share.OF_ALL, Score.SIGMOID),
    "groups": Routing(12, 4, Share.OF_ALL, groups=Groups(4, 2, ranked_by=1), scale=16.0),
    "odd groups": Routing(15, 5, Share.OF_CHOSEN, Score.SIGMOID, Groups(5, 3, ranked_by=2), corrected=True, scale=2.5),
    "all groups": Routing(8, 2, Share.OF_CHOSEN, groups=Groups(2, 2, ranked_by=2)),
    "correction": Routing(12, 4, Share.OF_CHOSEN, Score.SIGMOID, corrected=True),
    "root of softplus": Routing(12, 4, Share.OF_CHOSEN, Score.SQRT_SOFTPLUS, corrected=True, scale=1.5),
    "one of one": Routing(1, 1, Share.OF_ALL),
    "all of them": Routing(5, 5, Share.OF_CHOSEN),
}
all_kinds = pytest.mark.parametrize("routing", KINDS.values(), ids=KINDS.keys())


@all_kinds
def test_every_kind_chooses_as_torch_does(routing: Routing) -> None:
    check_routing(routing, normal(6, routing.num_experts, seed=1) * 3)


@all_kinds
def test_of_equal_ranks_the_lower_expert_is_choices_of(routing: Routing) -> None:
    """Logits of few values, and all equal: then the lowest experts of the lowest groups are chosen."""
    check_routing(routing, normal(6, routing.num_experts, seed=2).round().clamp(-1, 1))
    if not routing.corrected:
        experts, _ = choices_of(routing, torch.zeros(1, routing.num_experts), None)
        assert experts.tolist() == [list(range(routing.experts_per_token))]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the interpreter
@all_kinds
def test_a_token_that_is_not_finite_chooses_experts_that_exist(routing: Routing) -> None:
    logits = normal(5, routing.num_experts, seed=3)
    logits[1], logits[2], logits[3, ::2] = torch.nan, torch.inf, -torch.inf
    correction = normal(routing.num_experts, seed=9) if routing.corrected else None
    experts, weights = choices_of(routing, logits, correction)
    assert all(len(set(row)) == len(row) for row in experts.tolist())
    assert ((experts >= 0) & (experts < routing.num_experts)).all()
    assert weights[1].isnan().all()
    for token in (0, 4):
        alone = routing.choose(logits[token : token + 1], correction)
        assert torch.equal(experts[token], alone[0][0])
        torch.testing.assert_close(weights[token], alone[1][0])


NEGATIVE_NAN = torch.tensor(-0x400000, dtype=torch.int32).view(torch.float32)
"""What x86 makes of inf - inf. As an integer it is lower than any number's bits."""


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("nan", [*proofs(torch.tensor(torch.nan)), NEGATIVE_NAN], ids=["positive", "negative"])
@all_kinds
def test_a_nan_of_any_expert_makes_all_weights_of_its_token_nan_on_both(routing: Routing, nan: Tensor) -> None:
    """A choice without the expert whose logit is no number would look like any other."""
    num_experts, per_token = routing.num_experts, routing.experts_per_token
    logits = normal(num_experts + 1, num_experts, seed=5)
    expected = routing.choose(logits[-1:], correction := normal(num_experts, seed=9) if routing.corrected else None)
    for expert in range(num_experts):
        logits[expert, expert] = nan
    for experts, weights in (choices_of(routing, logits, correction), routing.choose(logits, correction)):
        assert weights[:-1].isnan().all()
        assert experts[:-1].tolist() == [list(range(per_token))] * num_experts
        assert torch.equal(experts[-1].long(), expected[0][0])
        torch.testing.assert_close(weights[-1], expected[1][0])


def test_logits_may_be_feature_major() -> None:
    check_routing(KINDS["groups"], normal(12, 6, seed=4).t())
