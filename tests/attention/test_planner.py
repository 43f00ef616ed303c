"""The planner refuses what no backend could serve, and finds what was changed in place; a current plan runs as it is.

The ways in which a plan goes stale are in tests/regressions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.attention.bindings import GroupBinding
from sightline.attention.kinds import Feature
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.core.batch import MaskKind, RowMask
from sightline.core.errors import PlanError, StalePlanError, UnplannedBatchError
from sightline.testing.conformance.rig import Row
from sightline.testing.conformance.steps import Step
from support import attention_cases as cases
from support.one_layer import check_forward

FULL = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)
WINDOWED = replace(FULL, window=6)
HYBRID = [FULL, WINDOWED, FULL, WINDOWED]
ROWS = [Row(17, 1), Row(3, 4)]


def test_a_current_plan_runs_as_it_is() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    planned = step.bench.planner.plan(step.batch)
    assert step.bench.planner.ensure(planned) is planned
    check_forward(step, planned)
    assert step.bench.planner.num_rebuilt == 0


def test_ensure_plans_a_batch_that_has_no_plan() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    check_forward(step, step.bench.planner.ensure(step.batch))


def test_plans_in_two_lanes_do_not_disturb_each_other() -> None:
    bench = cases.bench(HYBRID, lanes=(MAIN_LANE, Lane(1)))
    first, second = Step(bench, ROWS), Step(bench, [Row(30, 1), Row(31, 1)], seed=1)
    plans = [bench.planner.plan(first.batch), bench.planner.plan(second.batch, lane=Lane(1))]
    for _ in range(2):
        check_forward(first, plans[0])
        check_forward(second, plans[1])
    assert bench.planner.num_rebuilt == 0


def test_a_batch_over_other_pools_raises() -> None:
    here, there = cases.bench(HYBRID), cases.bench(HYBRID)
    step = Step(there, ROWS)
    with pytest.raises(StalePlanError, match="the batch was made from"):
        here.planner.plan(step.batch)
    with pytest.raises(StalePlanError, match="the batch was made from"):
        here.planner.ensure(there.planner.plan(step.batch))


def test_paranoid_finds_lengths_changed_in_place() -> None:
    step = Step(cases.bench(HYBRID, paranoid=True), ROWS)
    planned = step.bench.planner.plan(step.batch)
    check_forward(step, planned)
    step.batch.context_lens.device[0] += 1
    with pytest.raises(StalePlanError, match="contents of batch context_lens changed in place"):
        step.bench.planner.ensure(planned)


def test_paranoid_finds_positions_and_trees_changed_in_place() -> None:
    tree = torch.ones(3, 3, dtype=torch.bool).tril()
    step = Step(cases.bench(HYBRID, paranoid=True), [Row(4, 3, RowMask(MaskKind.TREE, tree))])
    planned = step.bench.planner.plan(step.batch)
    tree[2, 0] = False
    step.batch.positions[1] += 1
    with pytest.raises(StalePlanError, match=r"batch positions changed.*batch tree of row 0 changed"):
        step.bench.planner.ensure(planned)


def test_paranoid_finds_a_page_table_changed_behind_its_version() -> None:
    step = Step(cases.bench(HYBRID, paranoid=True), ROWS)
    planned = step.bench.planner.plan(step.batch)
    step.pool.table.pages[step.table_rows[0], 0] += 1
    with pytest.raises(StalePlanError, match=r"page-table rows of group0\.kv changed in place"):
        step.bench.planner.ensure(planned)


def test_paranoid_fills_plan_buffers_again_that_were_changed_in_place() -> None:
    step = Step(cases.bench(HYBRID, paranoid=True), ROWS)
    planned = step.bench.planner.plan(step.batch)
    step.bench.planner._memory[MAIN_LANE].contents()["group0[0].tile0.slots"].fill_(0)
    check_forward(step, planned)
    assert step.bench.planner.num_rebuilt == 1


def test_a_step_beyond_the_limits_is_refused_before_it_runs() -> None:
    step = Step(cases.bench(HYBRID, max_step_tokens=4), [Row(0, 5)])
    with pytest.raises(PlanError, match=r"at most 16 rows and 4 tokens.*got 1 and 5"):
        step.bench.planner.plan(step.batch)


def test_lengths_that_only_the_device_knows_are_refused_where_the_backend_needs_them() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    unknown = step.batch.bounded(step.batch.query_lens.bound, step.batch.context_lens.bound, known=False)
    with pytest.raises(PlanError, match="needs exact host lengths"):
        step.bench.planner.plan(unknown)


def test_an_unknown_lane_is_refused() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    with pytest.raises(PlanError, match="expected a lane"):
        step.bench.planner.plan(step.batch, lane=Lane(3))


def test_a_need_that_the_backend_lacks_is_refused_at_planning() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    planner = step.bench.planner
    planner._bindings = tuple(
        GroupBinding.alone(
            binding.group,
            binding.cache,
            part.backend,
            replace(part.capability, features=frozenset({Feature.WINDOW})),
        )
        for binding in planner._bindings
        for part in binding.parts
    )
    with pytest.raises(PlanError, match="lacks lse"):
        planner.plan(step.batch, needs=frozenset({Feature.LSE}))


def test_ensure_refuses_anything_else() -> None:
    with pytest.raises(UnplannedBatchError, match="got list"):
        cases.bench(HYBRID).planner.ensure([1, 2])  # type: ignore[arg-type]
