"""The oracle of compressed attention as a backend: token by token, in fp32. Slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.compressed.inputs import CompressedInputs
from sightline.attention.compressed.spec import CompressedSpec
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, EntryPlan, Lse, StepView
from sightline.attention.kinds import COMPRESSED_FEATURES, SpecKind
from sightline.attention.oracle.compressed_rows import CompressedRow, RowEntries, compressed_rows
from sightline.attention.oracle.rows import reference_capability
from sightline.cache.pools import GroupCache


@dataclass(frozen=True, eq=False)
class _ReferencePlan(AttentionPlan[CompressedInputs]):
    spec: CompressedSpec
    cache: GroupCache
    rows: tuple[CompressedRow, ...]
    hot: EntryPlan | None
    """Only prepared, so that hot copies of what the step writes are forgotten. The oracle reads and writes the pool in
    host memory itself, which always has every entry. None if entries are on the device."""

    def prepare(self) -> None:
        if self.hot is not None:
            self.hot.prepare()

    def run(self, layer: int, inputs: CompressedInputs, out: Tensor) -> Lse | None:
        for row in self.rows:
            tokens = row.states.tokens
            self._run_row(row, layer, inputs.part(tokens), out[tokens])
        return None

    def _run_row(self, row: CompressedRow, layer: int, inputs: CompressedInputs, out: Tensor) -> None:
        spec, states = self.spec, self.cache.states
        dtype = states.plane("window").dtype
        empty = torch.zeros(spec.window, spec.head_dim, dtype=dtype)
        ring = row.states.read(states, "window", layer, empty).to(out.device).clone()
        entries = None
        if spec.compression is not None:
            like = inputs.key.new_zeros(spec.head_dim, dtype=dtype)
            entries = RowEntries.begin(row, self.cache, "entry", layer, spec.compression, like)
        rings, sums = [], []
        for token, position in enumerate(row.positions):
            ring[position % spec.window] = inputs.key[token]
            rings.append(ring.clone())
            if entries is not None and inputs.entries is not None:
                entries.add(inputs.entries, token, position, dtype)
                sums.append(entries.sums.sums.clone())
            keys = [ring[near % spec.window] for near in range(max(0, position - spec.window + 1), position + 1)]
            keys += _read(entries, None if inputs.chosen is None else inputs.chosen[token])
            out[token] = _attend(spec, inputs.q[token], torch.stack(keys), inputs.sinks)
        row.states.write(states, "window", layer, torch.stack(rings))
        if sums:
            row.states.write(states, "sums", layer, torch.stack(sums))


def _read(entries: RowEntries | None, chosen: Tensor | None) -> list[Tensor]:
    """The entries that a token reads: all so far, or those that were chosen for it."""
    if entries is None:
        return []
    if chosen is None:
        return entries.entries
    return [entries.entries[number] for number in chosen.tolist() if number >= 0]


def _attend(spec: CompressedSpec, q: Tensor, keys: Tensor, sinks: Tensor) -> Tensor:
    """[num_q_heads, head_dim], in the dtype of q [num_q_heads, head_dim], for keys [num_keys, head_dim]."""
    scores = q.float() @ keys.float().T * spec.scale
    weights = torch.exp(scores - torch.logaddexp(torch.logsumexp(scores, dim=1), sinks.float())[:, None])
    return (weights @ keys.float()).to(q.dtype)


class ReferenceCompressedBackend(AttentionBackend[CompressedSpec, CompressedInputs]):
    """Serves every spec of compressed attention, slowly."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        reference_capability(SpecKind.COMPRESSED, COMPRESSED_FEATURES, hot_entries=True, scaled=False),
    )

    def __init__(self, context: BackendContext[CompressedSpec]) -> None:
        self._spec = context.spec
        self._cache = context.cache
        self._coordinator = context.coordinator

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReferencePlan:
        hot = self._coordinator.plan(step, buffers) if self._cache.is_on_host else None
        return _ReferencePlan(self._spec, self._cache, compressed_rows(step, self._cache.pools.get("entry")), hot)
