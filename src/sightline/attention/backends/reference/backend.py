"""The oracle as a backend: token by token, page by page, in fp32. Slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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
from sightline.attention.kinds import LATENT_ONLY, RECURRENT_ONLY, Feature, SpecKind
from sightline.attention.oracle.attention import attend_row
from sightline.attention.oracle.rows import ReferenceStep, reference_capability
from sightline.attention.spec import SoftmaxSpec
from sightline.cache.pools import Pool


@dataclass(frozen=True, eq=False)
class _ReferencePlan(AttentionPlan[SoftmaxInputs]):
    spec: SoftmaxSpec
    pool: Pool
    step: ReferenceStep

    def prepare(self) -> None:
        """Nothing to do: layers share no work."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        keys, values = self.pool.plane("k")[layer], self.pool.plane("v")[layer]
        k_scale, v_scale = self.pool.scales("k")[layer], self.pool.scales("v")[layer]
        self.step.write(keys, k_scale, inputs.k)
        self.step.write(values, v_scale, inputs.v)
        entries = [
            (row.entries(keys, k_scale, inputs.k), row.entries(values, v_scale, inputs.v)) for row in self.step.rows
        ]
        return _attend(self.spec, self.step, inputs, entries, out)


@dataclass(frozen=True, eq=False)
class _BorrowedPlan(AttentionPlan[SoftmaxQueries]):
    spec: SoftmaxSpec
    pool: Pool
    step: ReferenceStep

    def prepare(self) -> None:
        """Nothing to do: layers share no work."""

    def run(self, layer: int, inputs: SoftmaxQueries, out: Tensor) -> Lse | None:
        keys, values = self.pool.plane("k")[layer], self.pool.plane("v")[layer]
        k_scale, v_scale = self.pool.scales("k")[layer], self.pool.scales("v")[layer]
        entries = [(row.stored(keys, k_scale), row.stored(values, v_scale)) for row in self.step.rows]
        return _attend(self.spec, self.step, inputs, entries, out)


def _attend(
    spec: SoftmaxSpec, step: ReferenceStep, inputs: SoftmaxQueries, entries: list[tuple[Tensor, Tensor]], out: Tensor
) -> Lse | None:
    """Writes the output of every row, given its keys and values."""
    lse = inputs.q.new_full(inputs.q.shape[:2], -torch.inf, dtype=torch.float32)
    for row, (keys, values) in zip(step.rows, entries, strict=True):
        row_out, row_lse = attend_row(spec, inputs.q[row.tokens], keys, values, row.visible, inputs.sinks)
        out[row.tokens] = row_out.to(out.dtype)
        lse[row.tokens] = row_lse
    return lse if step.needs_lse else None


class ReferenceBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """Serves every softmax spec, slowly."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        reference_capability(SpecKind.SOFTMAX, frozenset(Feature) - RECURRENT_ONLY - LATENT_ONLY),
    )

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["kv"]

    def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[SoftmaxInputs]:
        del buffers
        kind = _BorrowedPlan if step.is_borrowed else _ReferencePlan
        return kind(self._spec, self._pool, ReferenceStep.of(step, self._spec, self._pool))
