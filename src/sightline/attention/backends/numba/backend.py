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
    StepView,
)
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import Lane


@dataclass(frozen=True, eq=False)
class _NumbaPlan(AttentionPlan[SoftmaxInputs]):
    spec: SoftmaxSpec
    calls: AttentionCalls
    step: StepView
    keys: Sequence[Entries]
    values: Sequence[Entries]
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, which reads no pool."""
    pages: Pages
    masks: RowMasks | None
    scratch: AttentionScratch
    query_lens: Tensor | None
    """[num_rows] int64: a row's tokens share the keys that are read. None: no row has several tokens, or some have
    trees."""

    def prepare(self) -> None:
        self.calls.locate(self.step, self.masks, self.spec.window, self.scratch)

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        lse = torch.empty(out.shape[:2], dtype=torch.float32) if self.step.needs_lse else None
        keys, values, pages = Entries(inputs.k, 1.0), Entries(inputs.v, 1.0), None
        if self.write_slots is not None:
            keys, values, pages = self.keys[layer], self.values[layer], self.pages
            self.calls.write(inputs.k, keys, self.write_slots)
            self.calls.write(inputs.v, values, self.write_slots)
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

    def plan(self, step: StepView, buffers: PlanBuffers) -> _NumbaPlan:
        has_trees = any(mask.tree is not None for mask in step.batch.masks)
        is_prompt = step.batch.num_tokens > step.batch.num_rows and not has_trees
        return _NumbaPlan(
            spec=self._spec,
            calls=self._calls,
            step=step,
            keys=self._keys,
            values=self._values,
            write_slots=step.write_slots(self._pool),
            pages=self._pages,
            masks=plan_masks(step, buffers),
            scratch=self._scratch[step.lane],
            query_lens=step.batch.query_lens.device if is_prompt else None,
        )
