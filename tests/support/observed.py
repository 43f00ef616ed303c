"""What a running engine really asks of its backends: a point for each row of each step that is planned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sightline.attention.bindings import MASK_FEATURES
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Work, decode_work
from sightline.attention.contract import BackendContext, StepView
from sightline.attention.coverage import Demand
from sightline.attention.dimensions import (
    Company,
    Dimension,
    LaneUse,
    Padding,
    Point,
    Reuse,
    Sharing,
    Value,
    features_name,
)
from sightline.attention.proof import dtype_name
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE
from support.recording_backend import RecordingBackend, _RecordingPlan


@dataclass(frozen=True)
class Observed:
    """One row of one step, or of the part of a step that a backend was given."""

    group: str
    work: Work
    point: Point


class ObservingBackend(RecordingBackend):
    """Notes what each plan is asked for, when it is asked: pages move afterwards."""

    seen: list[Observed]
    """Of all instances of a class: set it on a class of one's own."""

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        super().__init__(context)
        self._plans = 0
        self._ends: dict[int, int] = {}
        """By page-table row: the length after the step that was planned last."""

    def plan(self, step: StepView, buffers: PlanBuffers) -> _RecordingPlan:
        decodes = step.batch.pools and step.batch.num_decoding() == step.batch.num_rows
        work = decode_work(step.batch.num_rows) if decodes else Work.PREFILL
        group = self.context.group.split(".")[0]
        for row in range(step.batch.num_rows):
            self.seen.append(Observed(group, work, self._point(step, row)))
        self._plans += 1
        queries, contexts = step.batch.query_lens.exact(), step.batch.context_lens.exact()
        self._ends = {
            row: query + context for row, query, context in zip(step.batch.rows, queries, contexts, strict=True)
        }
        return super().plan(step, buffers)

    def _point(self, step: StepView, row: int) -> Point:
        batch, spec = step.batch, self.context.spec
        queries, contexts = batch.query_lens.exact(), batch.context_lens.exact()
        [pool] = self.context.cache.pools.values()
        goes_on = bool(batch.pools) and self._ends.get(batch.rows[row]) == contexts[row] > 0
        point: dict[Dimension, Value] = {
            Dimension.ROWS: batch.num_rows,
            Dimension.NEW_TOKENS: queries[row],
            Dimension.CONTEXT: contexts[row],
            Dimension.STEP_TOKENS: batch.num_tokens,
            Dimension.LAYERS: pool.spec.num_layers,
            Dimension.KEY_HEADS: spec.num_kv_heads,
            Dimension.KIND: spec.kind.value,
            Dimension.GROUP_SIZE: spec.group_size,
            Dimension.HEAD_DIM: spec.head_dim,
            Dimension.DTYPE: dtype_name(self.context.dtype),
            Dimension.FEATURES: features_name(
                feature.value for feature in spec.features | (step.needs - set(MASK_FEATURES.values()))
            ),
            Dimension.MASK: batch.masks[row].kind.value,
            Dimension.POLICY: step.policy.value,
            Dimension.PADDING: _padding(queries, batch.num_tokens),
            Dimension.REUSE: _reuse(self._plans, goes_on=goes_on),
            Dimension.COMPANY: _company(list(zip(queries, contexts, strict=True))),
            Dimension.LANE: (LaneUse.MAIN if step.lane == MAIN_LANE else LaneUse.SECOND).value,
        }
        if spec.window is not None:
            point[Dimension.WINDOW] = spec.window
        if batch.pools:
            pages = [pool.table.owned(table_row) for table_row in batch.rows]
            point |= {
                Dimension.POOL_SLOTS: pool.plane("k").shape[1],
                Dimension.PAGE_SIZE: pool.page_size,
                Dimension.CACHE_DTYPE: dtype_name(pool.plane("k").dtype),
                Dimension.PAGE_ORDER: _order(pages[row]),
                Dimension.SHARING: _sharing(pages, row),
            }
        return point


def holds(demand: Demand, point: Point) -> bool:
    """True if the point has the dimensions of the demand, and lies within it in each."""
    return (
        point.keys() == {*demand.scales, *demand.values}
        and all(point[dimension] in values for dimension, values in demand.values.items())
        and all(span.low <= int(point[dimension]) <= span.high for dimension, span in demand.scales.items())
    )


def _padding(queries: Sequence[int], num_tokens: int) -> str:
    return str((Padding.NONE if min(queries) > 0 and sum(queries) == num_tokens else Padding.PADDED).value)


def _reuse(num_plans: int, *, goes_on: bool) -> str:
    if goes_on:
        return Reuse.GOES_ON.value
    return str((Reuse.AFTER_OTHERS if num_plans else Reuse.FIRST).value)


def _company(lengths: Sequence[tuple[int, int]]) -> str:
    if len(lengths) == 1:
        return Company.ALONE.value
    return str((Company.SAME if len(set(lengths)) == 1 else Company.SHORTER).value)


def _order(pages: Sequence[int]) -> str:
    steps = {after - before for before, after in itertools.pairwise(pages)}
    if len(pages) <= 2 or steps == {1}:
        return "in order"
    return "descending" if steps == {-1} else "shuffled"


def _sharing(pages: Sequence[Sequence[int]], row: int) -> str:
    others = {page for other, owned in enumerate(pages) if other != row for page in owned}
    return str((Sharing.PREFIX if others & set(pages[row]) else Sharing.NONE).value)
