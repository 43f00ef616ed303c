"""Faults of plans that are made ahead, planted one by one: each fails the check that is named for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sightline.attention import rollout
from sightline.attention.buffers import PlanMemory
from sightline.attention.certificate import Staleness
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.rollout import LeasedSets, following_steps
from sightline.cache.lengths import RowLengths
from sightline.core.batch import Batch
from sightline.core.errors import PlanError
from sightline.core.late_tokens import LateTokens
from support import rollouts
from support.plan_checks import CHECKS

CURRENT = Staleness((), ())


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_holds(name: str) -> None:
    CHECKS[name]()
    assert name in {fault.caught_by for fault in FAULTS.values()}, "no fault fails this check"


_staleness = Planner._staleness


def compares_sizes(self: Planner, planned: PlannedBatch) -> Staleness:
    """As a marker on the batch would."""
    certificate, batch = planned.plan.certificate, planned.batch
    same = (certificate.num_rows, certificate.num_tokens) == (batch.num_rows, batch.num_tokens)
    return CURRENT if same else _staleness(self, planned)


def compares_batches_not_buffers(self: Planner, planned: PlannedBatch) -> Staleness:
    certificate = planned.plan.certificate
    return _staleness(self, planned) if certificate.batch_id != planned.batch.batch_id else CURRENT


def compares_buffers_not_batches(self: Planner, planned: PlannedBatch) -> Staleness:
    certificate = planned.plan.certificate
    return _staleness(self, planned) if certificate.buffers.epoch != certificate.epoch else CURRENT


def plans_a_step_of_a_draft_again(self: Planner, work: PlannedBatch) -> PlannedBatch:
    """As a step that is not a draft's."""
    plan = replace(work.plan, renewal=rollout.Renewal.PLAN_AGAIN)
    return _ensure(self, work if _staleness(self, work) == CURRENT else replace(work, plan=plan))


_ensure = Planner._ensure


def leases_one_set(self: LeasedSets, fixed: Sequence[PlanMemory | None]) -> tuple[PlanMemory, ...]:
    return (_lease(self, fixed)[0],) * len(fixed)


_lease = LeasedSets.lease


def freezes_the_position(first: Batch, steps: int) -> tuple[Batch, ...]:
    """Every step is at the position of the second."""
    second = following_steps(first, 2)[1]
    return (first, *(replace(second) for _ in range(1, steps)))


def fills_zeros(self: LateTokens, chosen: torch.Tensor) -> None:
    _fill(self, torch.zeros_like(chosen))


_fill = LateTokens.fill


@dataclass(frozen=True)
class Planted:
    """A fault."""

    owner: Any
    attribute: str
    fault: Any
    caught_by: str
    message: str


ONE_BY_ONE = "a_rollout_is_the_steps_planned_one_by_one"
FAULTS = {
    "stale draft plan": Planted(
        Planner,
        "_staleness",
        compares_batches_not_buffers,
        "a_stale_step_of_a_draft_is_refused",
        "draft ran on plan buffers of the next rollout: runs as it is",
    ),
    "stale draft plan made again": Planted(
        Planner,
        "_ensure",
        plans_a_step_of_a_draft_again,
        "a_stale_step_of_a_draft_is_refused",
        "draft ran on plan buffers of the next rollout: planned again",
    ),
    "lease not released": Planted(
        LeasedSets,
        "release",
        lambda _: None,
        "a_release_ends_a_rollout",
        "on plan buffers that were released: runs as it is",
    ),
    "mask of the previous round": Planted(
        Planner, "_staleness", compares_sizes, "each_round_is_verified_with_its_own_tree", "the tree of another round"
    ),
    "padding row accepted": Planted(
        Planner,
        "_staleness",
        compares_buffers_not_batches,
        "a_padded_step_of_a_draft_is_refused",
        "draft was padded after it was planned: runs as it is",
    ),
    "side-stream event ignored": Planted(
        PlannedBatch,
        "in_stream_order",
        lambda _: nullcontext(),
        "steps_wait_for_plans_on_a_side_stream",
        "the step ran before it was planned",
    ),
    "side stream fills what a step reads": Planted(
        PlannedBatch,
        "in_stream_order",
        lambda self: nullcontext(self.plan.certificate.buffers.mark.wait()),
        "plans_on_a_side_stream_wait_for_steps",
        "the streams are not ordered",
    ),
    "lease shared by two steps": Planted(
        LeasedSets, "lease", leases_one_set, ONE_BY_ONE, "plan buffers of lane 0 were filled again"
    ),
    "draft position frozen by mistake": Planted(
        rollouts, "following_steps", freezes_the_position, ONE_BY_ONE, "where the step before it stops, got 18"
    ),
    "tokens of the step before dropped": Planted(LateTokens, "fill", fills_zeros, ONE_BY_ONE, "has other tokens"),
    "tokens not waited for": Planted(
        LateTokens,
        "require_filled",
        lambda _: None,
        "a_step_that_waits_for_tokens_is_refused",
        "ran with tokens that nobody chose",
    ),
    "lengths not compared": Planted(
        RowLengths,
        "_check",
        lambda *_: None,
        "steps_that_write_the_same_entries_are_refused",
        "wrote the same position",
    ),
}
"""By name: what is wrong."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = FAULTS[name]
    monkeypatch.setattr(planted.owner, planted.attribute, planted.fault)
    with pytest.raises((AssertionError, PlanError), match=planted.message):
        CHECKS[planted.caught_by]()
