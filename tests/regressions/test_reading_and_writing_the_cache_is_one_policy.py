"""One flag skipped the write of new entries for every kind of attention and the read for only one of them, so that
another kind would have read what an earlier request left in the cache (SGLang's `fa_skip_kv_cache`).

Here reading and writing are one `CachePolicy`, which the planner decides from the batch alone and a plan obeys as a
whole: a step that writes nothing reads nothing.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import get_type_hints

import pytest
import torch

from sightline.attention.certificate import Certificate
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    SoftmaxInputs,
    StepLimits,
    StepView,
)
from sightline.attention.planner import Planner, StepPlan
from sightline.attention.spec import Feature, SoftmaxSpec
from sightline.cache.layout import walk_slots
from sightline.core.batch import FULL, Batch
from sightline.core.errors import BatchError, StalePlanError
from sightline.testing.conformance.rig import Row, Unused
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import ragged_rows
from support import attention_cases as cases
from support.attention_cases import BACKENDS

PLAIN = SoftmaxSpec(num_q_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
SPECS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=9),
    "softcap": replace(PLAIN, softcap=2.0),
    "sinks": replace(PLAIN, sinks=True),
    "everything": replace(PLAIN, window=20, softcap=3.0, sinks=True),
}
FRESH = [Row(0, 9), Row(0, 1), Row(0, 33)]
NEEDS = [frozenset[Feature](), frozenset({Feature.LSE})]

all_backends = pytest.mark.parametrize("backend", BACKENDS)
all_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
all_needs = pytest.mark.parametrize("needs", NEEDS, ids=["output alone", "lse"])
all_unused = pytest.mark.parametrize("unused", Unused, ids=[unused.value for unused in Unused])


def bits(step: Step) -> dict[tuple[str, str], torch.Tensor]:
    """Every bit of every pool."""
    return {
        (pool.key, plane.name): pool.plane(plane.name).view(torch.int32).clone()
        for pool in step.bench.store.pools
        for plane in pool.spec.planes
    }


@all_backends
@all_specs
@all_needs
@all_unused
def test_a_transient_step_touches_no_bit_of_any_pool_and_gives_the_oracles_answer(
    backend: str, spec: SoftmaxSpec, needs: frozenset[Feature], unused: Unused
) -> None:
    step = Step(cases.bench([spec, PLAIN], backend, unused=unused), FRESH, transient=True)
    before = bits(step)
    answer, expected = step.run(needs), step.expected()
    torch.testing.assert_close(answer.out, expected.out, atol=3e-5, rtol=3e-5)
    for key, after in bits(step).items():
        assert torch.equal(before[key], after), key


@all_backends
@all_unused
def test_a_paged_step_writes_the_new_entries_where_the_page_table_says_and_nothing_else(
    backend: str, unused: Unused
) -> None:
    step = Step(cases.bench([PLAIN, SPECS["window"], PLAIN], backend, page_size=4, unused=unused), ragged_rows(4))
    before = bits(step)
    step.run()
    after = bits(step)
    written = [
        slot
        for row, table_row in zip(step.rows, step.table_rows, strict=True)
        for slot in walk_slots(step.pool, table_row, row.seq_len)[row.context_len :]
    ]
    for plane, entries in (("k", step.inputs.k), ("v", step.inputs.v)):
        key = (step.pool.key, plane)
        assert torch.equal(step.pool.plane(plane)[step.layer_in_group][written], entries)
        before[key][step.layer_in_group][written] = entries.view(torch.int32)
    for key, expected in before.items():
        assert torch.equal(after[key], expected), key


@all_backends
@all_specs
@all_needs
@pytest.mark.parametrize("mask", [FRESH[0].mask, FULL], ids=["causal", "full"])
def test_fresh_prompts_have_the_same_answer_under_both_policies(
    backend: str, spec: SoftmaxSpec, needs: frozenset[Feature], mask: object
) -> None:
    rows = [replace(row, mask=mask) for row in FRESH]  # type: ignore[arg-type]
    bench = cases.bench([spec], backend)
    paged, transient = Step(bench, rows), Step(bench, rows, transient=True)
    assert torch.equal(paged.inputs.q, transient.inputs.q)
    torch.testing.assert_close(paged.run(needs).out, transient.run(needs).out, atol=1e-5, rtol=1e-5)


def test_the_policy_is_one_value_that_the_planner_decides_from_the_batch_alone() -> None:
    bench = cases.bench([PLAIN, SPECS["window"]])
    for rows in (FRESH, [Row(17, 1), Row(3, 4)], []):
        assert Step(bench, rows).plan().plan.policy is CachePolicy.PAGED
    for rows in (FRESH, []):
        assert Step(bench, rows, transient=True).plan().plan.policy is CachePolicy.TRANSIENT
    assert list(inspect.signature(Planner.plan).parameters) == ["self", "batch", "needs", "lane"]


def test_planning_again_keeps_the_policy_of_the_batch() -> None:
    bench = cases.bench([PLAIN])
    paged, transient = Step(bench, FRESH), Step(bench, FRESH, transient=True)
    swapped = replace(paged.plan(), batch=transient.batch)
    assert bench.planner.ensure(swapped).plan.policy is CachePolicy.TRANSIENT
    swapped = replace(transient.plan(), batch=paged.batch)
    assert bench.planner.ensure(swapped).plan.policy is CachePolicy.PAGED


def test_a_transient_batch_with_a_context_is_refused() -> None:
    with pytest.raises(BatchError, match="expected context_lens of row 1 to be 0 in a batch without pools, got 4"):
        Step(cases.bench([PLAIN]), [Row(0, 3), Row(4, 1)], transient=True)


def test_a_batch_that_would_write_one_groups_pool_and_not_anothers_is_refused() -> None:
    step = Step(cases.bench([PLAIN, SPECS["window"]]), FRESH)
    partial = replace(step.batch, sources=step.batch.sources[:1])
    with pytest.raises(StalePlanError, match="speaks of pools"):
        step.bench.planner.plan(partial)


def test_a_step_has_one_policy_and_the_contract_no_flag() -> None:
    for carrier in (StepView, StepPlan):
        hints = get_type_hints(carrier)
        assert [name for name, hint in hints.items() if hint is CachePolicy] == ["policy"]
    for part in (StepView, StepPlan, Certificate, BackendContext, StepLimits, SoftmaxInputs, Batch):
        kinds = [hint for name, hint in get_type_hints(part).items() if name in {field.name for field in fields(part)}]
        assert bool not in kinds, part
        assert not any("bool" in str(kind) for kind in kinds), part
    for method in (AttentionBackend.__init__, AttentionBackend.plan, AttentionPlan.prepare, AttentionPlan.run):
        assert bool not in get_type_hints(method).values(), method
