"""Softmax attention on a CPU with compiled kernels that read pages in place.

Planning looks at numbers of rows and tokens only: which keys a token sees follows from lengths in memory, when the step
runs. So a recorded step serves any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.numba.calls import (
    AttentionCalls,
    AttentionScratch,
    AttentionShape,
    Entries,
    Pages,
    RowMasks,
    layer_entries,
    plan_masks,
)
from sightline.attention.backends.numba.rows import ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    Lse,
    SoftmaxInputs,
    SoftmaxQueries,
    StepView,
)
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import Lane


@dataclass(frozen=True, eq=False)
class _Reads:
    """How a planned step reads the cache, or its own entries."""

    spec: SoftmaxSpec
    calls: AttentionCalls
    step: StepView
    keys: Sequence[Entries]
    values: Sequence[Entries]
    pages: Pages
    masks: RowMasks | None
    scratch: AttentionScratch
    query_lens: Tensor | None
    """[num_rows] int64: a row's tokens share the keys that are read. None: no row has several tokens, or some have
    trees."""

    def prepare(self) -> None:
        self.calls.locate(self.step, self.masks, self.spec.window, self.scratch)

    def attend(
        self, inputs: SoftmaxQueries, keys: Entries, values: Entries, pages: Pages | None, out: Tensor
    ) -> Lse | None:
        lse = torch.empty(out.shape[:2], dtype=torch.float32) if self.step.needs_lse else None
        self.calls.attend(
            inputs.q,
            keys,
            values,
            pages,
            self.scratch,
            out,
            scale=self.spec.scale,
            softcap=self.spec.softcap,
            sinks=inputs.sinks,
            lse=lse,
            query_lens=self.query_lens,
        )
        return lse


@dataclass(frozen=True, eq=False)
class _NumbaPlan(AttentionPlan[SoftmaxInputs]):
    reads: _Reads
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, which reads no pool."""

    def prepare(self) -> None:
        self.reads.prepare()

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        if self.write_slots is None:
            return self.reads.attend(inputs, Entries(inputs.k, 1.0), Entries(inputs.v, 1.0), None, out)
        keys, values, calls = self.reads.keys[layer], self.reads.values[layer], self.reads.calls
        calls.write(inputs.k, keys, self.write_slots)
        calls.write(inputs.v, values, self.write_slots)
        return self.reads.attend(inputs, keys, values, self.reads.pages, out)


@dataclass(frozen=True, eq=False)
class _BorrowedPlan(AttentionPlan[SoftmaxQueries]):
    reads: _Reads

    def prepare(self) -> None:
        self.reads.prepare()

    def run(self, layer: int, inputs: SoftmaxQueries, out: Tensor) -> Lse | None:
        reads = self.reads
        return reads.attend(inputs, reads.keys[layer], reads.values[layer], reads.pages, out)


class NumbaBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """Computes softmax attention on a CPU."""

    capabilities: ClassVar[tuple[Capability, ...]] = ROWS

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._spec = spec = context.spec
        self._pool = pool = context.cache.pools["kv"]
        self._keys, self._values = layer_entries(pool, "k"), layer_entries(pool, "v")
        self._pages = Pages(pool.table.pages, pool.page_size)
        shape = AttentionShape(spec.num_kv_heads, spec.group_size, spec.head_dim, spec.head_dim, has_prompts=True)
        dtype, launcher = context.dtype, context.launcher
        cache_dtype = pool.plane("k").dtype
        self._calls = AttentionCalls(launcher, shape, dtype, cache_dtype, dtype, dtype)

        def scratch(lane: Lane) -> AttentionScratch:
            def lease(name: str, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
                return context.workspace.lease(context.group, f"numba {name}", lane, size, kind)

            return AttentionScratch.of(lease, shape, context.limits.max_step_tokens, launcher.num_threads)

        self._scratch = {lane: scratch(lane) for lane in context.limits.lanes}

    def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[SoftmaxInputs]:
        has_trees = any(mask.tree is not None for mask in step.batch.masks)
        is_prompt = step.batch.num_tokens > step.batch.num_rows and not has_trees
        reads = _Reads(
            spec=self._spec,
            calls=self._calls,
            step=step,
            keys=self._keys,
            values=self._values,
            pages=self._pages,
            masks=plan_masks(step, buffers),
            scratch=self._scratch[step.lane],
            query_lens=step.batch.query_lens.device if is_prompt else None,
        )
        return _BorrowedPlan(reads) if step.is_borrowed else _NumbaPlan(reads, step.write_slots(self._pool))
