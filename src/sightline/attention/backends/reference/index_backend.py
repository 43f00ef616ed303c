"""The oracle of indexers as a backend: row by row, in fp32. Slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, IndexInputs, Lse, StepView
from sightline.attention.kinds import INDEX_FEATURES, SpecKind
from sightline.attention.oracle.index import choose_tokens, index_scores, stored_keys
from sightline.attention.oracle.rows import ReferenceRow, ReferenceStep, reference_capability
from sightline.attention.spec import IndexSpec
from sightline.cache.pools import Pool
from sightline.cache.spec import SCALED_DTYPES


@dataclass(frozen=True, eq=False)
class _ReferencePlan(AttentionPlan[IndexInputs]):
    spec: IndexSpec
    pool: Pool
    step: ReferenceStep
    chooses: bool

    def prepare(self) -> None:
        """Nothing to do: layers share no work."""

    def run(self, layer: int, inputs: IndexInputs, out: Tensor) -> Lse | None:
        self._write(layer, inputs.key)
        for row in self.step.rows if self.chooses else ():
            tokens = row.tokens
            keys = inputs.key[tokens] if row.slots is None else self._stored(layer, row)
            scores = index_scores(inputs.q[tokens], keys, inputs.weights[tokens])
            out[tokens] = choose_tokens(scores, row.visible, self.spec.top_k)
        return None

    def _write(self, layer: int, keys: Tensor) -> None:
        plane = self.pool.plane("key")[layer]
        if plane.dtype not in SCALED_DTYPES:
            self.step.write(plane, 1.0, keys)
            return
        codes, scales = stored_keys(keys, plane.dtype)
        for token, slot in enumerate(self.step.write_slots):
            plane.view(torch.uint8)[slot] = codes[token].view(torch.uint8)
            self.pool.plane("scale")[layer, slot] = scales[token]

    def _stored(self, layer: int, row: ReferenceRow) -> Tensor:
        keys = row.stored(self.pool.plane("key")[layer], 1.0)
        if self.pool.plane("key").dtype not in SCALED_DTYPES:
            return keys
        return keys.float() * row.stored(self.pool.plane("scale")[layer], 1.0)


class ReferenceIndexBackend(AttentionBackend[IndexSpec, IndexInputs]):
    """Serves every indexer, slowly."""

    capabilities: ClassVar[tuple[Capability, ...]] = (reference_capability(SpecKind.INDEX, INDEX_FEATURES),)

    def __init__(self, context: BackendContext[IndexSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["index"]

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReferencePlan:
        del buffers
        return _ReferencePlan(self._spec, self._pool, ReferenceStep.of(step, self._spec, self._pool), step.is_sparse)
