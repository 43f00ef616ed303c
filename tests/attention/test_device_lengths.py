"""Rows whose contexts only the device knows, as behind a step that decides how many guesses stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.attention.capability import HostLengths
from sightline.attention.contents import batch_tensors
from sightline.attention.kinds import ENTRY_KINDS
from sightline.cache.store import CacheStore
from sightline.core.batch import FULL, Batch, RowWork, StepWork
from sightline.core.batch_memory import StaticMemory, StepShape
from sightline.core.errors import BatchError, PlanError, StalePlanError
from sightline.core.staging import StagingRing
from sightline.runner.batching import assemble
from sightline.testing.conformance.rig import AttentionRig, Row, Subject
from sightline.testing.conformance.steps import Step
from support.rollouts import cpu_subjects, rig_for

SUBJECTS = cpu_subjects()
# The states of recurrent layers are named by the host, so a batch of theirs has lengths that it knows.
PAGED = [subject for subject in SUBJECTS if subject.capability.spec_kinds <= ENTRY_KINDS]
BOUND = [subject for subject in PAGED if subject.capability.host_lengths is HostLengths.BOUND]
EXACT = [subject for subject in PAGED if subject.capability.host_lengths is HostLengths.EXACT]
TORCH = next(subject for subject in SUBJECTS if subject.name == "torch softmax")
CONTEXTS, QUERIES, SLACK = (17, 3, 0, 31), (3, 3, 2, 1), (2, 0, 3, 1)


def opened(rig: AttentionRig) -> list[int]:
    rows = [rig.store.open_row() for _ in CONTEXTS]
    for row, context, query, slack in zip(rows, CONTEXTS, QUERIES, SLACK, strict=True):
        rig.store.grow_row(row, context + query + slack)
    return rows


def work_at(rows: Sequence[int], contexts: Sequence[int]) -> StepWork:
    return StepWork.of(
        [
            RowWork(row, list(range(5, 5 + query)), context, query)
            for row, context, query in zip(rows, contexts, QUERIES, strict=True)
        ]
    )


BOUNDS = [context + slack for context, slack in zip(CONTEXTS, SLACK, strict=True)]


def bucket(store: CacheStore) -> StaticMemory:
    shape = StepShape(12, 4)
    ring = StagingRing.of(StaticMemory.num_numbers(shape, 1), store.device)
    return StaticMemory(shape, 1, store.device, ring)


def made(work: StepWork, store: CacheStore, *, is_static: bool) -> Batch:
    return Batch.inside(work, store.pools, bucket(store)) if is_static else Batch(work, store.pools, store.device)


@pytest.mark.parametrize("is_static", [False, True], ids=["eager", "bucket"])
def test_every_tensor_is_that_of_a_batch_whose_contexts_the_host_knows(*, is_static: bool) -> None:
    rig = rig_for(TORCH)
    rows = opened(rig)
    known = made(work_at(rows, CONTEXTS), rig.store, is_static=is_static)
    behind = made(work_at(rows, BOUNDS), rig.store, is_static=is_static).behind(torch.tensor(CONTEXTS))
    found, expected = batch_tensors(behind), batch_tensors(known)
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in expected.items()
    }
    assert len(found) == 7
    assert behind.context_lens.host is None
    assert behind.context_lens.bound[: len(BOUNDS)] == tuple(BOUNDS)
    assert behind.query_lens.host == known.query_lens.host


def test_a_batch_without_rows_stays_empty() -> None:
    rig = rig_for(TORCH)
    assert assemble([], rig.store).behind(torch.tensor([], dtype=torch.int64)).num_tokens == 0


class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the names of the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device() -> None:
    rig = rig_for(TORCH)
    bounds, contexts = made(work_at(opened(rig), BOUNDS), rig.store, is_static=True), torch.tensor(CONTEXTS)
    with (asked := Asked()):
        bounds.behind(contexts)
    assert "searchsorted" in asked.names
    assert not asked.names & {
        "_local_scalar_dense",
        "item",
        "nonzero",
        "masked_select",
        "repeat_interleave",
        "_to_copy",
    }


def test_the_batch_at_the_bounds_is_overwritten() -> None:
    rig = rig_for(TORCH)
    bounds = made(work_at(opened(rig), BOUNDS), rig.store, is_static=False)
    bounds.behind(torch.tensor(CONTEXTS))
    with pytest.raises(StalePlanError, match="overwritten by a batch in the same memory"):
        rig.planner.plan(bounds)


@pytest.mark.parametrize("contexts", [torch.tensor([1]), torch.tensor(CONTEXTS).int()])
def test_contexts_of_another_size_or_type_are_refused(contexts: Tensor) -> None:
    rig = rig_for(TORCH)
    with pytest.raises(BatchError, match=r"expected contexts to be \(4,\) int64"):
        made(work_at(opened(rig), BOUNDS), rig.store, is_static=False).behind(contexts)


def test_other_masks_are_refused() -> None:
    rig = rig_for(TORCH)
    row = rig.store.open_row()
    rig.store.grow_row(row, 4)
    with pytest.raises(BatchError, match="causal in rows whose contexts only the device knows"):
        assemble([RowWork(row, [1, 2], 0, 1, FULL)], rig.store).behind(torch.tensor([0]))


def verification(subject: Subject, **setting: object) -> tuple[Step, Batch]:
    """A step of rows of several tokens, and its batch with contexts that only the device knows."""
    rig = rig_for(subject, **setting)
    step = Step(rig, [Row(context, query) for context, query in zip(CONTEXTS, QUERIES, strict=True)])
    for row, bound, query in zip(step.table_rows, BOUNDS, QUERIES, strict=True):
        rig.store.grow_row(row, bound + query)
    bounds = made(work_at(step.table_rows, BOUNDS), rig.store, is_static=False)
    return step, bounds.behind(torch.tensor(CONTEXTS))


def test_triton_serves_lengths_that_only_the_device_knows() -> None:
    assert {"triton softmax", "triton latent"} <= {subject.name for subject in BOUND}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("subject", BOUND, ids=lambda subject: subject.name)
def test_verification_is_the_same_whoever_knows_the_contexts(subject: Subject) -> None:
    (known, _), (unknown, behind) = verification(subject), verification(subject)
    expected, planner = known.run(), unknown.bench.planner
    planned = planner.ensure(planner.plan(behind))
    planner.launch(planned)
    with torch.inference_mode():
        planned.prepare()
    found = unknown.attend(planned)
    torch.testing.assert_close(found.out, expected.out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(found.out, known.expected().out, atol=3e-5, rtol=3e-5)
    assert unknown.unwritten() is None


@pytest.mark.parametrize("subject", EXACT, ids=lambda subject: subject.name)
def test_backends_that_need_exact_lengths_are_refused_by_name(subject: Subject) -> None:
    step, behind = verification(subject)
    name = subject.backend.__name__
    with pytest.raises(
        PlanError, match=f"{name} serves group0 and needs exact host lengths, got a batch whose lengths"
    ):
        step.bench.planner.plan(behind)


@pytest.mark.parametrize("subject", BOUND[:1], ids=lambda subject: subject.name)
def test_paranoid_accepts_contexts_that_only_the_device_knows(subject: Subject) -> None:
    step, behind = verification(subject, paranoid=True)
    planned = step.bench.planner.plan(behind)
    assert step.bench.planner.ensure(planned) is planned
    behind.context_lens.device[0] += 1
    with pytest.raises(StalePlanError, match="contents of batch context_lens changed in place"):
        step.bench.planner.ensure(planned)


def test_a_launch_leaves_the_length_as_it_is_until_it_is_settled() -> None:
    step, behind = verification(BOUND[0])
    planner, lengths = step.bench.planner, step.bench.store.lengths
    planner.launch(planner.plan(behind))
    assert [lengths.launched(row) for row in step.table_rows] == list(CONTEXTS)
