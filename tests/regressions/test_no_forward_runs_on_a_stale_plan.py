"""A flag passed through six layers said that somebody had planned; the marker on the batch that replaced it records two
sizes, and sites that do not opt in to the check keep running a stale plan by design (SGLang PR 27193).

Here a plan carries a certificate of what it was made from, `Runner.forward` compares it at every call with no way
around it, and whatever changes a batch's shape gives a new batch that no plan belongs to.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sightline import LLM, SamplingParams
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.core.batch import Batch, RowWork
from sightline.core.errors import StalePlanError, UnplannedBatchError
from sightline.models.contract import Model
from sightline.runner.batching import assemble
from sightline.runner.runner import Runner
from sightline.testing.conformance.given_inputs import map_inputs
from sightline.testing.conformance.rig import Row
from sightline.testing.conformance.steps import Step
from support import attention_cases as cases
from support.one_layer import check_forward, runner_for
from support.source_rules import modules
from support.tiny_models import random_prompts

FULL = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)
HYBRID = [FULL, replace(FULL, window=6), FULL, replace(FULL, window=6)]
ROWS = [Row(17, 1), Row(3, 4)]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


def test_a_forward_with_an_unplanned_batch_raises() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    with pytest.raises(UnplannedBatchError, match=r"expected a PlannedBatch, got Batch.*Planner\.ensure"):
        runner_for(step).forward(step.batch)  # type: ignore[arg-type]


def test_another_batchs_plan_is_planned_again_for_the_batch_at_hand() -> None:
    bench = cases.bench(HYBRID)
    first, second = Step(bench, ROWS), Step(bench, [Row(9, 2), Row(0, 6)], seed=1)
    check_forward(first, replace(second.plan(), batch=first.batch))
    assert bench.planner.num_rebuilt == 1


def test_another_batchs_plan_of_the_same_sizes_is_planned_again_too() -> None:
    bench = cases.bench(HYBRID)
    first, second = Step(bench, ROWS), Step(bench, ROWS, seed=1)
    check_forward(first, replace(second.plan(), batch=first.batch))
    assert bench.planner.num_rebuilt == 1


def test_another_batchs_plan_inside_ones_own_planned_batch_is_planned_again() -> None:
    bench = cases.bench(HYBRID, lanes=(MAIN_LANE, Lane(1)))
    first, second = Step(bench, ROWS), Step(bench, [Row(9, 1), Row(0, 4)], seed=1)
    mine, other = first.plan(), second.plan(lane=Lane(1))
    check_forward(first, replace(mine, plan=other.plan))
    check_forward(first, replace(mine, plan=replace(mine.plan, groups=other.plan.groups)))
    check_forward(first, replace(mine, plan=replace(other.plan, certificate=mine.plan.certificate)))
    assert bench.planner.num_rebuilt == 3


def test_a_batch_with_other_contents_is_never_run_on_the_first_ones_plan() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    planner, planned = step.bench.planner, step.plan()
    other = replace(planned, batch=replace(step.batch))
    assert planner.ensure(other).plan.certificate.batch_id != planned.plan.certificate.batch_id
    assert planner.num_rebuilt == 1


def test_padding_taking_splitting_and_idling_give_batches_without_a_plan() -> None:
    planned = Step(cases.bench(HYBRID), ROWS).plan()
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
    step = Step(cases.bench(HYBRID), ROWS)
    check_forward(step, replace(step.plan(), batch=step.batch.pad(4, 5)))
    assert step.bench.planner.num_rebuilt == 1


def test_a_plan_kept_while_tokens_are_padded_leaves_the_padding_alone() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    padded = replace(step.plan(), batch=step.batch.pad(4, 8))
    inputs = map_inputs(step.inputs, lambda t: torch.cat([t, torch.full_like(t[:3], torch.nan)]))
    out = runner_for(step, inputs=inputs).forward(padded)
    torch.testing.assert_close(out[:5], step.expected().out, atol=3e-5, rtol=3e-5)
    assert out[5:].isnan().all()


def test_a_plan_kept_while_its_batch_turns_idle_is_planned_again() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    before = [pool.plane("k").clone() for pool in step.bench.store.pools]
    idle = replace(step.plan(), batch=step.batch.idle())
    out = runner_for(step, inputs=map_inputs(step.inputs, lambda t: t[:0])).forward(idle)
    assert out.shape == (0, 4, 8)
    assert step.bench.planner.num_rebuilt == 1
    for pool, entries in zip(step.bench.store.pools, before, strict=True):
        torch.testing.assert_close(pool.plane("k"), entries, equal_nan=True, atol=0, rtol=0)


def run_rows(step: Step, planned: PlannedBatch, rows: list[int]) -> tuple[Tensor, Tensor]:
    """A forward of some of the step's rows, and what the oracle says of them."""
    offsets = step.batch.query_offsets_host()
    tokens = [token for row in rows for token in range(offsets[row], offsets[row + 1])]
    inputs = map_inputs(step.inputs, lambda t: t[tokens])
    return runner_for(step, inputs=inputs).forward(planned), step.expected().out[tokens]


@pytest.mark.parametrize("rows", [[1], [0], [1, 0], [2, 0]])
def test_a_plan_kept_while_rows_are_taken_is_planned_again(rows: list[int]) -> None:
    step = Step(cases.bench(HYBRID), [*ROWS, Row(0, 9)])
    out, expected = run_rows(step, replace(step.plan(), batch=step.batch.take(rows)), rows)
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=3e-5)
    assert step.bench.planner.num_rebuilt == 1


@pytest.mark.parametrize("first_rows", [0, 1, 2, 3])
def test_two_halves_that_keep_the_whole_batchs_plan_are_each_planned_again(first_rows: int) -> None:
    step = Step(cases.bench(HYBRID), [*ROWS, Row(0, 9)])
    whole = step.plan()
    for half, rows in zip(step.batch.split(first_rows), (range(first_rows), range(first_rows, 3)), strict=True):
        out, expected = run_rows(step, replace(whole, batch=half), list(rows))
        torch.testing.assert_close(out, expected, atol=3e-5, rtol=3e-5)
    assert step.bench.planner.num_rebuilt == 2


def test_two_halves_planned_in_two_lanes_run_in_turns_as_they_are() -> None:
    step = Step(cases.bench(HYBRID, lanes=(MAIN_LANE, Lane(1))), [*ROWS, Row(0, 9)])
    planner = step.bench.planner
    halves = [planner.plan(half, lane=Lane(lane)) for lane, half in enumerate(step.batch.split(1))]
    for _ in range(2):
        for half, rows in zip(halves, ([0], [1, 2]), strict=True):
            out, expected = run_rows(step, half, rows)
            torch.testing.assert_close(out, expected, atol=3e-5, rtol=3e-5)
    assert planner.num_rebuilt == 0


def test_plan_buffers_that_another_plan_filled_are_filled_again() -> None:
    bench = cases.bench(HYBRID)
    first, second = Step(bench, ROWS), Step(bench, [Row(30, 1), Row(31, 1)], seed=1)
    early, late = first.plan(), second.plan()
    check_forward(second, late)
    check_forward(first, early)
    assert bench.planner.num_rebuilt == 1
    check_forward(second, late)
    assert bench.planner.num_rebuilt == 2


def test_plan_buffers_that_moved_to_other_memory_are_noticed() -> None:
    bench = cases.bench(HYBRID)
    small, large = Step(bench, [Row(2, 1)]), Step(bench, [Row(400, 1), Row(390, 1)], seed=1)
    early = small.plan()
    large.plan()
    check_forward(small, early)
    assert bench.planner.num_rebuilt == 1


def test_another_planners_plan_over_the_same_pools_is_planned_again() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    check_forward(step, step.bench.another_planner().plan(step.batch))
    assert step.bench.planner.num_rebuilt == 1


def test_a_replaced_backend_makes_the_plan_stale() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    planner, planned = step.bench.planner, step.plan()
    planner._bindings = step.bench.another_planner()._bindings
    before, after = planned.plan.certificate, planner.ensure(planned).plan.certificate
    assert all(now.backend is not was.backend for now, was in zip(after.parts, before.parts, strict=True))
    assert planner.num_rebuilt == 1


def test_pages_that_went_back_raise_and_name_the_row() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    planned = step.plan()
    step.bench.store.close_row(step.table_rows[1])
    with pytest.raises(
        StalePlanError, match=rf"pool group0\.kv changed: row {step.table_rows[1]} was version"
    ) as caught:
        runner_for(step).forward(planned)
    assert len(caught.value.changes) == 2, "both groups' page tables changed"
    assert "Build a new batch" in str(caught.value)


def test_pages_that_changed_owner_raise_even_where_the_row_looks_the_same() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    planned = step.plan()
    step.bench.store.close_row(step.table_rows[0])
    assert step.bench.store.open_row() == step.table_rows[0]
    step.bench.store.grow_row(step.table_rows[0], 18)
    with pytest.raises(StalePlanError, match="page table of pool"):
        runner_for(step).forward(planned)


def test_a_stale_batch_cannot_be_planned_either() -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    step.bench.store.trim_row(step.table_rows[0], 3)
    with pytest.raises(StalePlanError, match="changed"):
        step.plan()


def test_a_row_that_grew_keeps_its_plan() -> None:
    step = Step(cases.bench(HYBRID, paranoid=True), ROWS)
    planned = step.plan()
    step.bench.store.grow_row(step.table_rows[0], 64)
    assert step.bench.planner.ensure(planned) is planned
    check_forward(step, planned)


def test_rebuildable_changes_never_hide_a_stale_batch() -> None:
    bench = cases.bench(HYBRID)
    first, second = Step(bench, ROWS), Step(bench, [Row(5, 1)], seed=1)
    planned = first.plan()
    second.plan()
    bench.store.close_row(first.table_rows[0])
    with pytest.raises(StalePlanError, match="page table"):
        bench.planner.ensure(planned)
    assert bench.planner.num_rebuilt == 0


@pytest.mark.parametrize("change", [lambda batch: batch.pad(8, 9), lambda batch: batch.take([1, 0])])
def test_a_new_shape_of_a_batch_whose_pages_went_back_raises_too(change: Callable[[Batch], Batch]) -> None:
    step = Step(cases.bench(HYBRID), ROWS)
    planned = step.plan()
    step.bench.store.close_row(step.table_rows[1])
    with pytest.raises(StalePlanError, match="page table"):
        runner_for(step).forward(replace(planned, batch=change(step.batch)))


MUTATIONS = ("pad", "take", "idle", "plan another", "other planner", "other plan", "grow a row", "close a row")


def mutate(step: Step, planned: PlannedBatch, rows: list[int], name: str, data: st.DataObject) -> PlannedBatch:
    """Changes something between planning and running; `rows` are those of the step that are left."""
    bench, batch = step.bench, planned.batch
    match name:
        case "pad":
            more = data.draw(st.integers(0, 3))
            return replace(planned, batch=batch.pad(batch.num_rows + more, batch.num_tokens + more))
        case "take":
            order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(0, len(rows)))]
            rows[:] = [rows[row] for row in order]
            return replace(planned, batch=batch.take(order))
        case "idle":
            rows.clear()
            return replace(planned, batch=batch.idle())
        case "plan another":
            Step(bench, [Row(data.draw(st.integers(0, 40)), data.draw(st.integers(1, 9)))], seed=5).plan()
        case "other planner":
            return replace(planned, plan=bench.another_planner().plan(batch).plan)
        case "other plan":
            return replace(planned, plan=Step(bench, [Row(4, 2)], seed=6).plan().plan)
        case "grow a row" if bench.store.is_open(step.table_rows[0]):
            bench.store.grow_row(step.table_rows[0], 200)
        case "close a row":
            row = data.draw(st.sampled_from(step.table_rows))
            if bench.store.is_open(row):
                bench.store.close_row(row)
    return planned


@settings(max_examples=30, deadline=None)
@given(names=st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=4), data=st.data())
def test_whatever_happens_between_planning_and_running_the_answer_is_right_or_an_error(
    names: list[str], data: st.DataObject
) -> None:
    step = Step(cases.bench(HYBRID, max_seq_len=256), [*ROWS, Row(0, 3)], layer=1)
    planned, rows = step.plan(), [0, 1, 2]
    offsets, expected = step.batch.query_offsets_host(), step.expected().out
    try:
        for name in names:
            planned = mutate(step, planned, rows, name, data)
        tokens = [token for row in rows for token in range(offsets[row], offsets[row + 1])]
        padding = planned.batch.num_tokens - len(tokens)
        inputs = map_inputs(
            step.inputs, lambda t: torch.cat([t[tokens], t.new_full((padding, *t.shape[1:]), torch.nan)])
        )
        out = runner_for(step, inputs=inputs).forward(planned)
    except StalePlanError:
        assert {"grow a row", "close a row"} & set(names), "nothing else makes a batch stale"
        return
    torch.testing.assert_close(out[: len(tokens)], expected[tokens], atol=3e-5, rtol=3e-5)


def test_nothing_that_runs_a_batch_can_be_told_not_to_check() -> None:
    assert list(inspect.signature(Planner.ensure).parameters) == ["self", "work"]
    assert list(inspect.signature(Runner.forward).parameters) == ["self", "planned", "states", "beside"]
    assert list(inspect.signature(Model.forward).parameters) == ["self", "planned", "scratch"]
    assert get_type_hints(Runner.forward)["planned"] is PlannedBatch
    assert get_type_hints(Model.forward)["planned"] is PlannedBatch


def test_a_planned_batch_and_a_batch_carry_no_flag() -> None:
    assert [field.name for field in fields(PlannedBatch)] == ["batch", "plan"]
    for kind in (PlannedBatch, Batch):
        assert bool not in get_type_hints(kind).values()


def test_only_the_planner_makes_planned_batches_and_only_the_runner_runs_a_model() -> None:
    calls: dict[str, set[str]] = {"PlannedBatch": set(), "_model.forward": set(), "model.forward": set()}
    for path, module in modules():
        called = _called(module)
        for name, paths in calls.items():
            if f"{name}(" in called:
                paths.add(path)
    assert calls["PlannedBatch"] == {"attention/planner.py"}
    assert calls["_model.forward"] | calls["model.forward"] == {"runner/runner.py"}


def _called(module: ast.Module) -> set[str]:
    return {
        f"{ast.unparse(node.func).removeprefix('self.')}(" for node in ast.walk(module) if isinstance(node, ast.Call)
    }


def engine_for(folder: Path, *, enforce_eager: bool = False) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        cache_tokens=512,
        max_num_batched_tokens=64,
        strict=True,
        enforce_eager=enforce_eager,
    )


Disturbance = Callable[[LLM, PlannedBatch], PlannedBatch]


def disturb(llm: LLM, monkeypatch: pytest.MonkeyPatch, disturbance: Disturbance) -> None:
    """Does something between the planning and the forward of every step."""
    forward = llm.engine.runtime.runner.forward
    monkeypatch.setattr(llm.engine.runtime.runner, "forward", lambda planned: forward(disturbance(llm, planned)))


def plan_another(llm: LLM, planned: PlannedBatch) -> PlannedBatch:
    runtime = llm.engine.runtime
    row = runtime.store.open_row()
    runtime.store.grow_row(row, 9)
    runtime.planner.plan(assemble([RowWork(row, [5] * 9, 0, 1)], runtime.store))
    runtime.store.close_row(row)
    return planned


def pad(llm: LLM, planned: PlannedBatch) -> PlannedBatch:
    return replace(planned, batch=planned.batch.pad(planned.batch.num_rows + 2, 64))


def keep_an_older_plan() -> Disturbance:
    """Every step runs with the plan of the first one."""
    plans: list[PlannedBatch] = []

    def disturbance(llm: LLM, planned: PlannedBatch) -> PlannedBatch:
        plans.append(planned)
        return replace(planned, plan=plans[0].plan)

    return disturbance


@pytest.mark.parametrize(
    "disturbance", [lambda: plan_another, lambda: pad, keep_an_older_plan], ids=["another plan", "pad", "older"]
)
@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "recorded"])
def test_an_engine_disturbed_between_planning_and_running_answers_as_an_undisturbed_one(
    gemma: Path, monkeypatch: pytest.MonkeyPatch, disturbance: Callable[[], Disturbance], *, is_eager: bool
) -> None:
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in random_prompts([20, 3, 80])]
    expected = [output.outputs[0].token_ids for output in engine_for(gemma).generate(prompts, GREEDY)]
    llm = engine_for(gemma, enforce_eager=is_eager)
    disturb(llm, monkeypatch, disturbance())
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected
    # A recorded step's plan is in memory of its own, which another plan leaves as it is.
    assert llm.engine.runtime.planner.num_rebuilt >= (9 if is_eager else 2)


def test_a_row_closed_between_planning_and_running_harms_nobody_else(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine_for(gemma)
    [first, second] = [llm.engine.submit(prompt, GREEDY) for prompt in random_prompts([7, 9])]
    llm.engine.step()

    def cancelled(llm: LLM, planned: PlannedBatch) -> PlannedBatch:
        # As a bug in the engine would: from outside, a call within a step is refused.
        llm.engine._forget(first)
        return planned

    with monkeypatch.context() as patch:
        disturb(llm, patch, cancelled)
        llm.engine.step()
    assert llm.engine.metrics().steps_cut == 1, "the plan is stale, and the step was run again without the row"
    while llm.engine.has_work:
        llm.engine.step()
    alone: Any = {"prompt_token_ids": random_prompts([7, 9])[1]}
    [undisturbed] = engine_for(gemma).generate(alone, GREEDY)
    assert llm.engine.pop_output(second).outputs[0].token_ids == undisturbed.outputs[0].token_ids


def test_a_cancel_from_elsewhere_waits_until_the_step_that_reads_its_pages_is_over(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine_for(gemma)
    request = llm.engine.submit(random_prompts([7])[0], GREEDY)
    store = llm.engine.runtime.store

    def cancelled(llm: LLM, planned: PlannedBatch) -> PlannedBatch:
        llm.engine.cancel(request)
        assert store.num_free_pages < store.num_usable_pages
        return planned

    with monkeypatch.context() as patch:
        disturb(llm, patch, cancelled)
        llm.engine.step()
    assert store.num_free_pages < store.num_usable_pages
    llm.engine.step()
    assert store.num_free_pages == store.num_usable_pages
    assert llm.engine.pop_output(request).outputs[0].finish_reason == "abort"
