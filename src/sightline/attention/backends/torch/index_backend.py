"""Indexers with torch alone: the keys of a row are gathered once, and queries are scored in blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.torch.rows import INDEX_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, IndexInputs, Lse, StepView
from sightline.attention.shared.tiles import RowSpan, row_spans
from sightline.attention.spec import IndexSpec
from sightline.cache.pools import Pool
from sightline.cache.spec import SCALED_DTYPES
from sightline.core.batch import MaskKind, RowMask
from sightline.kernels.choice import choose_highest
from sightline.kernels.index_keys import coded_keys
from sightline.kernels.paging import write_entries

MAX_PRODUCTS = 1 << 22
"""Maximum products of heads and keys per call: 16 MiB in fp32. Larger calls are split by query."""


@dataclass(frozen=True, eq=False)
class KeyPlane:
    """One layer's keys in a pool."""

    codes: Tensor
    """[num_slots, head_dim]."""
    scales: Tensor | None
    """[num_slots, 1] fp32; None if the codes are the keys themselves."""

    @staticmethod
    def of(pool: Pool) -> tuple[KeyPlane, ...]:
        """The plane of each layer."""
        codes = pool.plane("key").unbind(0)
        if pool.plane("key").dtype not in SCALED_DTYPES:
            return tuple(KeyPlane(each, None) for each in codes)
        return tuple(KeyPlane(*each) for each in zip(codes, pool.plane("scale").unbind(0), strict=True))

    def write(self, slots: Tensor, keys: Tensor) -> None:
        """Writes `keys` [n, head_dim] to `slots` [n]."""
        if self.scales is None:
            write_entries(self.codes, slots, keys)
            return
        codes, scales = coded_keys(keys, self.codes.dtype)
        write_entries(self.codes.view(torch.uint8), slots, codes.view(torch.uint8))
        write_entries(self.scales, slots, scales)

    def read(self, slots: Tensor) -> Tensor:
        """The keys [n, head_dim] at `slots` [n], in fp32."""
        if self.scales is None:
            return self.codes[slots].float()
        codes = self.codes.view(torch.uint8)[slots].view(self.codes.dtype)
        return codes.float().mul_(self.scales[slots])


@dataclass(frozen=True, eq=False)
class _RowPlan:
    """One row of a step."""

    tokens: slice
    slots: Tensor | None
    """[num_keys] int64; None if its keys are those of the step."""
    visible: Tensor
    """[query_len] int64: how many keys each query sees, from the first one on."""
    tree: Tensor | None
    """[query_len, query_len] bool: which of the new tokens each query sees, if they form a tree."""
    block: int
    """Queries that are scored at once."""

    def blocks(self) -> Iterator[slice]:
        count = self.tokens.stop - self.tokens.start
        for start in range(0, count, self.block):
            yield slice(start, min(start + self.block, count))


@dataclass(frozen=True, eq=False)
class _IndexPlan(AttentionPlan[IndexInputs]):
    planes: tuple[KeyPlane, ...]
    write_slots: Tensor | None
    """[num_tokens] int64; None if the step has no cache."""
    rows: tuple[_RowPlan, ...]
    """Empty if nothing is chosen."""

    def prepare(self) -> None:
        """Nothing to do: everything was built on the host."""

    def run(self, layer: int, inputs: IndexInputs, out: Tensor) -> Lse | None:
        plane = self.planes[layer]
        if self.write_slots is not None:
            plane.write(self.write_slots, inputs.key)
        for row in self.rows:
            keys = inputs.key[row.tokens].float() if row.slots is None else plane.read(row.slots)
            self._choose(row, keys, inputs.part(row.tokens), out[row.tokens])
        return None

    def _choose(self, row: _RowPlan, keys: Tensor, inputs: IndexInputs, out: Tensor) -> None:
        places = torch.arange(keys.shape[0], device=keys.device)
        for block in row.blocks():
            q, weights = inputs.q[block].float(), inputs.weights[block].float()
            products = torch.matmul(q, keys.T).relu_()
            scores = torch.bmm(weights.unsqueeze(1), products).squeeze(1)
            scores.masked_fill_(places >= row.visible[block].unsqueeze(1), -torch.inf)
            if row.tree is not None:
                new = scores[:, keys.shape[0] - row.tree.shape[1] :]
                new.masked_fill_(~row.tree[block], -torch.inf)
            choose_highest(scores, out[block])


class TorchIndexBackend(AttentionBackend[IndexSpec, IndexInputs]):
    """The default backend on a CPU."""

    capabilities: ClassVar[tuple[Capability, ...]] = INDEX_ROWS

    def __init__(self, context: BackendContext[IndexSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["index"]
        self._planes = KeyPlane.of(self._pool)

    def plan(self, step: StepView, buffers: PlanBuffers) -> _IndexPlan:
        spans = row_spans(step.batch, None) if step.is_sparse else ()
        rows = tuple(self._plan_row(span, step.batch.masks[span.row], step, buffers) for span in spans)
        return _IndexPlan(self._planes, step.write_slots(self._pool), rows)

    def _plan_row(self, span: RowSpan, mask: RowMask, step: StepView, buffers: PlanBuffers) -> _RowPlan:
        count, num_keys = span.query_len, span.stop_key
        visible = buffers.take(f"row{span.row}.visible", (count,), torch.int64)
        visible.fill_(num_keys)
        if span.kind is MaskKind.CAUSAL:
            torch.arange(span.context_len + 1, num_keys + 1, out=visible)
        slots = None
        if not step.is_transient:
            places = torch.arange(num_keys, device=visible.device)
            table_rows = torch.full_like(places, step.batch.rows[span.row])
            slots = buffers.take(f"row{span.row}.slots", (num_keys,), torch.int64)
            slots.copy_(self._pool.table.slots(table_rows, places, self._pool.page_size))
        block = max(1, MAX_PRODUCTS // (self._spec.num_q_heads * max(num_keys, 1)))
        tokens = slice(span.first_token, span.first_token + count)
        return _RowPlan(tokens, slots, visible, None if mask.tree is None else mask.tree.to(visible.device), block)
