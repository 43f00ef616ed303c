"""Whatever changes between planning and running, at every place that plans ahead: a step runs on a current plan only.

Planned ahead are: a draft, its later steps, those of drafts that keep nothing, the steps of several drafting planners,
verification, the reading of accepted tokens, captures and replays of both, a plan on a side stream, and an idle step.
"""

from __future__ import annotations

import pytest

from sightline.core.errors import UnplannedBatchError
from support.plan_checks import captured_drafts_are_the_eager_ones
from support.plan_sites import (
    IN_BUCKETS,
    ROLLOUTS,
    SINGLE,
    Bench,
    Change,
    Outcome,
    Plan,
    Repeater,
    backend_replaced,
    bucket_overwritten,
    buffers_filled_again,
    capture,
    forged,
    idle,
    outcome,
    padded,
    pages_change_owner,
    row_closed_and_reopened,
    row_grown,
    split,
    taken,
    turned_idle,
)

SITES = {**ROLLOUTS, **SINGLE}
every_site = pytest.mark.parametrize("site", SITES.values(), ids=SITES)
RESHAPED: list[Change] = [padded, split, taken, turned_idle]
DERIVED: list[Change] = [*RESHAPED, backend_replaced, forged]


@every_site
def test_a_step_that_nothing_happened_to_runs_as_it_is(site: Plan) -> None:
    ahead = site(Bench())
    assert outcome(ahead, ahead.planned) is Outcome.CURRENT


@every_site
@pytest.mark.parametrize("change", [pages_change_owner, row_closed_and_reopened])
def test_pages_that_changed_owner_raise(site: Plan, change: Change) -> None:
    ahead = site(Bench())
    assert outcome(ahead, change(ahead)) is Outcome.STALE


@every_site
def test_growth_of_rows_leaves_a_plan_as_it_is(site: Plan) -> None:
    ahead = site(Bench())
    assert outcome(ahead, row_grown(ahead)) is Outcome.CURRENT


@pytest.mark.parametrize("name", IN_BUCKETS)
def test_a_bucket_with_another_batch_in_it_raises(name: str) -> None:
    ahead = SITES[name](Bench())
    assert outcome(ahead, bucket_overwritten(ahead)) is Outcome.STALE


@pytest.mark.parametrize("change", DERIVED)
@pytest.mark.parametrize("site", ROLLOUTS.values(), ids=ROLLOUTS)
def test_a_step_of_a_rollout_is_refused_where_another_is_planned_again(site: Plan, change: Change) -> None:
    ahead = site(Bench())
    assert outcome(ahead, change(ahead)) is Outcome.STALE
    assert ahead.planner.num_rebuilt == 0


@pytest.mark.parametrize("change", DERIVED)
@pytest.mark.parametrize("site", SINGLE.values(), ids=SINGLE)
def test_a_single_step_is_planned_again(site: Plan, change: Change) -> None:
    """Only memory at fixed addresses can be captured, and a batch of another shape is in memory of its own."""
    ahead = site(Bench())
    is_captured_elsewhere = site is capture and change in RESHAPED
    assert outcome(ahead, change(ahead)) is (Outcome.REFUSED if is_captured_elsewhere else Outcome.REBUILT)


@pytest.mark.parametrize("name", [name for name in ROLLOUTS if name not in IN_BUCKETS])
def test_sets_that_the_next_rollout_leased_are_refused(name: str) -> None:
    ahead = ROLLOUTS[name](Bench())
    assert outcome(ahead, buffers_filled_again(ahead)) is Outcome.STALE


@pytest.mark.parametrize("name", ["draft_capture", "draft_replay"])
def test_buckets_of_a_rollout_are_released_with_it(name: str) -> None:
    ahead = ROLLOUTS[name](Bench())
    assert outcome(ahead, buffers_filled_again(ahead)) is Outcome.STALE


@pytest.mark.parametrize("name", SINGLE)
def test_buffers_that_another_plan_filled_are_filled_again(name: str) -> None:
    ahead = SINGLE[name](Bench())
    expected = Outcome.CURRENT if name in IN_BUCKETS else Outcome.REBUILT
    assert outcome(ahead, buffers_filled_again(ahead)) is expected


@pytest.mark.parametrize("change", [pages_change_owner, row_closed_and_reopened, row_grown])
def test_an_idle_step_reads_no_pages(change: Change) -> None:
    ahead = idle(Bench())
    assert outcome(ahead, change(ahead)) is Outcome.CURRENT


@pytest.mark.parametrize("change", [padded, buffers_filled_again, backend_replaced])
def test_an_idle_step_is_planned_again_like_another(change: Change) -> None:
    ahead = idle(Bench())
    assert outcome(ahead, change(ahead)) is Outcome.REBUILT


@every_site
def test_a_batch_without_its_plan_is_refused(site: Plan) -> None:
    ahead = site(Bench())
    with pytest.raises(UnplannedBatchError, match="expected a PlannedBatch, got Batch"):
        ahead.run(ahead.planned.batch)  # type: ignore[arg-type]


def test_a_draft_whose_steps_are_captured_is_the_eager_one() -> None:
    bench = Bench()
    captured_drafts_are_the_eager_ones(bench, Repeater())
    assert bench.planner.num_rebuilt == 0
