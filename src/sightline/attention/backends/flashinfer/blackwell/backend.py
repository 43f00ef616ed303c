"""Softmax attention with TRT-LLM's kernels for Blackwell, reached through FlashInfer.

    rows of at most one new token     the decode kernel, one launch, which can be captured
    others                            the context kernel, one launch per mask: prefill, and what a drafter reads of the
                                      tokens that were accepted

Both read pages. A step without a cache copies its keys and values into pages of its own first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from torch import Tensor

from sightline.attention.backends.flashinfer.blackwell.memory import WORKSPACE_BYTES, LaunchMemory, lease_launches
from sightline.attention.backends.flashinfer.blackwell.rows import ROWS
from sightline.attention.backends.flashinfer.plans import window_left
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    Lse,
    SoftmaxInputs,
    StepView,
)
from sightline.attention.shared.page_rows import PageRows, TokenQueries, filled
from sightline.attention.shared.step_tokens import StepTokens, spread_runs
from sightline.attention.shared.tiles import RowSpan, row_spans
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import Lane
from sightline.core.batch import PADDING_SLOT, MaskKind
from sightline.kernels.triton.write import write_keys_values


class _Planes(NamedTuple):
    """Keys and values of one layer."""

    keys: Tensor
    """[num_slots, kv_heads, head_dim]."""
    values: Tensor
    """[num_slots, kv_heads, head_dim]."""
    page_size: int

    def paged(self) -> tuple[Tensor, Tensor]:
        """Both as [num_pages, page_size, kv_heads, head_dim]."""
        shape = (-1, self.page_size, *self.keys.shape[1:])
        return self.keys.view(shape), self.values.view(shape)


class _Memory(NamedTuple):
    """A lane's leases."""

    decode: LaunchMemory
    context: LaunchMemory
    found: Tensor
    """[max_step_tokens, heads, head_dim]: the result of a launch."""
    own: _Planes
    """Pages for the keys and values of a step without a cache."""


class _Decode(NamedTuple):
    """Rows of one new token each, then padding."""

    rows: PageRows
    is_real: Tensor
    """[num_rows, 1, 1] bool."""

    def __call__(self, spec: SoftmaxSpec, q: Tensor, planes: _Planes, memory: _Memory, out: Tensor) -> None:
        count = len(self.rows.lens)
        found = memory.found[:count]
        trtllm_batch_decode_with_kv_cache(
            query=q[:count],
            kv_cache=planes.paged(),
            workspace_buffer=memory.decode.workspace,
            block_tables=self.rows.pages,
            seq_lens=self.rows.lens,
            max_seq_len=self.rows.longest,
            bmm1_scale=spec.scale,
            bmm2_scale=1.0,
            window_left=window_left(spec),
            out=found,
            kv_layout="NHD",
            backend="trtllm-gen",
            multi_ctas_kv_counter_buffer=memory.decode.counters,
        )
        # The output of padding tokens stays as it is.
        torch.where(self.is_real, found, out[:count], out=out[:count])


class _Context(NamedTuple):
    """Rows of any number of new tokens that have the same mask."""

    rows: PageRows
    tokens: StepTokens
    query_offsets: Tensor
    """[num_rows + 1] int32."""
    key_offsets: Tensor
    """[num_rows + 1] int32."""
    longest_query: int
    causal: bool

    def __call__(self, spec: SoftmaxSpec, q: Tensor, planes: _Planes, memory: _Memory, out: Tensor) -> None:
        in_place = self.tokens.side_by_side
        found = memory.found[: self.tokens.count] if in_place is None else out[in_place]
        trtllm_batch_context_with_kv_cache(
            query=self.tokens.of(q),
            kv_cache=planes.paged(),
            workspace_buffer=memory.context.workspace,
            block_tables=self.rows.pages,
            seq_lens=self.rows.lens,
            max_q_len=self.longest_query,
            max_kv_len=self.rows.longest,
            bmm1_scale=spec.scale,
            bmm2_scale=1.0,
            batch_size=len(self.rows.lens),
            cum_seq_lens_q=self.query_offsets,
            cum_seq_lens_kv=self.key_offsets,
            window_left=window_left(spec),
            out=found,
            kv_layout="NHD",
            causal=self.causal,
            multi_ctas_kv_counter_buffer=memory.context.counters,
        )
        if in_place is None:
            self.tokens.put(out, found)


@dataclass(frozen=True, eq=False)
class _TrtllmPlan(AttentionPlan[SoftmaxInputs]):
    spec: SoftmaxSpec
    planes: tuple[_Planes, ...]
    """Per layer; under `TRANSIENT` the same pages of the lane for all."""
    write_slots: Tensor
    """[num_tokens] int64."""
    memory: _Memory
    calls: tuple[_Decode | _Context, ...]

    def prepare(self) -> None:
        """Nothing to do: `plan` fills the buffers."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        planes = self.planes[layer]
        write_keys_values(inputs.k, inputs.v, planes.keys, planes.values, self.write_slots)
        for call in self.calls:
            call(self.spec, inputs.q, planes, self.memory, out)
        return None


class TrtllmBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """TRT-LLM's attention for NVIDIA Blackwell, compute capabilities 10.0 and 10.3."""

    capabilities: ClassVar[tuple[Capability, ...]] = ROWS
    workspace_bytes: ClassVar[int] = WORKSPACE_BYTES

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._spec = context.spec
        self._pool = pool = context.cache.pools["kv"]
        self._limits = context.limits
        self._planes = tuple(
            _Planes(keys, values, pool.page_size) for keys, values in zip(pool.plane("k"), pool.plane("v"), strict=True)
        )
        self._memory = {lane: self._lease(context, lane) for lane in context.limits.lanes}

    def _lease(self, context: BackendContext[SoftmaxSpec], lane: Lane) -> _Memory:
        spec, limits, page_size = context.spec, context.limits, self._pool.page_size

        def scratch(name: str) -> LaunchMemory:
            return lease_launches(
                context,
                lane,
                f"trtllm {name}",
                num_bytes=self.workspace_bytes,
                num_queries=limits.max_rows,
                num_heads=spec.num_q_heads,
            )

        def lease(name: str, *shape: int, zeroed: bool = False) -> Tensor:
            return context.workspace.lease(context.group, f"trtllm {name}", lane, shape, context.dtype, zeroed=zeroed)

        # The padding page, and for each row pages of which the last may be partly empty.
        slots = (1 + limits.max_rows + limits.max_step_tokens // page_size) * page_size
        heads = (spec.num_kv_heads, spec.head_dim)
        return _Memory(
            scratch("decode"),
            scratch("context"),
            lease("found", max(limits.max_step_tokens, limits.max_rows), spec.num_q_heads, spec.head_dim),
            # Zeroed, so that what lies behind a row's last key is finite.
            _Planes(lease("keys", slots, *heads, zeroed=True), lease("values", slots, *heads, zeroed=True), page_size),
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> _TrtllmPlan:
        memory, batch = self._memory[step.lane], step.batch
        calls: list[_Decode | _Context] = []
        slots = step.write_slots(self._pool)
        if slots is None:
            return self._plan_transient(step, memory, buffers)
        if batch.num_rows and batch.num_tokens and max(batch.query_lens.bound) <= 1:
            calls = [self._plan_decode(step, buffers)]
        elif batch.num_rows:
            for causal, spans in _by_mask(row_spans(batch, None)):
                name = "causal" if causal else "full"
                lens = [span.context_len + span.query_len for span in spans]
                table_rows = [batch.rows[span.row] for span in spans]
                rows = PageRows.planned(name, self._pool, table_rows, lens, max(lens), buffers)
                calls.append(_planned_context(name, spans, rows, lens, buffers, causal=causal))
        return _TrtllmPlan(self._spec, self._planes, slots, memory, tuple(calls))

    def _plan_decode(self, step: StepView, buffers: PlanBuffers) -> _Decode:
        decode = TokenQueries.of(step.batch)
        rows = PageRows.planned("decode", self._pool, decode.table_rows, decode.lens, self._limits.max_seq_len, buffers)
        is_real = buffers.take("decode.real", (len(decode.lens), 1, 1), torch.bool)
        is_real.fill_(False)
        is_real[: decode.num_real] = True
        return _Decode(rows, is_real)

    def _plan_transient(self, step: StepView, memory: _Memory, buffers: PlanBuffers) -> _TrtllmPlan:
        """Puts the keys and values of each row into pages of the lane's own, row after row."""
        spans, page_size = row_spans(step.batch, None), self._pool.page_size
        ends = list(accumulate((self._num_pages(span.query_len) for span in spans), initial=1))
        first_pages = dict(zip(spans, ends[:-1], strict=True))
        runs = [slice(first * page_size, first * page_size + span.query_len) for span, first in first_pages.items()]
        slots = buffers.take("own.slots", (step.batch.num_tokens,), torch.int64)
        slots.fill_(PADDING_SLOT)
        slots[: sum(span.query_len for span in spans)] = spread_runs(runs, [0] * len(runs), slots.device)[1]
        calls = []
        for causal, chosen in _by_mask(spans):
            name = "own causal" if causal else "own full"
            lens = [span.query_len for span in chosen]
            firsts = torch.tensor([first_pages[span] for span in chosen], dtype=torch.int32)
            pages = buffers.take(f"{name}.pages", (len(chosen), self._num_pages(max(lens))), torch.int32)
            following = firsts.unsqueeze(1) + torch.arange(pages.shape[1], dtype=torch.int32)
            # Behind a row's own pages are those of later rows, which its length hides.
            pages.copy_(following.clamp(max=ends[-1] - 1), non_blocking=True)
            rows = PageRows(pages, filled(f"{name}.lens", lens, buffers), max(lens))
            calls.append(_planned_context(name, chosen, rows, lens, buffers, causal=causal))
        return _TrtllmPlan(self._spec, (memory.own,) * len(self._planes), slots, memory, tuple(calls))

    def _num_pages(self, num_entries: int) -> int:
        return -(-num_entries // self._pool.page_size)


def _by_mask(spans: Sequence[RowSpan]) -> list[tuple[bool, list[RowSpan]]]:
    """The rows under a causal mask and those that see all, as far as there are any."""
    split = [(causal, [span for span in spans if (span.kind is MaskKind.CAUSAL) == causal]) for causal in (True, False)]
    return [(causal, chosen) for causal, chosen in split if chosen]


def _planned_context(
    name: str, spans: Sequence[RowSpan], rows: PageRows, lens: Sequence[int], buffers: PlanBuffers, *, causal: bool
) -> _Context:
    queries = [span.query_len for span in spans]
    runs = [slice(span.first_token, span.first_token + span.query_len) for span in spans]
    return _Context(
        rows,
        StepTokens.planned(name, runs, buffers),
        filled(f"{name}.query offsets", list(accumulate(queries, initial=0)), buffers),
        filled(f"{name}.key offsets", list(accumulate(lens, initial=0)), buffers),
        max(queries),
        causal,
    )
