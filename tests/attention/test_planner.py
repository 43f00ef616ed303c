"""Nothing runs on a stale plan: each way in which a plan can go stale is planned again, or raises and says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sightline.attention.contract import CachePolicy
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.spec import Feature, SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.core.batch import Batch, MaskKind, RowMask
from sightline.core.errors import PlanError, StalePlanError, UnplannedBatchError
from sightline.layers.scratch import Scratch
from sightline.models.contract import Model
from sightline.runner.runner import Runner
from support.attention_cases import Bench, Row, Step
from support.layers import activations

FULL = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)
WINDOWED = replace(FULL, window=6)
HYBRID = [FULL, WINDOWED, FULL, WINDOWED]
ROWS = [Row(17, 1), Row(3, 4)]


class OneLayer(Model):
    """A model that is one attention layer over fixed inputs."""

    def __init__(self, step: Step) -> None:
        self.step = step

    @property
    def turns(self) -> bool:
        return False

    def reserve(self, scratch: Scratch) -> None:
        """It needs no memory."""

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        out = torch.full_like(self.step.inputs.q, torch.nan)
        planned.attend(self.step.layer, self.step.inputs, out)
        return out


def runner_for(step: Step, planner: Planner | None = None) -> Runner:
    memory = {lane: activations(step.bench.max_step_tokens) for lane in step.bench.lanes}
    return Runner(OneLayer(step), planner or step.bench.planner, memory)


def check(step: Step, planned: PlannedBatch) -> None:
    """The forward gives the oracle's answer for the step."""
    torch.testing.assert_close(runner_for(step).forward(planned), step.expected()[0], atol=3e-5, rtol=3e-5)


def test_a_current_plan_runs_as_it_is() -> None:
    step = Step(Bench(HYBRID), ROWS)
    planned = step.bench.planner.plan(step.batch)
    assert step.bench.planner.ensure(planned) is planned
    check(step, planned)
    assert step.bench.planner.num_rebuilt == 0


def test_ensure_plans_a_batch_that_has_no_plan() -> None:
    step = Step(Bench(HYBRID), ROWS)
    check(step, step.bench.planner.ensure(step.batch))


def test_a_forward_with_an_unplanned_batch_raises() -> None:
    step = Step(Bench(HYBRID), ROWS)
    with pytest.raises(UnplannedBatchError, match=r"expected a PlannedBatch, got Batch.*Planner\.ensure"):
        runner_for(step).forward(step.batch)  # type: ignore[arg-type]


def test_every_group_is_planned_at_every_step() -> None:
    bench = Bench(HYBRID)
    for rows in (ROWS, [Row(0, 5)], [Row(1, 1)]):
        step = Step(bench, rows, layer=1)
        planned = bench.planner.plan(step.batch)
        assert len(planned.plan.groups) == 2
        assert [planned.plan.places[layer].group for layer in range(4)] == [0, 1, 0, 1]
        check(step, planned)


def test_another_batchs_plan_is_planned_again_for_the_batch_at_hand() -> None:
    bench = Bench(HYBRID)
    first, second = Step(bench, ROWS), Step(bench, [Row(9, 2), Row(0, 6)], seed=1)
    foreign = replace(bench.planner.plan(second.batch), batch=first.batch)
    check(first, foreign)
    assert bench.planner.num_rebuilt == 1


def test_another_batchs_plan_inside_ones_own_planned_batch_is_planned_again() -> None:
    bench = Bench(HYBRID, lanes=(MAIN_LANE, Lane(1)))
    first, second = Step(bench, ROWS), Step(bench, [Row(9, 1), Row(0, 4)], seed=1)
    mine, other = bench.planner.plan(first.batch), bench.planner.plan(second.batch, lane=Lane(1))
    check(first, replace(mine, plan=other.plan))
    check(first, replace(mine, plan=replace(mine.plan, groups=other.plan.groups)))
    check(first, replace(mine, plan=replace(other.plan, certificate=mine.plan.certificate)))
    assert bench.planner.num_rebuilt == 3


def test_padding_taking_splitting_and_idling_give_batches_without_a_plan() -> None:
    step = Step(Bench(HYBRID), ROWS)
    planned = step.bench.planner.plan(step.batch)
    shapes = [
        planned.batch.pad(4, 8),
        planned.batch.take([1]),
        *planned.batch.split(1),
        planned.batch.idle(),
    ]
    ids = {batch.batch_id for batch in shapes} | {planned.batch.batch_id}
    assert len(ids) == 6
    assert all(type(batch) is Batch for batch in shapes)


def test_a_plan_kept_while_its_batch_is_padded_is_planned_again() -> None:
    step = Step(Bench(HYBRID), ROWS)
    planned = step.bench.planner.plan(step.batch)
    padded = replace(planned, batch=step.batch.pad(4, 5))
    check(step, padded)
    assert step.bench.planner.num_rebuilt == 1


def test_a_plan_kept_while_its_batch_turns_idle_is_planned_again() -> None:
    step = Step(Bench(HYBRID), ROWS)
    idle = replace(step.bench.planner.plan(step.batch), batch=step.batch.idle())
    current = step.bench.planner.ensure(idle)
    assert current.plan.certificate.num_rows == 0
    assert current.plan.certificate.batch_id == idle.batch.batch_id
    assert step.bench.planner.num_rebuilt == 1


def test_plan_buffers_that_another_plan_filled_are_filled_again() -> None:
    bench = Bench(HYBRID)
    first, second = Step(bench, ROWS), Step(bench, [Row(30, 1), Row(31, 1)], seed=1)
    early, late = bench.planner.plan(first.batch), bench.planner.plan(second.batch)
    check(second, late)
    check(first, early)
    assert bench.planner.num_rebuilt == 1
    check(second, late)
    assert bench.planner.num_rebuilt == 2


def test_plan_buffers_that_moved_to_other_memory_are_noticed() -> None:
    bench = Bench(HYBRID)
    small, large = Step(bench, [Row(2, 1)]), Step(bench, [Row(400, 1), Row(390, 1)], seed=1)
    early = bench.planner.plan(small.batch)
    bench.planner.plan(large.batch)
    check(small, early)
    assert bench.planner.num_rebuilt == 1


def test_plans_in_two_lanes_do_not_disturb_each_other() -> None:
    bench = Bench(HYBRID, lanes=(MAIN_LANE, Lane(1)))
    first, second = Step(bench, ROWS), Step(bench, [Row(30, 1), Row(31, 1)], seed=1)
    plans = [bench.planner.plan(first.batch), bench.planner.plan(second.batch, lane=Lane(1))]
    for _ in range(2):
        check(first, plans[0])
        check(second, plans[1])
    assert bench.planner.num_rebuilt == 0


def test_another_planners_plan_over_the_same_pools_is_planned_again() -> None:
    step = Step(Bench(HYBRID), ROWS)
    other = step.bench.make_planner()
    check(step, other.plan(step.batch))
    assert step.bench.planner.num_rebuilt == 1


def test_pages_that_went_back_raise_and_name_the_row() -> None:
    step = Step(Bench(HYBRID), ROWS)
    planned = step.bench.planner.plan(step.batch)
    step.bench.store.close_row(step.table_rows[1])
    with pytest.raises(
        StalePlanError, match=rf"pool group0\.kv changed: row {step.table_rows[1]} was version"
    ) as caught:
        runner_for(step).forward(planned)
    assert len(caught.value.changes) == 2, "both groups' page tables changed"
    assert "Build a new batch" in str(caught.value)


def test_pages_that_changed_owner_raise_even_where_the_row_looks_the_same() -> None:
    step = Step(Bench(HYBRID), ROWS)
    planned = step.bench.planner.plan(step.batch)
    step.bench.store.close_row(step.table_rows[0])
    assert step.bench.store.open_row() == step.table_rows[0]
    step.bench.store.grow_row(step.table_rows[0], 18)
    with pytest.raises(StalePlanError, match="page table of pool"):
        step.bench.planner.ensure(planned)


def test_a_stale_batch_cannot_be_planned_either() -> None:
    step = Step(Bench(HYBRID), ROWS)
    step.bench.store.grow_row(step.table_rows[0], 64)
    with pytest.raises(StalePlanError, match="changed"):
        step.bench.planner.plan(step.batch)


def test_rebuildable_changes_never_hide_a_stale_batch() -> None:
    bench = Bench(HYBRID)
    first, second = Step(bench, ROWS), Step(bench, [Row(5, 1)], seed=1)
    planned = bench.planner.plan(first.batch)
    bench.planner.plan(second.batch)
    bench.store.close_row(first.table_rows[0])
    with pytest.raises(StalePlanError, match="page table"):
        bench.planner.ensure(planned)
    assert bench.planner.num_rebuilt == 0


def test_a_batch_over_other_pools_raises() -> None:
    here, there = Bench(HYBRID), Bench(HYBRID)
    step = Step(there, ROWS)
    with pytest.raises(StalePlanError, match="the batch was made from"):
        here.planner.plan(step.batch)
    with pytest.raises(StalePlanError, match="the batch was made from"):
        here.planner.ensure(there.planner.plan(step.batch))


def test_a_batch_that_lacks_a_groups_pool_raises() -> None:
    step = Step(Bench(HYBRID), ROWS)
    partial = replace(step.batch, pools={"group0.kv": step.batch.pools["group0.kv"]})
    with pytest.raises(StalePlanError, match="speaks of pools"):
        step.bench.planner.plan(partial)


def test_paranoid_finds_lengths_changed_in_place() -> None:
    step = Step(Bench(HYBRID, paranoid=True), ROWS)
    planned = step.bench.planner.plan(step.batch)
    check(step, planned)
    step.batch.context_lens.device[0] += 1
    with pytest.raises(StalePlanError, match="contents of batch context_lens changed in place"):
        step.bench.planner.ensure(planned)


def test_paranoid_finds_positions_and_trees_changed_in_place() -> None:
    tree = torch.ones(3, 3, dtype=torch.bool).tril()
    step = Step(Bench(HYBRID, paranoid=True), [Row(4, 3, RowMask(MaskKind.TREE, tree))])
    planned = step.bench.planner.plan(step.batch)
    tree[2, 0] = False
    step.batch.positions[1] += 1
    with pytest.raises(StalePlanError, match=r"batch positions changed.*batch tree of row 0 changed"):
        step.bench.planner.ensure(planned)


def test_paranoid_finds_a_page_table_changed_behind_its_version() -> None:
    step = Step(Bench(HYBRID, paranoid=True), ROWS)
    planned = step.bench.planner.plan(step.batch)
    step.pool.table.pages[step.table_rows[0], 0] += 1
    with pytest.raises(StalePlanError, match=r"page-table rows of group0\.kv changed in place"):
        step.bench.planner.ensure(planned)


def test_paranoid_fills_plan_buffers_again_that_were_changed_in_place() -> None:
    step = Step(Bench(HYBRID, paranoid=True), ROWS)
    planned = step.bench.planner.plan(step.batch)
    plan_buffers = step.bench.planner._buffers[MAIN_LANE][0]
    plan_buffers.contents(["tile0.slots"])[0].fill_(0)
    check(step, planned)
    assert step.bench.planner.num_rebuilt == 1


def test_the_policy_is_one_value_decided_by_the_planner() -> None:
    bench = Bench(HYBRID)
    assert bench.planner.plan(Step(bench, ROWS).batch).plan.policy is CachePolicy.PAGED
    transient = Step(bench, [Row(0, 3)], transient=True)
    assert bench.planner.plan(transient.batch).plan.policy is CachePolicy.TRANSIENT


def test_a_context_without_pools_is_refused() -> None:
    step = Step(Bench(HYBRID), [Row(4, 1)], transient=True)
    with pytest.raises(PlanError, match="expected context lengths of 0"):
        step.bench.planner.plan(step.batch)


def test_a_step_beyond_the_limits_is_refused_before_it_runs() -> None:
    step = Step(Bench(HYBRID, max_step_tokens=4), [Row(0, 5)])
    with pytest.raises(PlanError, match=r"at most 16 rows and 4 tokens.*got 1 and 5"):
        step.bench.planner.plan(step.batch)


def test_lengths_that_only_the_device_knows_are_refused_where_the_backend_needs_them() -> None:
    step = Step(Bench(HYBRID), ROWS)
    unknown = replace(step.batch, context_lens=replace(step.batch.context_lens, host=None))
    with pytest.raises(PlanError, match="needs exact host lengths"):
        step.bench.planner.plan(unknown)


def test_a_batch_with_other_contents_is_never_run_on_the_first_ones_plan() -> None:
    bench = Bench(HYBRID)
    step = Step(bench, ROWS)
    planned = bench.planner.plan(step.batch)
    other = replace(planned, batch=replace(step.batch, positions=step.batch.positions + 1))
    assert bench.planner.ensure(other).plan.certificate.batch_id != planned.plan.certificate.batch_id
    assert bench.planner.num_rebuilt == 1


def test_an_unknown_lane_is_refused() -> None:
    step = Step(Bench(HYBRID), ROWS)
    with pytest.raises(PlanError, match="expected a lane"):
        step.bench.planner.plan(step.batch, lane=Lane(3))


def test_a_need_that_the_backend_lacks_is_refused_at_planning() -> None:
    step = Step(Bench(HYBRID), ROWS)
    planner = step.bench.planner
    planner._bindings = tuple(
        replace(binding, capability=replace(binding.capability, features=frozenset({Feature.WINDOW})))
        for binding in planner._bindings
    )
    with pytest.raises(PlanError, match="lacks lse"):
        planner.plan(step.batch, needs=frozenset({Feature.LSE}))


def test_a_replaced_backend_makes_the_plan_stale() -> None:
    step = Step(Bench(HYBRID), ROWS)
    planner = step.bench.planner
    planned = planner.plan(step.batch)
    planner._bindings = step.bench.make_planner()._bindings
    assert planner.ensure(planned).plan.certificate.backends != planned.plan.certificate.backends
    assert planner.num_rebuilt == 1


def test_ensure_refuses_anything_else() -> None:
    with pytest.raises(UnplannedBatchError, match="got list"):
        Bench(HYBRID).planner.ensure([1, 2])  # type: ignore[arg-type]
