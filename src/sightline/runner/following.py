"""A rank that follows: it carries out the orders of the leading rank, one after another.

It runs the part of a step that its replica has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from sightline.attention.planner import PlannedBatch
from sightline.cache.told import ToldCache
from sightline.core.batch import CAUSAL, Batch, MaskKind, RowMask, StepWork
from sightline.core.batch_memory import StepShape
from sightline.core.errors import RankLostError, UncapturedPlanError
from sightline.distributed.channels import OrderReceiver
from sightline.distributed.orders import (
    CopyOrder,
    MoveOrder,
    Order,
    PartOrder,
    StatesOfRow,
    StepOrder,
    StopOrder,
    TreeOfRow,
    unpacked,
)
from sightline.runner.recording import Recorder
from sightline.runner.roles import Follows
from sightline.runner.runtime import Runtime

logger = logging.getLogger("sightline")


class Follower:
    """Runs what it is told on its part of the model."""

    def __init__(self, role: Follows, runtime: Runtime, receiver: OrderReceiver, recorder: Recorder) -> None:
        """`role` is that with which the runtime was built; `recorder` records steps that the leading rank records."""
        self._runtime = runtime
        self._receiver = receiver
        self._recorder = recorder
        self._cache = ToldCache(runtime.store)
        self._pools = {pool.key: pool for pool in runtime.store.main.pools}
        self._told = role.told
        self._replica = role.links.place.replica.index
        self._number = 0

    def follow(self) -> bool:
        """Waits for an order and carries it out. Returns False behind the last one."""
        order = unpacked(self._receiver.receive(), self._number + 1)
        self._number = order.number
        return self._carry_out(order)

    def _carry_out(self, order: Order) -> bool:
        match order:
            case StepOrder():
                self._run(order)
            case CopyOrder():
                if order.replica == self._replica:
                    self._pools[order.pool].copy_page(order.source, order.target, order.num_tokens)
            case MoveOrder():
                if order.replica == self._replica:
                    self._pools[order.pool].move_entries(order.sources, order.targets)
            case StopOrder():
                return False
        return True

    def _run(self, order: StepOrder) -> None:
        runtime, batch = self._runtime, self._assemble(order.parts[self._replica], order.number)
        self._told.hear(order)
        if order.first_rows:
            runtime.runner.forward_halves(batch, runtime.plan_halves(batch, order.first_rows))
        elif order.is_captured:
            runtime.runner.capture(runtime.planner.plan(batch), self._recorder)
        elif batch.num_tokens:
            runtime.runner.forward(self._plan(batch))
        else:
            runtime.runner.forward_elsewhere(batch, (), runtime.definition.vocab_size)

    def _plan(self, batch: Batch) -> PlannedBatch:
        """The planned batch; the same one in memory of its own if its graph cannot serve the plan. The ranks exchange
        the same either way."""
        try:
            return self._runtime.planner.plan(batch)
        except UncapturedPlanError as error:
            logger.debug("a step of %d rows runs eagerly: %s", batch.num_rows, error)
        return self._runtime.planner.plan(replace(batch).pad(batch.num_rows, batch.num_tokens))

    def _assemble(self, order: PartOrder, number: int) -> Batch:
        for each in order.pages:
            self._cache.put_pages(each.pool, each.row, each.first, each.pages)
        states: Sequence[StatesOfRow | None] = order.states or [None] * len(order.rows)
        for row, context_len, told in zip(order.rows, order.context_lens, states, strict=True):
            self._cache.begin_row(row, context_len, told)
        shape, wanted = None, (order.padded_rows, order.padded_tokens)
        if order.bucket is not None:
            shape = StepShape(*order.bucket)
        try:
            batch = self._runtime.graphs.assemble_as(_work(order), shape, *wanted)
        except KeyError as error:
            raise RankLostError(f"expected a bucket of {shape} for order {number}, as on the leading rank") from error
        if (found := (batch.num_rows, batch.num_tokens)) != wanted:
            raise RankLostError(
                f"expected order {number} to be a step of {wanted[0]} rows and {wanted[1]} tokens with padding, as on "
                f"the leading rank, got {found[0]} and {found[1]} here"
            )
        return batch


def _work(order: PartOrder) -> StepWork:
    """The rows of a step. Their tokens come from the leading rank's device."""
    count = len(order.rows)
    masks, positions = [CAUSAL] * count, list[Sequence[int] | None]([None]) * count
    for tree in order.trees:
        masks[tree.index], positions[tree.index] = _mask(tree), tree.positions
    return StepWork(
        order.rows,
        [[0] * length for length in order.query_lens],
        order.context_lens,
        order.num_logits,
        masks,
        positions,
        [None] * count,
        order.num_candidates,
    )


def _mask(tree: TreeOfRow) -> RowMask:
    count = len(tree.positions)
    sees = torch.zeros(count, count, dtype=torch.bool)
    for query, seen in enumerate(tree.sees):
        sees[query, list(seen)] = True
    return RowMask(MaskKind.TREE, sees)
