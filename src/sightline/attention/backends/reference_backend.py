"""The oracle as a backend: token by token, page by page, in fp32. Slow on purpose.

Finds slots by walking the page table itself, so that it shares no index arithmetic with what it checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    Lse,
    SoftmaxInputs,
    StepView,
)
from sightline.attention.reference import attend_row, visible_keys
from sightline.attention.spec import Feature, SoftmaxSpec, SpecKind
from sightline.cache.pools import Pool
from sightline.core.device import DeviceKind


@dataclass(frozen=True, eq=False)
class _Row:
    """One row of the step."""

    tokens: slice
    context_slots: tuple[int, ...]
    visible: Tensor
    """[query_len, seq_len] bool."""


@dataclass(frozen=True, eq=False)
class _ReferencePlan(AttentionPlan[SoftmaxInputs]):
    spec: SoftmaxSpec
    pool: Pool
    policy: CachePolicy
    write_slots: tuple[int, ...]
    rows: tuple[_Row, ...]
    needs_lse: bool

    def prepare(self) -> None:
        """Nothing is shared between layers."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        keys, values = self.pool.plane("k")[layer], self.pool.plane("v")[layer]
        if self.policy is CachePolicy.PAGED:
            for token, slot in enumerate(self.write_slots):
                keys[slot] = inputs.k[token]
                values[slot] = inputs.v[token]
        lse = inputs.q.new_full(inputs.q.shape[:2], -torch.inf, dtype=torch.float32)
        for row in self.rows:
            slots = [*row.context_slots, *self.write_slots[row.tokens]]
            reads_pool = self.policy is CachePolicy.PAGED
            row_out, row_lse = attend_row(
                self.spec,
                inputs.q[row.tokens],
                keys[slots] if reads_pool else inputs.k[row.tokens],
                values[slots] if reads_pool else inputs.v[row.tokens],
                row.visible,
                inputs.sinks,
            )
            out[row.tokens] = row_out.to(out.dtype)
            lse[row.tokens] = row_lse
        return lse if self.needs_lse else None


class ReferenceBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """Serves anything, slowly."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        Capability(
            spec_kinds=frozenset({SpecKind.SOFTMAX}),
            devices=frozenset({DeviceKind.CPU, DeviceKind.CUDA}),
            compute_capabilities=ANY,
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            cache_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            head_dims=ANY,
            group_sizes=ANY,
            page_sizes=ANY,
            features=frozenset(Feature),
            host_lengths=HostLengths.EXACT,
        ),
    )

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["kv"]

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReferencePlan:
        del buffers
        batch = step.batch
        paged = step.policy is CachePolicy.PAGED
        offsets = batch.query_offsets_host()
        rows = tuple(
            _Row(
                tokens=slice(offsets[row], offsets[row + 1]),
                context_slots=self._context_slots(batch.rows[row], context_len),
                visible=visible_keys(self._spec, mask, context_len, batch.positions[offsets[row] : offsets[row + 1]]),
            )
            for row, (context_len, mask) in enumerate(zip(batch.context_lens.exact(), batch.masks, strict=True))
            if offsets[row] < offsets[row + 1]
        )
        write_slots = tuple(batch.pools[self._pool.key].write_slots.tolist()) if paged else ()
        return _ReferencePlan(self._spec, self._pool, step.policy, write_slots, rows, Feature.LSE in step.needs)

    def _context_slots(self, table_row: int, context_len: int) -> tuple[int, ...]:
        pages = self._pool.table.pages[table_row].tolist()
        size = self._pool.page_size
        return tuple(pages[entry // size] * size + entry % size for entry in range(context_len))
