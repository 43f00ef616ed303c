"""The oracle of indexers over compressed keys as a backend: token by token, in fp32. Slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.compressed.inputs import CompressedIndexInputs
from sightline.attention.compressed.spec import CompressedIndexSpec
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, Lse, StepView
from sightline.attention.kinds import COMPRESSED_INDEX_FEATURES, SpecKind
from sightline.attention.oracle.compressed_rows import CompressedRow, RowEntries, compressed_rows
from sightline.attention.oracle.index import choose_tokens, index_scores
from sightline.attention.oracle.rows import reference_capability
from sightline.cache.pools import GroupCache


@dataclass(frozen=True, eq=False)
class _ReferencePlan(AttentionPlan[CompressedIndexInputs]):
    spec: CompressedIndexSpec
    cache: GroupCache
    rows: tuple[CompressedRow, ...]
    chooses: bool

    def prepare(self) -> None:
        """Nothing to do: layers share no work."""

    def run(self, layer: int, inputs: CompressedIndexInputs, out: Tensor) -> Lse | None:
        for row in self.rows:
            tokens = row.states.tokens
            self._run_row(row, layer, inputs.part(tokens), out[tokens])
        return None

    def _run_row(self, row: CompressedRow, layer: int, inputs: CompressedIndexInputs, out: Tensor) -> None:
        dtype = self.cache.pools["index"].plane("key").dtype
        like = inputs.q.new_zeros(self.spec.head_dim, dtype=dtype)
        entries = RowEntries.begin(row, self.cache, "key", layer, self.spec.compression, like)
        sums = []
        for token, position in enumerate(row.positions):
            entries.add(inputs.entries, token, position, dtype)
            sums.append(entries.sums.sums.clone())
            if self.chooses:
                one = slice(token, token + 1)
                keys = torch.stack(entries.entries) if entries.entries else like.unsqueeze(0)
                scores = index_scores(inputs.q[one], keys, inputs.weights[one])
                visible = torch.full(scores.shape, bool(entries.entries))
                out[one] = choose_tokens(scores, visible, self.spec.top_k)
        row.states.write(self.cache.states, "sums", layer, torch.stack(sums))


class ReferenceCompressedIndexBackend(AttentionBackend[CompressedIndexSpec, CompressedIndexInputs]):
    """Serves every indexer over compressed keys, slowly."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        reference_capability(SpecKind.COMPRESSED_INDEX, COMPRESSED_INDEX_FEATURES, scaled=False),
    )

    def __init__(self, context: BackendContext[CompressedIndexSpec]) -> None:
        self._spec = context.spec
        self._cache = context.cache

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReferencePlan:
        del buffers
        rows = compressed_rows(step, self._cache.pools["index"])
        return _ReferencePlan(self._spec, self._cache, rows, step.is_sparse)
