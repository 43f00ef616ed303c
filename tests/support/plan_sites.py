"""Every place at which a step is planned ahead of its forward, and what may change in between.

In an engine where each of these places must remember to mark its batch as planned, some ran on the plan of another
batch (SGLang PR 27193).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.contract import SoftmaxInputs, StepLimits
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.rollout import following_steps
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.core.batch import CONTEXT, Batch, RowWork, StepWork
from sightline.core.batch_memory import StaticMemory, StepShape
from sightline.core.errors import PlanError, StalePlanError
from sightline.core.staging import StagingRing
from sightline.layers.scratch import Scratch
from sightline.models.contract import Model
from sightline.runner.recording import Recording
from sightline.runner.runner import Runner
from sightline.testing.conformance.rig import AttentionRig
from support import attention_cases as cases
from support.layers import activations

SPEC = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)
PAGE, MAX_TOKENS, STEPS = 4, 32, 3
LIMITS = StepLimits(16, MAX_TOKENS, 64, (MAIN_LANE,), max_rollout=STEPS)


class Attending(Model):
    """A model that is one attention layer; a token's inputs follow from the token and its position."""

    @property
    def turns(self) -> bool:
        return False

    def reserve(self, scratch: Scratch) -> None:
        """It needs no memory."""

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        at = (planned.batch.tokens + 100 * planned.batch.positions).double()[:, None, None]

        def values(heads: int, phase: float) -> Tensor:
            each = torch.arange(heads * SPEC.head_dim, device=at.device).view(heads, SPEC.head_dim)
            return torch.sin(at * (0.7 + 0.13 * each) + phase).float()

        inputs = SoftmaxInputs(q=values(4, 0.0), k=values(2, 1.0), v=values(2, 2.0), sinks=None)
        out = torch.full_like(inputs.q, torch.nan)
        planned.attend(0, inputs, out)
        return out


@dataclass(frozen=True)
class Repeats:
    """Recorded work that is done again."""

    work: Callable[[], Tensor]

    def replay(self) -> Tensor:
        return self.work()


class Repeater:
    """A recorder for any device."""

    is_essential: ClassVar[bool] = False
    num_bytes = 0

    def record(self, work: Callable[[], Tensor]) -> Recording:
        work()
        return Repeats(work)


class Bench:
    """Two sequences in one store, a planner with buckets, and another planner over the same store."""

    def __init__(self, rig: AttentionRig | None = None) -> None:
        """Over a rig of one layer of `SPEC`; by default one of torch's backend."""
        self.rig = cases.bench([SPEC], max_seq_len=64, max_rows=8, page_size=PAGE) if rig is None else rig
        self.store = self.rig.store
        ring = StagingRing.of(StaticMemory.num_numbers(StepShape(8, 8), 1), self.store.device)
        self.buckets = [StaticMemory(StepShape(8, 8), 1, self.store.device, ring) for _ in range(STEPS)]
        self.planner, self.other = self._planner(), self._planner()
        memory = {MAIN_LANE: activations(MAX_TOKENS)}
        self.runner = Runner(Attending(), self.planner, memory)
        self.other_runner = Runner(Attending(), self.other, memory)
        self.rows = [self.store.open_row() for _ in range(3)]
        for row in self.rows:
            self.store.grow_row(row, 24)
        self.runner.forward(self.planner.plan(self.batch([9, 6], start=0)))

    def _planner(self) -> Planner:
        workspace = Workspace(self.store.device, 1 << 26, poison=True)
        planner = Planner(self.rig.another_planner()._bindings, LIMITS, self.store.lengths, workspace)
        for bucket in self.buckets:
            planner.reserve(bucket)
        workspace.seal()
        return planner

    def work(self, new: list[int], start: int | None = None) -> StepWork:
        """New tokens of the first rows, from where they are."""
        return StepWork.of(
            [
                RowWork(
                    row, list(range(3, 3 + count)), self.store.lengths.launched(row) if start is None else start, count
                )
                for row, count in zip(self.rows, new, strict=False)
            ]
        )

    def batch(self, new: list[int], start: int | None = None) -> Batch:
        return Batch(self.work(new, start), self.store.pools, self.store.device)

    def in_bucket(self, new: list[int], index: int = 0) -> Batch:
        return Batch.inside(self.work(new), self.store.pools, self.buckets[index])

    def drafted(self, plans: Sequence[PlannedBatch]) -> list[Tensor]:
        """Runs a draft of the first two rows, which chooses the same tokens each time."""
        outs = []
        for planned, following in pairwise([*plans, None]):
            assert planned is not None
            outs.append(self.runner.forward(planned)[:2])
            if following is not None:
                following.batch.fill(torch.tensor([5, 6], device=self.store.device))
        return outs

    def take_back(self, plans: Sequence[PlannedBatch]) -> None:
        """Lets the rows be drafted for again."""
        for planned in reversed(plans):
            self.planner.take_back(planned)

    def steps_in_buckets(self) -> list[Batch]:
        """A draft whose steps are each in a bucket of their own."""
        steps = following_steps(self.batch([1, 1]), STEPS)
        placed = [Batch.inside(steps[0].work, steps[0].sources, self.buckets[0])]
        for step, bucket in zip(steps[1:], self.buckets[1:], strict=True):
            placed.append(Batch.inside(step.work, step.sources, bucket, awaited=step.awaited))
        return placed


@dataclass(frozen=True)
class Ahead:
    """A step that was planned ahead, on a bench."""

    bench: Bench
    planner: Planner
    planned: PlannedBatch
    run: Callable[[PlannedBatch], object]
    """The forward or the capture."""


Plan = Callable[[Bench], Ahead]


def _run(bench: Bench, planned: PlannedBatch) -> Ahead:
    return Ahead(bench, bench.planner, planned, bench.runner.forward)


def draft(bench: Bench) -> Ahead:
    """The first step of a draft."""
    return _run(bench, bench.planner.rollout(following_steps(bench.batch([2, 1]), STEPS))[0])


def multi_step(bench: Bench) -> Ahead:
    """The last step of a draft, when those before it have run."""
    plans = bench.planner.rollout(following_steps(bench.batch([2, 1]), STEPS))
    for planned, following in pairwise(plans):
        bench.runner.forward(planned)
        following.batch.fill(torch.tensor([5, 6]))
    return _run(bench, plans[-1])


def multi_layer(bench: Bench) -> Ahead:
    """A draft step of a second planner over the same store, while the first one plans too."""
    [first, *_] = bench.other.rollout(following_steps(bench.batch([1, 1]), STEPS))
    bench.planner.rollout(following_steps(bench.batch([1, 1]), STEPS))
    return Ahead(bench, bench.other, first, bench.other_runner.forward)


def frozen_kv(bench: Bench) -> Ahead:
    """The last step of a draft that reads the cache at one position and keeps nothing."""
    work = bench.work([1, 1])
    first = Batch(replace(work, masks=(CONTEXT, CONTEXT)), bench.store.pools, bench.store.device)
    plans = bench.planner.rollout(following_steps(first, STEPS))
    for planned, following in pairwise(plans):
        bench.runner.forward(planned)
        following.batch.fill(torch.tensor([5, 6]))
    assert {planned.batch.context_lens.host for planned in plans} == {first.context_lens.host}
    return _run(bench, plans[-1])


def verify(bench: Bench) -> Ahead:
    """Guesses of every row, with the logits of all."""
    return _run(bench, bench.planner.plan(bench.batch([3, 3])))


def draft_extend(bench: Bench) -> Ahead:
    """Accepted tokens, of which rows have different numbers."""
    return _run(bench, bench.planner.plan(bench.batch([4, 1])))


def capture(bench: Bench) -> Ahead:
    planned = bench.planner.plan(bench.in_bucket([1, 1]))
    return Ahead(bench, bench.planner, planned, lambda step: bench.runner.capture(step, Repeater()))


def draft_capture(bench: Bench) -> Ahead:
    first, second, _ = bench.planner.rollout(bench.steps_in_buckets())
    bench.runner.forward(first)
    second.batch.fill(torch.tensor([5, 6]))
    return Ahead(bench, bench.planner, second, lambda step: bench.runner.capture(step, Repeater()))


def replay(bench: Bench) -> Ahead:
    bench.runner.capture(bench.planner.plan(bench.in_bucket([1, 1])), Repeater())
    return _run(bench, bench.planner.plan(bench.in_bucket([1, 1])))


def draft_replay(bench: Bench) -> Ahead:
    bench.runner.capture(bench.planner.rollout(bench.steps_in_buckets())[0], Repeater())
    return _run(bench, bench.planner.rollout(bench.steps_in_buckets())[0])


def side_stream(bench: Bench) -> Ahead:
    with bench.planner.side.enter():
        return _run(bench, bench.planner.plan_aside(bench.batch([3, 3])))


def idle(bench: Bench) -> Ahead:
    """A rank that has nothing to do."""
    return _run(bench, bench.planner.plan(bench.batch([1, 1]).idle()))


ROLLOUTS: Mapping[str, Plan] = MappingProxyType(
    {each.__name__: each for each in (draft, multi_step, multi_layer, frozen_kv, draft_capture, draft_replay)}
)
"""Sites whose plans are refused, never made again."""
SINGLE: Mapping[str, Plan] = MappingProxyType(
    {each.__name__: each for each in (verify, draft_extend, side_stream, capture, replay)}
)
"""Sites whose plans are made again where only derived state changed."""
IN_BUCKETS = ("capture", "replay", "draft_capture", "draft_replay")


class Outcome(Enum):
    """What happens to a step that was planned ahead."""

    STALE = "StalePlanError"
    REBUILT = "planned again"
    CURRENT = "runs as it is"
    REFUSED = "another PlanError"


def verdict(ahead: Ahead, planned: PlannedBatch) -> Outcome:
    """What the planner makes of a step that is about to run."""
    return outcome(replace(ahead, run=ahead.planner.ensure), planned)


def outcome(ahead: Ahead, planned: PlannedBatch) -> Outcome:
    """Runs the step, and says what the planner made of it."""
    before = ahead.planner.num_rebuilt
    try:
        found = ahead.run(planned)
    except StalePlanError:
        return Outcome.STALE
    except PlanError:
        return Outcome.REFUSED
    if isinstance(found, Tensor):
        real = sum(planned.batch.query_lens.exact())
        assert not found[:real].isnan().any(), "a token has no result"
    return Outcome.REBUILT if ahead.planner.num_rebuilt > before else Outcome.CURRENT


Change = Callable[[Ahead], PlannedBatch]


def pages_change_owner(ahead: Ahead) -> PlannedBatch:
    ahead.bench.store.trim_row(ahead.bench.rows[0], 20)
    ahead.bench.store.grow_row(ahead.bench.rows[2], 40)
    return ahead.planned


def row_closed_and_reopened(ahead: Ahead) -> PlannedBatch:
    store, row = ahead.bench.store, ahead.bench.rows[1]
    length = store.lengths.launched(row)
    store.close_row(row)
    assert store.open_row() == row
    store.grow_row(row, 24)
    store.fill_row(row, length)
    return ahead.planned


def padded(ahead: Ahead) -> PlannedBatch:
    batch = ahead.planned.batch
    return replace(ahead.planned, batch=batch.pad(batch.num_rows + 2, batch.num_tokens + 3))


def split(ahead: Ahead) -> PlannedBatch:
    return replace(ahead.planned, batch=ahead.planned.batch.split(1)[0])


def taken(ahead: Ahead) -> PlannedBatch:
    rows = [1, 0] if ahead.planned.batch.num_rows > 1 else []
    return replace(ahead.planned, batch=ahead.planned.batch.take(rows))


def turned_idle(ahead: Ahead) -> PlannedBatch:
    return replace(ahead.planned, batch=ahead.planned.batch.idle())


def buffers_filled_again(ahead: Ahead) -> PlannedBatch:
    """By whatever else plans into the same buffers."""
    batch = Batch(StepWork.of([RowWork(ahead.bench.rows[2], [4] * 5, 0, 1)]), ahead.bench.store.pools, cases.CPU)
    ahead.planner.plan(batch)
    ahead.planner.rollout(following_steps(batch, STEPS))
    return ahead.planned


def backend_replaced(ahead: Ahead) -> PlannedBatch:
    ahead.planner._bindings = ahead.bench.rig.another_planner()._bindings
    return ahead.planned


def forged(ahead: Ahead) -> PlannedBatch:
    """A copy of the plan, which the planner did not make."""
    return replace(ahead.planned, plan=replace(ahead.planned.plan))


def bucket_overwritten(ahead: Ahead) -> PlannedBatch:
    index = ahead.bench.buckets.index(ahead.planned.batch.memory)  # type: ignore[arg-type]
    ahead.bench.in_bucket([1, 1], index)
    return ahead.planned


def row_grown(ahead: Ahead) -> PlannedBatch:
    for row in ahead.bench.rows:
        ahead.bench.store.grow_row(row, 48)
    return ahead.planned
