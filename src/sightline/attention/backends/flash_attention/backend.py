"""Softmax attention with FlashAttention 4: one call per kind of mask.

    prompts without context    the step's own keys and values, row after row
    any other rows             the pool, through a page table that the plan makes

Steps in which no row has more than one new token always read the pool, all rows in one call: their launches depend only
on the numbers of rows and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.flash_attention.call import FlashAttention, PagedKeys, RaggedKeys, kernel_page_size
from sightline.attention.backends.flash_attention.rows import ROWS
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
from sightline.attention.shared.page_rows import filled
from sightline.attention.shared.step_tokens import StepTokens
from sightline.attention.spec import SoftmaxSpec
from sightline.cache.pools import Pool
from sightline.core.batch import Batch, MaskKind
from sightline.kernels.triton.write import write_keys_values


@dataclass(frozen=True, eq=False)
class _Pages:
    """Locations of the keys of a call's rows in the pool."""

    table: Tensor
    """[num_rows, most] int32, in units of the kernel's page size."""
    lens: Tensor
    """[num_rows] int32."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One call: rows that share a mask."""

    tokens: StepTokens
    """Query tokens; padding may follow the last row's."""
    new_keys: StepTokens
    """New tokens of the rows, without padding."""
    query_offsets: Tensor
    """[num_rows + 1] int32."""
    pages: _Pages | None
    """None if all keys come from the step itself."""
    causal: bool


@dataclass(frozen=True, eq=False)
class _FlashAttentionPlan(AttentionPlan[SoftmaxInputs]):
    attend: FlashAttention
    keys: tuple[Tensor, ...]
    """Per layer: [num_slots, num_kv_heads, head_dim]."""
    values: tuple[Tensor, ...]
    page_size: int
    """Page size passed to the kernel."""
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`."""
    calls: tuple[_Call, ...]
    needs_lse: bool

    def prepare(self) -> None:
        """Nothing to do: `plan` fills the buffers."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        if self.write_slots is not None:
            write_keys_values(inputs.k, inputs.v, self.keys[layer], self.values[layer], self.write_slots)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) if self.needs_lse else None
        for call in self.calls:
            self._run_call(call, layer, inputs, out, lse)
        return lse

    def _run_call(self, call: _Call, layer: int, inputs: SoftmaxInputs, out: Tensor, lse: Tensor | None) -> None:
        q = call.tokens.of(inputs.q)
        in_place = call.tokens.side_by_side
        found = out[in_place] if in_place is not None else out.new_empty(q.shape)
        found_lse = self.attend(
            q,
            call.query_offsets,
            self._keys(call, layer, inputs),
            found,
            causal=call.causal,
            needs_lse=lse is not None,
            sinks=inputs.sinks,
        )
        if in_place is None:
            call.tokens.put(out, found)
        if lse is not None and found_lse is not None:
            call.tokens.put(lse, found_lse)

    def _keys(self, call: _Call, layer: int, inputs: SoftmaxInputs) -> RaggedKeys | PagedKeys:
        if call.pages is None:
            return RaggedKeys(call.new_keys.of(inputs.k), call.new_keys.of(inputs.v), call.query_offsets)
        k, v = (plane.view(-1, self.page_size, *plane.shape[1:]) for plane in (self.keys[layer], self.values[layer]))
        return PagedKeys(k, v, call.pages.table, call.pages.lens)


class FlashAttentionBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """Fast for rows of many new tokens on Hopper. Serves other rows too, but other backends are faster for those."""

    capabilities: ClassVar[tuple[Capability, ...]] = ROWS

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        spec = context.spec
        self._pool: Pool = context.cache.pools["kv"]
        self._keys = self._pool.plane("k").unbind(0)
        self._values = self._pool.plane("v").unbind(0)
        self._page_size = kernel_page_size(self._pool.page_size)
        self._attend = FlashAttention(spec.scale, spec.window, spec.softcap)

    def plan(self, step: StepView, buffers: PlanBuffers) -> _FlashAttentionPlan:
        return _FlashAttentionPlan(
            attend=self._attend,
            keys=self._keys,
            values=self._values,
            page_size=self._page_size,
            write_slots=step.write_slots(self._pool),
            calls=tuple(self._plan_calls(step, buffers)),
            needs_lse=step.needs_lse,
        )

    def _plan_calls(self, step: StepView, buffers: PlanBuffers) -> Iterator[_Call]:
        batch = step.batch
        for kind in (MaskKind.CAUSAL, MaskKind.FULL):
            rows = [row for row, mask in enumerate(batch.masks) if mask.kind is kind]
            if rows:
                call = self._plan_call(kind, rows, step, buffers)
                yield from [call] if call is not None else []

    def _plan_call(self, kind: MaskKind, rows: Sequence[int], step: StepView, buffers: PlanBuffers) -> _Call | None:
        """Returns None if the rows have no tokens and the call cannot be part of a graph."""
        batch, name = step.batch, kind.value
        query_lens, context_lens = batch.query_lens.exact(), batch.context_lens.exact()
        offsets = batch.query_offsets_host()
        decode = max(batch.query_lens.bound) <= 1
        new_keys = StepTokens.planned(name, [slice(offsets[row], offsets[row + 1]) for row in rows], buffers)
        if new_keys.count == 0 and (step.is_transient or not decode):
            return None
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + query_lens[row])
        query_offsets = filled(f"{name}.query offsets", starts, buffers)
        tokens = new_keys
        if len(rows) == batch.num_rows:
            # Includes trailing padding, which no offset reaches, so that the launch does not depend on its size.
            tokens = StepTokens(batch.num_tokens, slice(0, batch.num_tokens), None)
        pages = None
        if not step.is_transient and (decode or any(context_lens[row] for row in rows)):
            lens = [context_lens[row] + query_lens[row] for row in rows]
            most = self._pool.table.max_pages if decode else -(-max(lens) // self._pool.page_size)
            table = self._plan_table(name, rows, batch, most, buffers)
            pages = _Pages(table, filled(f"{name}.key lens", lens, buffers))
        return _Call(tokens, new_keys, query_offsets, pages, kind is MaskKind.CAUSAL)

    def _plan_table(self, name: str, rows: Sequence[int], batch: Batch, most: int, buffers: PlanBuffers) -> Tensor:
        """Each row's first pages, split to the kernel's page size: [num_rows, most * parts] int32."""
        table_rows = batch.table_rows
        if len(rows) != batch.num_rows:
            table_rows = table_rows[torch.tensor(rows, dtype=torch.int64).to(table_rows.device)]
        parts = self._pool.page_size // self._page_size
        table = buffers.take(f"{name}.pages", (len(rows), most * parts), torch.int32)
        pages = self._pool.table.pages[:, :most].index_select(0, table_rows)
        cut = pages.unsqueeze(-1) * parts + torch.arange(parts, device=pages.device)
        table.copy_(cut.flatten(1))
        return table
