"""The choice of experts from a router's logits, in one launch.

Of equal ranks, that of the lower expert or group is higher. Does not know experts.
"""

from dataclasses import dataclass
from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous


class ScoreKind(IntEnum):
    """How a logit becomes a score."""

    SOFTMAX = 0
    """The softmax among all experts."""
    SIGMOID = 1
    SQRT_SOFTPLUS = 2
    """sqrt(log(1 + exp(logit)))."""


@dataclass(frozen=True)
class RoutingRule:
    """How logits become experts and weights."""

    score: ScoreKind
    normalised: bool
    """True if the weights of the chosen experts are divided by their sum."""
    scale: float
    """Multiplies the weights."""
    num_groups: int = 1
    groups_per_token: int = 1
    ranked_by: int = 1
    """A group's rank is the sum of so many of its best experts' ranks."""


def choose_experts(
    logits: Tensor,
    correction: Tensor | None,
    rule: RoutingRule,
    experts: Tensor,
    weights: Tensor,
    *,
    overlaps: bool = False,
) -> None:
    """Fills experts int32 and weights fp32, both contiguous [num_tokens, per_token].

    Logits are [num_tokens, num_experts] fp32 with any strides, and the correction, if any, is contiguous [num_experts]
    fp32. A token with a score that is NaN gets the first experts, and NaN as all weights.
    """
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    group_size = num_experts // rule.num_groups
    _choose_kernel[(num_tokens,)](
        logits,
        correction,
        experts,
        weights,
        rule.scale,
        *logits.stride(),
        SCORE=rule.score,
        NORMALISED=rule.normalised,
        NUM_GROUPS=rule.num_groups,
        GROUP_SIZE=group_size,
        GROUPS_PER_TOKEN=rule.groups_per_token,
        RANKED_BY=rule.ranked_by,
        PER_TOKEN=experts.shape[1],
        GROUPS=triton.next_power_of_2(rule.num_groups),
        MEMBERS=triton.next_power_of_2(group_size),
        CHOSEN=triton.next_power_of_2(experts.shape[1]),
        num_warps=1 if num_experts <= 128 else 4,
        **overlap_settings(overlaps),
    )


@triton.jit(do_not_specialize=["scale"])
def _choose_kernel(
    logits, correction, experts, weights, scale, logits_token, logits_expert,
    SCORE: tl.constexpr, NORMALISED: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr, RANKED_BY: tl.constexpr, PER_TOKEN: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, CHOSEN: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program chooses for one token. Blocks are [group, expert of the group]."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, MEMBERS)
    index = group[:, None] * GROUP_SIZE + member[None, :]
    is_expert = (group < NUM_GROUPS)[:, None] & (member < GROUP_SIZE)[None, :]
    at = logits + token * logits_token + index * logits_expert
    logit = tl.load(at, mask=is_expert, other=float("-inf"))
    if SCORE == 1:
        small = tl.exp(-tl.abs(logit))
        scores = tl.where(logit < 0.0, small, 1.0) / (1.0 + small)
    elif SCORE == 2:
        scores = _sqrt_softplus(logit)
    else:
        powers = tl.exp(logit - _largest(logit, is_expert))
        scores = powers / tl.sum(tl.sum(powers, axis=1), axis=0)
    ranks = scores
    if correction is not None:
        ranks += tl.load(correction + index, mask=is_expert, other=0.0)
    # NaN compares with nothing. A choice without its expert would look like any other, so all weights become NaN.
    is_nan = is_expert & (ranks != ranks)
    is_broken = tl.max(tl.max(is_nan.to(tl.int32), axis=1), axis=0) > 0
    ranks = tl.where(is_broken, 0.0, ranks)
    left = is_expert
    if GROUPS_PER_TOKEN < NUM_GROUPS:
        left = is_expert & _open_groups(
            ranks, is_expert, group, member, NUM_GROUPS, GROUPS_PER_TOKEN, RANKED_BY, MEMBERS
        )
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros([CHOSEN], tl.int32)
    kept = tl.zeros([CHOSEN], tl.float32)
    for number in range(PER_TOKEN):
        is_best = left & (ranks == _largest(ranks, left))
        expert = tl.min(tl.min(tl.where(is_best, index, NUM_GROUPS * GROUP_SIZE - 1), axis=1), axis=0)
        taken = index == expert
        score = tl.sum(tl.sum(tl.where(taken & is_expert, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(place == number, expert, chosen)
        kept = tl.where(place == number, score, kept)
        left = left & (index != expert)
    if NORMALISED:
        kept = kept / (tl.sum(kept, axis=0) + 1e-20)
    kept = tl.where(is_broken, float("nan"), kept)
    is_chosen = place < PER_TOKEN
    tl.store(experts + token * PER_TOKEN + place, chosen, mask=is_chosen)
    tl.store(weights + token * PER_TOKEN + place, kept * scale, mask=is_chosen)


@triton.jit
def _sqrt_softplus(x):
    """The square root of log(1 + exp(x)), accurate where the exponential is small beside 1."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    # log(1 + y) as log(w) * y / (w - 1), with w = 1 + y as it is rounded: the two roundings cancel.
    part = tl.where(whole == 1.0, small, tl.log(whole) * small / tl.where(whole == 1.0, 1.0, whole - 1.0))
    return tl.sqrt(tl.where(x > 0.0, x, 0.0) + part)


@triton.jit
def _largest(values: tl.tensor, among: tl.tensor) -> tl.tensor:
    """The largest value among some, of those that are numbers."""
    return tl.max(tl.max(tl.where(among & (values == values), values, float("-inf")), axis=1), axis=0)


@triton.jit
def _open_groups(
    ranks, is_expert, group, member,
    NUM_GROUPS: tl.constexpr, GROUPS_PER_TOKEN: tl.constexpr, RANKED_BY: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """True for the groups that the token may choose from, [groups, 1]."""
    left = tl.where(is_expert, ranks, float("-inf"))
    total = tl.max(left, axis=1)
    for _ in range(RANKED_BY - 1):
        best = tl.max(left, axis=1)
        first = tl.min(tl.where(left == best[:, None], member[None, :], MEMBERS), axis=1)
        left = tl.where(member[None, :] == first[:, None], float("-inf"), left)
        total += tl.max(left, axis=1)
    closed = group < NUM_GROUPS
    for _ in range(GROUPS_PER_TOKEN):
        best = tl.max(tl.where(closed, total, float("-inf")), axis=0)
        first = tl.min(tl.where(closed & (total == best), group, NUM_GROUPS - 1), axis=0)
        closed = closed & (group != first)
    return ((group < NUM_GROUPS) & (closed == 0))[:, None]
