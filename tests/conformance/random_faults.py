"""Wrong backends drawn at random: right, but for one effect where one or two conditions hold.

A condition is a threshold in a scale (rows, lengths, layers, ...), drawn log-uniformly over the kit's domains, or a
value of another dimension. It is evaluated on what a backend really sees of a step. An effect is one that kernels have
had: a neighbour's keys, a missed key, a stale buffer.

A fault that nobody could observe is not drawn. The rule: an effect is drawn only with conditions that leave it what it
needs (a second layer, row or key; a cache; a window; the LSE), and two conditions must be able to hold at once.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    Lse,
    StepView,
)
from sightline.attention.coverage import Demand
from sightline.attention.dimensions import (
    IN_ORDER,
    Company,
    Dimension,
    LaneUse,
    Padding,
    Point,
    Reuse,
    Sharing,
    Span,
    Value,
    can_meet,
    features_name,
    possible_span,
)
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.oracle.attention import loaded_entries, visible_keys
from sightline.attention.proof import dtype_name
from sightline.attention.workspace import MAIN_LANE
from sightline.cache.layout import Layout
from sightline.cache.pools import Pool
from sightline.core.batch import Batch, MaskKind
from sightline.core.device import Device
from sightline.testing.conformance.domains import Domains
from sightline.testing.conformance.problems import PROBLEMS
from sightline.testing.conformance.rig import Subject


class Effect(Enum):
    """What goes wrong, in the row that meets the conditions or in all of the step."""

    MISSES_ITSELF = "a query misses itself"
    MISSES_FIRST = "the first key that a query sees is dropped"
    MISSES_CONTEXT_END = "the last key of the context is dropped"
    NEIGHBOUR_LAYER = "a neighbour layer's entries are read"
    FIRST_LAYER = "the first layer's entries are read"
    FIRST_HEAD = "every head gives what the first does"
    ROW_BESIDE = "a row gives what the row beside it does"
    STALE = "the output is what the plan before gave"
    NOT_WRITTEN = "the last new entry is not written"
    SCALE_OFF = "scores are 3 % too large"
    WINDOW_OFF = "the window is one key too narrow"
    WINDOW_CUT = "the window is cut to just below its threshold"
    CONTEXT_CUT = "the context is cut at its threshold"
    LSE_OFF = "the LSE is off by 1 %"
    ZERO = "a row's output is zero"


@dataclass(frozen=True)
class Condition:
    """A threshold in a scale, or a value of another dimension."""

    dimension: Dimension
    value: Value
    at_least: bool = True
    """Of a scale: from the value on, otherwise up to it."""

    def holds(self, point: Point) -> bool:
        if self.dimension not in point:
            return False
        if not self.dimension.is_scale:
            return point[self.dimension] == self.value
        number, border = int(point[self.dimension]), int(self.value)
        return number >= border if self.at_least else number <= border

    def __str__(self) -> str:
        sign = ("≥ " if self.at_least else "≤ ") if self.dimension.is_scale else ""
        return f"{self.dimension.value} {sign}{self.value}"


@dataclass(frozen=True)
class Fault:
    """One wrong backend."""

    conditions: tuple[Condition, ...]
    effect: Effect

    def holds(self, point: Point) -> bool:
        return all(condition.holds(point) for condition in self.conditions)

    def of(self, dimension: Dimension) -> Condition | None:
        return next((condition for condition in self.conditions if condition.dimension is dimension), None)

    def __str__(self) -> str:
        return f"{self.effect.value} where {' and '.join(map(str, self.conditions))}"

    def demand(self) -> Demand:
        """The least that an engine asks for that meets the fault: both thresholds, and nothing else."""
        scales = {
            each.dimension: Span(int(each.value), int(each.value))
            for each in self.conditions
            if each.dimension.is_scale
        }
        values = {each.dimension: frozenset({each.value}) for each in self.conditions if not each.dimension.is_scale}
        return Demand(scales, values)


_LENGTHS = (Dimension.CONTEXT, Dimension.NEW_TOKENS)


def draw_fault(domains: Domains, draw: random.Random) -> Fault:
    """A fault that can be observed."""
    while True:
        conditions = tuple(_condition(domains, draw) for _ in range(draw.choice((1, 2, 2))))
        fault = Fault(conditions, draw.choice(list(Effect)))
        if len({each.dimension for each in conditions}) == len(conditions) and _is_observable(fault, domains):
            return fault


def _condition(domains: Domains, draw: random.Random) -> Condition:
    varied = [dimension for dimension, values in domains.values.items() if len(values) > 1]
    scales = [dimension for dimension, span in domains.scales.items() if span.low < span.high]
    # Lengths and sizes are where kernels switch: they are drawn twice as often.
    dimension = draw.choice([*varied, *scales, *scales])
    if not dimension.is_scale:
        return Condition(dimension, draw.choice(domains.values[dimension]))
    span = domains.scales[dimension]
    low, high = math.log(span.low + 1), math.log(span.high + 1)
    border = min(max(round(math.exp(draw.uniform(low, high))) - 1, span.low), span.high)
    return Condition(dimension, border, draw.random() < 0.7)


def _most(fault: Fault, dimension: Dimension) -> float:
    """The largest value of a scale that the conditions allow."""
    condition = fault.of(dimension)
    return math.inf if condition is None or condition.at_least else int(condition.value)


def _needs(fault: Fault, dimension: Dimension, *values: Value) -> bool:
    """False where a condition asks for another value than these."""
    condition = fault.of(dimension)
    return condition is None or condition.value in values


def _is_observable(fault: Fault, domains: Domains) -> bool:
    keys = _most(fault, Dimension.CONTEXT) + _most(fault, Dimension.NEW_TOKENS)
    if not _needs(fault, Dimension.POLICY, CachePolicy.PAGED.value):
        keys = _most(fault, Dimension.NEW_TOKENS)
    keys = min(keys, _most(fault, Dimension.WINDOW))
    is_paged = _needs(fault, Dimension.POLICY, CachePolicy.PAGED.value)
    able = {
        Effect.MISSES_ITSELF: keys >= 3,
        Effect.MISSES_FIRST: keys >= 3,
        Effect.SCALE_OFF: keys >= 3,
        Effect.MISSES_CONTEXT_END: is_paged
        and _most(fault, Dimension.CONTEXT) >= 1
        and _most(fault, Dimension.WINDOW) > 1,
        Effect.NEIGHBOUR_LAYER: is_paged and _most(fault, Dimension.LAYERS) >= 2,
        Effect.FIRST_LAYER: is_paged and _most(fault, Dimension.LAYERS) >= 2,
        Effect.FIRST_HEAD: _most(fault, Dimension.KEY_HEADS) >= 2
        and (fault.of(Dimension.GROUP_SIZE) or Condition(Dimension.GROUP_SIZE, 2)).value != 1,
        Effect.ROW_BESIDE: _most(fault, Dimension.ROWS) >= 2
        and _most(fault, Dimension.STEP_TOKENS) >= 2
        and _needs(fault, Dimension.COMPANY, Company.SHORTER.value, Company.SAME.value),
        Effect.STALE: True,
        Effect.NOT_WRITTEN: is_paged,
        Effect.WINDOW_OFF: (window := fault.of(Dimension.WINDOW)) is not None
        and sum(min(_most(fault, each), domains.scales[each].high) for each in _LENGTHS) > int(window.value) + 1
        and _most(fault, Dimension.WINDOW) > 1
        and is_paged,
        Effect.WINDOW_CUT: window is not None
        and window.at_least
        and is_paged
        and _most(fault, Dimension.CONTEXT) > int(window.value),
        Effect.CONTEXT_CUT: (context := fault.of(Dimension.CONTEXT)) is not None
        and context.at_least
        and is_paged
        and _most(fault, Dimension.WINDOW) > 1,
        Effect.LSE_OFF: (features := fault.of(Dimension.FEATURES)) is not None
        and Feature.LSE.value in str(features.value),
        Effect.ZERO: True,
    }
    return able[fault.effect] and _can_hold(fault, domains)


def _can_hold(fault: Fault, domains: Domains) -> bool:
    """Whether some step meets all conditions."""
    ends = [(each.dimension, each.value) for each in fault.conditions]
    values = [end for end in ends if not end[0].is_scale]
    if len(values) == 2 and not can_meet(*values):
        return False
    for value in values:
        for condition in fault.conditions:
            if condition.dimension.is_scale:
                within = possible_span(*value, condition.dimension, domains.scales)
                if within is None or not _reaches(condition, within):
                    return False
                needs_pages = (Dimension.SHARING, Sharing.PREFIX.value) == value or (
                    value[0] is Dimension.PAGE_ORDER and value[1] != IN_ORDER
                )
                # Whole pages of a context: how many tokens these are is the page size's matter.
                if needs_pages and condition.dimension is Dimension.CONTEXT and not condition.at_least:
                    return False
    return _numbers_fit(fault, domains)


def _reaches(condition: Condition, span: Span) -> bool:
    return span.high >= int(condition.value) if condition.at_least else span.low <= int(condition.value)


def _numbers_fit(fault: Fault, domains: Domains) -> bool:
    """A step has as many tokens as rows and as any row, and a pool holds what rows hold."""
    least = {each.dimension: int(each.value) for each in fault.conditions if each.dimension.is_scale and each.at_least}
    most = {
        each.dimension: int(each.value) for each in fault.conditions if each.dimension.is_scale and not each.at_least
    }
    tokens = most.get(Dimension.STEP_TOKENS, 10**9)
    pool = most.get(Dimension.POOL_SLOTS, 10**9)
    inner = (Dimension.ROWS, Dimension.NEW_TOKENS)
    rows, new = (most.get(each, domains.scales[each].high) for each in inner)
    return (
        all(least.get(each, 0) <= tokens for each in inner)
        and all(2 * least.get(each, 0) <= pool for each in (*inner, Dimension.CONTEXT, Dimension.STEP_TOKENS))
        and least.get(Dimension.STEP_TOKENS, 0) <= rows * new
    )


def seen_point(step: StepView, context: BackendContext[Any], pool: Pool, past: _Past) -> Point:
    """The dimensions of a step as a backend sees them."""
    batch, spec = step.batch, context.spec
    queries = [length for length in batch.query_lens.exact() if length]
    contexts = [length for length, new in zip(batch.context_lens.exact(), batch.query_lens.exact(), strict=True) if new]
    lengths = set(zip(contexts, queries, strict=True))
    features = {feature.value for feature in spec.features} | ({Feature.LSE.value} & {f.value for f in step.needs})
    masks = {mask.kind for mask, new in zip(batch.masks, batch.query_lens.exact(), strict=True) if new}
    point: dict[Dimension, Value] = {
        Dimension.ROWS: len(queries),
        Dimension.NEW_TOKENS: max(queries, default=0),
        Dimension.CONTEXT: max(contexts, default=0),
        Dimension.STEP_TOKENS: sum(queries),
        Dimension.LAYERS: pool.spec.num_layers,
        Dimension.KEY_HEADS: getattr(spec, "num_kv_heads", 1),
        Dimension.KIND: spec.kind.value,
        Dimension.GROUP_SIZE: spec.group_size,
        Dimension.HEAD_DIM: spec.head_dim,
        Dimension.PAGE_SIZE: pool.page_size,
        Dimension.DTYPE: dtype_name(context.dtype),
        Dimension.CACHE_DTYPE: dtype_name(pool.spec.planes[0].dtype),
        Dimension.FEATURES: features_name(features),
        Dimension.MASK: next((m.value for m in (MaskKind.TREE, MaskKind.FULL) if m in masks), MaskKind.CAUSAL.value),
        Dimension.POLICY: step.policy.value,
        Dimension.SHARING: _sharing(batch, pool),
        Dimension.PAGE_ORDER: _page_order(batch, pool, contexts, queries),
        Dimension.PADDING: Padding.PADDED.value if batch.num_tokens > sum(queries) else Padding.NONE.value,
        Dimension.REUSE: past.reuse(batch),
        Dimension.COMPANY: Company.ALONE.value
        if len(queries) == 1
        else Company.SAME.value
        if len(lengths) == 1
        else Company.SHORTER.value,
        Dimension.LANE: LaneUse.MAIN.value if step.lane == MAIN_LANE else LaneUse.SECOND.value,
    }
    point[Dimension.POOL_SLOTS] = pool.plane(pool.spec.planes[0].name).shape[1]
    if spec.window is not None:
        point[Dimension.WINDOW] = spec.window
    if spec.kind is SpecKind.LATENT:
        point[Dimension.TOP_K] = spec.top_k or 0
    return point


def _sharing(batch: Batch, pool: Pool) -> str:
    if not batch.pools:
        return Sharing.NONE.value
    pages = [page for row in set(batch.rows) if row for page in pool.table.owned(row)]
    return Sharing.PREFIX.value if len(set(pages)) < len(pages) else Sharing.NONE.value


def _page_order(batch: Batch, pool: Pool, contexts: Sequence[int], queries: Sequence[int]) -> str:
    if not batch.pools or not queries:
        return IN_ORDER
    rows = [row for row, new in zip(batch.rows, batch.query_lens.exact(), strict=True) if new]
    lengths = [context + new for context, new in zip(contexts, queries, strict=True)]
    used = -(-max(lengths) // pool.page_size)
    orders = {
        _order_of(pool.table.owned(row)[:used])
        for row, length in zip(rows, lengths, strict=True)
        if length == max(lengths)
    }
    # Of several that are longest, a row that shares another's pages has its own elsewhere.
    return min(orders, key=[IN_ORDER, Layout.DESCENDING.value, Layout.SHUFFLED.value].index)


def _order_of(pages: Sequence[int]) -> str:
    steps = {after - before for before, after in itertools.pairwise(pages)}
    if len(pages) < 3 or steps == {1}:
        return IN_ORDER
    return Layout.DESCENDING.value if steps == {-1} else Layout.SHUFFLED.value


class _Past:
    """What a backend has planned before."""

    def __init__(self) -> None:
        self._batches: set[int] = set()
        self._ends: dict[int, int] = {}

    def reuse(self, batch: Batch) -> str:
        if batch.batch_id in self._batches:
            return Reuse.AGAIN.value
        goes_on = any(
            self._ends.get(row) == length for row, length in zip(batch.rows, batch.context_lens.exact(), strict=True)
        )
        if goes_on and batch.pools:
            return Reuse.GOES_ON.value
        return Reuse.AFTER_OTHERS.value if self._batches else Reuse.FIRST.value

    def add(self, batch: Batch) -> None:
        self._batches.add(batch.batch_id)
        lengths = zip(batch.context_lens.exact(), batch.query_lens.exact(), strict=True)
        for row, (context, new) in zip(batch.rows, lengths, strict=True):
            if row and new:
                self._ends[row] = context + new


@dataclass(eq=False)
class _FaultyPlan(AttentionPlan[Any]):
    inner: AttentionPlan[Any]
    fault: Fault
    context: BackendContext[Any]
    pool: Pool
    step: StepView
    point: Point
    outputs: dict[int, Tensor]
    """By layer, of the plan that ran before."""

    def prepare(self) -> None:
        self.inner.prepare()

    def run(self, layer: int, inputs: Any, out: Tensor) -> Lse | None:
        layers = self.fault.of(Dimension.LAYERS)
        applies = self.fault.holds(self.point) and self.step.batch.num_tokens > 0
        if layers is not None and layers.at_least:
            applies = applies and layer + 1 >= int(layers.value)
        applies = applies and self._has_what_it_takes()
        problem = PROBLEMS[self.context.spec.kind]
        given = inputs
        if applies and self.fault.effect is Effect.SCALE_OFF:
            names = ("q",) if self.context.spec.kind is SpecKind.SOFTMAX else ("q_nope", "q_rope")
            given = replace(inputs, **{name: (vars(inputs)[name].float() * 1.03).to(out.dtype) for name in names})
        before = self._last_entry(layer) if applies and self.fault.effect is Effect.NOT_WRITTEN else None
        lse = self.inner.run(layer, given, out)
        if applies:
            if before is not None:
                self._restore(layer, before)
            elif lse is not None and self.fault.effect is Effect.LSE_OFF:
                lse.mul_(1.01)
            else:
                self._spoil(layer, inputs, out, problem)
        self.outputs[layer] = out.clone()
        return lse

    def _has_what_it_takes(self) -> bool:
        """A cache to read or write, a row beside, a second layer."""
        is_paged = self.step.policy is CachePolicy.PAGED
        match self.fault.effect:
            case Effect.NOT_WRITTEN:
                return is_paged
            case Effect.ROW_BESIDE:
                return int(self.point[Dimension.ROWS]) > 1
            case Effect.NEIGHBOUR_LAYER | Effect.FIRST_LAYER:
                return is_paged and self.pool.spec.num_layers > 1
            case _:
                return True

    def _row(self) -> tuple[int, int, int, slice]:
        """The longest row: its place, context, new tokens, and tokens."""
        batch = self.step.batch
        queries, contexts = batch.query_lens.exact(), batch.context_lens.exact()
        row = max(range(len(queries)), key=lambda place: (queries[place] > 0, queries[place] + contexts[place]))
        start = sum(queries[:row])
        return row, contexts[row], queries[row], slice(start, start + queries[row])

    def _slots(self, row: int, length: int) -> list[int]:
        pages, size = self.pool.table.owned(self.step.batch.rows[row]), self.pool.page_size
        return [pages[entry // size] * size + entry % size for entry in range(length)]

    def _last_entry(self, layer: int) -> list[Tensor]:
        row, context, new, _ = self._row()
        slot = self._slots(row, context + new)[-1]
        return [self.pool.plane(plane.name)[layer, slot].clone() for plane in self.pool.spec.planes]

    def _restore(self, layer: int, before: Sequence[Tensor]) -> None:
        row, context, new, _ = self._row()
        slot = self._slots(row, context + new)[-1]
        for plane, values in zip(self.pool.spec.planes, before, strict=True):
            self.pool.plane(plane.name)[layer, slot] = values

    def _spoil(self, layer: int, inputs: Any, out: Tensor, problem: Any) -> None:
        row, _, _, tokens = self._row()
        match self.fault.effect:
            case Effect.ZERO:
                out[tokens] = 0.0
            case Effect.FIRST_HEAD:
                out[tokens] = out[tokens, :1].clone()
            case Effect.ROW_BESIDE:
                other = tokens.stop if tokens.start == 0 else tokens.start - 1
                out[tokens] = out[other : other + 1].clone()
            case Effect.STALE:
                old = self.outputs.get(layer, torch.zeros_like(out))
                count = min(len(old), tokens.stop - tokens.start)
                out[tokens.start : tokens.start + count] = old[:count].nan_to_num()
            case _:
                out[tokens.stop - 1] = self._recomputed(layer, inputs, row, tokens, problem)

    def _recomputed(self, layer: int, inputs: Any, row: int, tokens: slice, problem: Any) -> Tensor:
        """The last query of a row, computed wrongly."""
        batch, spec, effect = self.step.batch, self.context.spec, self.fault.effect
        context, new = batch.context_lens.exact()[row], batch.query_lens.exact()[row]
        if effect is Effect.WINDOW_OFF:
            spec = replace(spec, window=spec.window - 1)
        if effect is Effect.WINDOW_CUT:
            spec = replace(spec, window=max(1, self._border(Dimension.WINDOW) - 1))
        visible = visible_keys(spec, batch.masks[row], context, batch.positions[tokens], [new - 1])
        match effect:
            case Effect.MISSES_ITSELF:
                visible[0, context + new - 1] = False
            case Effect.MISSES_FIRST:
                visible[0, int(visible[0].nonzero()[0])] = False
            case Effect.MISSES_CONTEXT_END if context:
                visible[0, context - 1] = False
            case Effect.CONTEXT_CUT:
                visible[0, self._border(Dimension.CONTEXT) - 1 : context] = False
            case _:
                pass
        read = layer
        if effect is Effect.NEIGHBOUR_LAYER:
            read = layer - 1 if layer else min(1, self.pool.spec.num_layers - 1)
        if effect is Effect.FIRST_LAYER:
            read = 0
        entries, query = self._entries(read, inputs, row, tokens, problem), torch.tensor([tokens.stop - 1])
        answer: Tensor = problem.answer(self.context.spec, inputs, query, entries, visible)[0]
        return answer[0].nan_to_num(7.0).to(self.context.dtype)

    def _border(self, dimension: Dimension) -> int:
        condition = self.fault.of(dimension)
        assert condition is not None
        return max(1, int(condition.value))

    def _entries(self, layer: int, inputs: Any, row: int, tokens: slice, problem: Any) -> tuple[Tensor, ...]:
        if self.step.policy is CachePolicy.TRANSIENT:
            return tuple(plane[tokens] for plane in problem.entries(inputs))
        length = self.step.batch.context_lens.exact()[row] + self.step.batch.query_lens.exact()[row]
        slots = self._slots(row, length)
        return tuple(
            loaded_entries(self.pool.plane(plane.name)[layer][slots], self.pool.scales(plane.name)[layer])
            for plane in self.pool.spec.planes
        )


BASES: Mapping[SpecKind, type[AttentionBackend[Any, Any]]] = {
    SpecKind.SOFTMAX: TorchBackend,
    SpecKind.LATENT: TorchLatentBackend,
}


def faulty_backend(fault: Fault, kind: SpecKind = SpecKind.SOFTMAX) -> type[AttentionBackend[Any, Any]]:
    """A correct backend with the fault."""
    base: Callable[..., Any] = BASES[kind]

    class Faulty(AttentionBackend[Any, Any]):
        capabilities: ClassVar[tuple[Capability, ...]] = BASES[kind].capabilities

        def __init__(self, context: BackendContext[Any]) -> None:
            self._inner = base(context)
            self._context = context
            self._past = _Past()
            self._outputs: dict[int, Tensor] = {}
            [self._pool] = context.cache.pools.values()

        def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[Any]:
            point = seen_point(step, self._context, self._pool, self._past)
            self._past.add(step.batch)
            inner = self._inner.plan(step, buffers)
            return _FaultyPlan(inner, fault, self._context, self._pool, step, point, self._outputs)

    return Faulty


def subject_of(fault: Fault, device: Device, kind: SpecKind = SpecKind.SOFTMAX) -> Subject:
    """The faulty backend's row in float32."""
    [row] = [row for row in BASES[kind].capabilities if torch.float32 in row.dtypes]
    return Subject(str(fault), faulty_backend(fault, kind), row, device)
