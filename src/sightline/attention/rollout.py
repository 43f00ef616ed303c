"""Rollouts: the steps of a draft, planned at once, before the first of them runs.

    lane 0   plan buffers     | the last plan |                        plans of single steps
             leased sets      | step 0 | step 1 | step 2 | free |      plans of one rollout

A plan of a rollout must stay as it is until its step has run, so each has a set of plan buffers of its own. The sets
are counted before the first step and leased to one rollout at a time: the next rollout of the lane, or a release, makes
the plans of the one before stale. Such a plan is never made again, because the steps before it have run.

Knows sets of plan buffers. Does not know what fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from sightline.attention.buffers import PlanMemory
from sightline.core.batch import CAUSAL, CONTEXT, Batch, StepWork
from sightline.core.errors import PlanError

REPEAT_ROLLOUT = "Plan the steps that are left again, as a new rollout."


class Renewal(Enum):
    """What happens to a plan whose derived state has changed."""

    PLAN_AGAIN = "plan again"
    REFUSE = "refuse"
    """The plan is a step of a rollout."""


class LeasedSets:
    """The sets of plan buffers of one lane that rollouts lease."""

    def __init__(self, sets: Sequence[PlanMemory]) -> None:
        self._sets = tuple(sets)
        self._held: list[PlanMemory] = []
        """Memory of the current rollout's plans."""

    def lease(self, fixed: Sequence[PlanMemory | None]) -> tuple[PlanMemory, ...]:
        """Plan buffers for each step of a new rollout: `fixed`, if its batch has its own, otherwise a leased set."""
        self.release()
        num_leased = fixed.count(None)
        if num_leased > len(self._sets):
            raise PlanError(
                f"expected a rollout of at most {len(self._sets)} steps, as many as there are sets of plan buffers, "
                f"got {num_leased}; raise `StepLimits.max_rollout`, or draft fewer tokens"
            )
        free = iter(self._sets)
        self._held[:] = [next(free) if memory is None else memory for memory in fixed]
        return tuple(self._held)

    def release(self) -> None:
        """Ends the current rollout: its plans become stale."""
        for memory in self._held:
            memory.begin()
        self._held.clear()


def following_steps(first: Batch, steps: int) -> tuple[Batch, ...]:
    """Returns the batches of a rollout of `steps` steps; `first` is the first of them.

    Each later step has the same rows, with one new token that the step before it chooses from its logits, one per row.
    Rows under a CONTEXT mask keep no entries: all their steps are at the same position. The others must have pages for
    all steps.
    """
    batches, work = [first], first.work
    for _ in range(1, steps):
        count, frozen = len(work), [mask is CONTEXT for mask in work.masks]
        lens = zip(work.context_lens, work.query_lens, frozen, strict=True)
        contexts = [context if stays else context + new for context, new, stays in lens]
        work = StepWork(
            table_rows=work.table_rows,
            tokens=((),) * count,
            context_lens=contexts,
            num_logits=(1,) * count,
            masks=[CONTEXT if stays else CAUSAL for stays in frozen],
            positions=(None,) * count,
            unread=range(count),
            num_candidates=(1,) * count,
        )
        batches.append(Batch(work, first.sources, first.device, awaited=count))
    return tuple(batches)
