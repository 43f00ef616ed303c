"""One flag skipped the write of new entries for every kind of attention and the read for only one of them, so that
another kind would have read what an earlier request left in the cache (SGLang's `fa_skip_kv_cache`).

Here reading and writing are one `CachePolicy` for each group's plan, which the planner decides from the batch and the
group alone and a plan obeys as a whole: a step that writes nothing reads nothing, or what another layer wrote.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import get_type_hints

import pytest
import torch

from sightline.attention.capability import Requirement, refusals
from sightline.attention.certificate import Certificate
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    SoftmaxInputs,
    SoftmaxQueries,
    StepLimits,
    StepView,
)
from sightline.attention.groups import group_layers
from sightline.attention.kinds import Feature
from sightline.attention.planner import GroupPlan, PlannedBatch, Planner, StepPlan
from sightline.attention.spec import SoftmaxSpec
from sightline.cache.layout import walk_slots
from sightline.core.batch import CONTEXT, FULL, Batch
from sightline.core.errors import BatchError, PlanError, StalePlanError
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Unused
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


def policies(planned: PlannedBatch) -> list[CachePolicy]:
    return [group.policy for group in planned.plan.groups]


def test_the_policy_is_one_value_per_group_that_the_planner_decides_from_the_batch_alone() -> None:
    bench = cases.bench([PLAIN, SPECS["window"]])
    for rows in (FRESH, [Row(17, 1), Row(3, 4)], []):
        assert policies(Step(bench, rows).plan()) == [CachePolicy.PAGED] * 2
    for rows in (FRESH, []):
        assert policies(Step(bench, rows, transient=True).plan()) == [CachePolicy.TRANSIENT] * 2
    assert list(inspect.signature(Planner.plan).parameters) == ["self", "batch", "needs", "lane"]


def test_planning_again_keeps_the_policy_of_the_batch() -> None:
    bench = cases.bench([PLAIN])
    paged, transient = Step(bench, FRESH), Step(bench, FRESH, transient=True)
    swapped = replace(paged.plan(), batch=transient.batch)
    assert policies(bench.planner.ensure(swapped)) == [CachePolicy.TRANSIENT]
    swapped = replace(transient.plan(), batch=paged.batch)
    assert policies(bench.planner.ensure(swapped)) == [CachePolicy.PAGED]


LENT = {2: 1, 3: 0}
"""The third layer reads the second's entries, and the fourth, of another spec, the first's."""


def borrowing_bench(backend: str = "torch", **setting: object) -> AttentionRig:
    chosen = RigSetting(**setting)  # type: ignore[arg-type]
    specs = [PLAIN, PLAIN, PLAIN, SPECS["everything"]]
    return AttentionRig(cases.subject_for(backend, chosen.dtype), specs, chosen, LENT)


@all_backends
@all_needs
@all_unused
@pytest.mark.parametrize("layer", LENT)
def test_a_borrowed_plan_reads_its_lenders_entries_and_touches_no_bit_of_any_pool(
    backend: str, needs: frozenset[Feature], unused: Unused, layer: int
) -> None:
    step = Step(borrowing_bench(backend, page_size=4, unused=unused), ragged_rows(4), layer=layer)
    before = bits(step)
    answer, expected = step.run(needs), step.expected()
    torch.testing.assert_close(answer.out, expected.out, atol=3e-5, rtol=3e-5)
    for key, after in bits(step).items():
        assert torch.equal(before[key], after), key


@all_backends
@all_unused
def test_a_token_that_sees_the_context_alone_needs_no_slot_of_its_own(backend: str, unused: Unused) -> None:
    rows = [Row(4, 1, CONTEXT), Row(0, 1, CONTEXT), Row(9, 2, CONTEXT), Row(3, 2)]
    step = Step(borrowing_bench(backend, page_size=4, unused=unused), rows, layer=3)
    assert step.pool.table.num_owned(step.table_rows[0]) == 1, "as many pages as the context has"
    assert step.batch.pools[step.pool.key].write_slots[:4].tolist() == [0, 0, 0, 0], "the padding slot"
    before = bits(step)
    torch.testing.assert_close(step.run().out, step.expected().out, atol=3e-5, rtol=3e-5)
    for key, after in bits(step).items():
        assert torch.equal(before[key], after), key
    step.bench.planner.launch(step.plan())
    lengths = [step.bench.store.lengths.launched(row) for row in step.table_rows]
    assert lengths == [4, 0, 9, 5], "a step gives entries to the causal row alone"


def test_each_groups_plan_has_its_own_policy() -> None:
    bench = borrowing_bench()
    assert [group.loan and (group.loan.lender, group.loan.layers) for group in bench.groups] == [
        None,
        ("group0", (1,)),
        ("group0", (0,)),
    ]
    paged, borrowed = CachePolicy.PAGED, CachePolicy.BORROWED
    for rows in (FRESH, [Row(17, 1), Row(3, 4)], []):
        assert policies(Step(bench, rows).plan()) == [paged, borrowed, borrowed]
    assert [len(cache.pools) for cache in bench.store.groups] == [1, 0, 0], "a group that borrows owns no pool"


def test_a_step_that_keeps_no_entries_has_none_to_lend() -> None:
    with pytest.raises(PlanError, match=r"group0\.borrowed0 reads the entries of group0, got a step that keeps none"):
        Step(borrowing_bench(), FRESH, transient=True).plan()


def test_a_backend_that_does_not_declare_a_shared_cache_is_not_given_one() -> None:
    subject = cases.subject_for("torch", torch.float32)
    lacking = replace(subject.capability, features=subject.capability.features - {Feature.SHARED_CACHE})
    rig = AttentionRig(replace(subject, capability=lacking), [PLAIN, PLAIN], RigSetting(), {1: 0})
    with pytest.raises(PlanError, match=r"TorchBackend serves group0\.borrowed0 and lacks shared-cache"):
        Step(rig, FRESH).plan()
    need = Requirement(PLAIN, cases.CPU_DEVICE, torch.float32, torch.float32, 16, rig.groups[1].needs)
    assert refusals(lacking, need) == ("lacks shared-cache",)
    assert refusals(subject.capability, need) == ()


@pytest.mark.parametrize(
    ("lenders", "told"),
    [({1: 1}, "layer 1 to borrow from an earlier one"), ({1: 2}, "layer 1 to"), ({1: 0, 2: 1}, "layer 2 to")],
    ids=["itself", "a later layer", "another that borrows"],
)
def test_a_layer_borrows_only_from_an_earlier_one_with_its_own_entries(lenders: dict[int, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        group_layers([PLAIN] * 3, lenders=lenders)


def test_a_layer_cannot_read_entries_of_another_shape() -> None:
    with pytest.raises(ValueError, match="layer 1 to read entries of the shape that layer 0 writes"):
        group_layers([PLAIN, replace(PLAIN, head_dim=32)], lenders={1: 0})


def test_a_transient_batch_with_a_context_is_refused() -> None:
    with pytest.raises(BatchError, match="expected context_lens of row 1 to be 0 in a batch without pools, got 4"):
        Step(cases.bench([PLAIN]), [Row(0, 3), Row(4, 1)], transient=True)


def test_a_batch_that_would_write_one_groups_pool_and_not_anothers_is_refused() -> None:
    step = Step(cases.bench([PLAIN, SPECS["window"]]), FRESH)
    partial = replace(step.batch, sources=step.batch.sources[:1])
    with pytest.raises(StalePlanError, match="speaks of pools"):
        step.bench.planner.plan(partial)


def test_a_groups_plan_has_one_policy_and_the_contract_no_flag() -> None:
    for carrier in (StepView, GroupPlan):
        hints = get_type_hints(carrier)
        assert [name for name, hint in hints.items() if hint is CachePolicy] == ["policy"]
    for part in (
        StepView,
        GroupPlan,
        StepPlan,
        Certificate,
        BackendContext,
        StepLimits,
        SoftmaxQueries,
        SoftmaxInputs,
        Batch,
    ):
        kinds = [hint for name, hint in get_type_hints(part).items() if name in {field.name for field in fields(part)}]
        assert bool not in kinds, part
        assert not any("bool" in str(kind) for kind in kinds), part
    for method in (AttentionBackend.__init__, AttentionBackend.plan, AttentionPlan.prepare, AttentionPlan.run):
        assert bool not in get_type_hints(method).values(), method
