"""Softmax attention row by row, with torch: a complete backend to start from."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention import (
    ANY,
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    Capability,
    DeviceKind,
    Feature,
    HostLengths,
    PlanBuffers,
    SoftmaxInputs,
    SoftmaxSpec,
    SpecKind,
    StepView,
)


@dataclass(frozen=True, eq=False)
class Row:
    tokens: slice  # the row's new tokens among the step's
    slots: Tensor | None  # [seq_len]: where its keys lie in the pool; None: the step's own are all there are
    visible: Tensor  # [query_len, seq_len] bool: which keys each new token sees


@dataclass(frozen=True, eq=False)
class RowwisePlan(AttentionPlan[SoftmaxInputs]):
    spec: SoftmaxSpec
    keys: Tensor  # [num_layers, num_slots, num_kv_heads, head_dim]
    values: Tensor  # as the keys
    write_slots: Tensor | None  # [num_tokens]: where the new entries go; None: nowhere
    rows: tuple[Row, ...]
    needs_lse: bool

    def prepare(self) -> None:
        """Nothing is shared between layers."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Tensor | None:
        keys, values = self.keys[layer], self.values[layer]
        if self.write_slots is not None:
            keys[self.write_slots] = inputs.k.to(keys.dtype)
            values[self.write_slots] = inputs.v.to(values.dtype)
        lse = torch.full(out.shape[:2], -torch.inf, device=out.device)
        for row in self.rows:
            k = inputs.k[row.tokens] if row.slots is None else keys[row.slots]
            v = inputs.v[row.tokens] if row.slots is None else values[row.slots]
            k, v = (each.float().repeat_interleave(self.spec.group_size, dim=1) for each in (k, v))
            scores = torch.einsum("qhd,khd->hqk", inputs.q[row.tokens].float(), k) * self.spec.scale
            scores = scores.masked_fill(~row.visible, -torch.inf)
            row_lse = scores.logsumexp(dim=-1)
            out[row.tokens] = torch.einsum("hqk,khd->qhd", torch.exp(scores - row_lse[..., None]), v).to(out.dtype)
            lse[row.tokens] = row_lse.transpose(0, 1)
        return lse if self.needs_lse else None


class RowwiseBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    capabilities: ClassVar[tuple[Capability, ...]] = (
        Capability(
            spec_kinds=frozenset({SpecKind.SOFTMAX}),
            devices=frozenset({DeviceKind.CPU, DeviceKind.CUDA}),
            compute_capabilities=ANY,
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            cache_dtypes=frozenset({torch.float32, torch.bfloat16}),
            head_dims=ANY,
            group_sizes=ANY,
            page_sizes=ANY,
            features=frozenset({Feature.WINDOW, Feature.LSE, Feature.DETERMINISTIC}),
            host_lengths=HostLengths.EXACT,
        ),
    )

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["kv"]

    def plan(self, step: StepView, buffers: PlanBuffers) -> RowwisePlan:
        del buffers  # for memory that must keep its address, as under a CUDA graph
        batch, paged = step.batch, step.policy is CachePolicy.PAGED
        offsets = batch.query_offsets_host()
        rows = []
        for row, context_len in enumerate(batch.context_lens.exact()):
            tokens = slice(offsets[row], offsets[row + 1])
            entries = torch.arange(context_len + tokens.stop - tokens.start, device=batch.tokens.device)
            distance = entries[context_len:, None] - entries
            visible = (distance >= 0) & (distance < (self._spec.window or entries.numel()))
            table_row = torch.full_like(entries, batch.rows[row])
            slots = self._pool.table.slots(table_row, entries, self._pool.page_size) if paged else None
            rows.append(Row(tokens, slots, visible))
        write_slots = batch.pools[self._pool.key].write_slots if paged else None
        keys, values = self._pool.plane("k"), self._pool.plane("v")
        return RowwisePlan(self._spec, keys, values, write_slots, tuple(rows), Feature.LSE in step.needs)
