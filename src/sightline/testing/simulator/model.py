"""A model whose next token is a hash of the cache that it really read.

The cache holds, for each token, its id and its position. Attention reads a row's entries through its page table, in
order, and hashes them; the hash is the next token. A page that is another's, stale, freed or out of order so gives
another token than the sequence's own history does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    SoftmaxInputs,
    StepView,
)
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import SoftmaxSpec, SpecKind
from sightline.cache.pools import Pool
from sightline.core.device import DeviceKind
from sightline.layers.scratch import Scratch
from sightline.models.contract import Model, ModelDefinition
from sightline.models.weights import WeightReader

VOCAB = 37
DTYPE = torch.float64
"""Holds every hash exactly."""
_MASK = (1 << 52) - 1
SPECS = (SoftmaxSpec(1, 1, 1, 1.0), SoftmaxSpec(1, 1, 1, 2.0))
"""Two groups, each with pools of its own."""


def hash_entries(entries: Iterable[tuple[float, float]], start: int = 17) -> int:
    """Depends on every entry (token, position) and on their order. Raises for what was never written: NaN."""
    value = start
    for token, position in entries:
        value = (value * 1_000_003 + int(token) * 7919 + int(position)) & _MASK
    return value


def next_token(tokens: Sequence[int]) -> int:
    """What follows a history."""
    return hash_entries((token, position) for position, token in enumerate(tokens)) % VOCAB


@dataclass(frozen=True, eq=False)
class _ReadingPlan(AttentionPlan[SoftmaxInputs]):
    pool: Pool
    write_slots: Tensor
    rows: tuple[tuple[range, list[int]], ...]
    """Of each row: its new tokens, and the slots of all its entries."""

    def prepare(self) -> None:
        """Nothing is shared between layers."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
        keys, values = self.pool.plane("k")[layer], self.pool.plane("v")[layer]
        keys[self.write_slots] = inputs.k
        values[self.write_slots] = inputs.v
        for tokens, slots in self.rows:
            entries = list(zip(keys[slots].flatten().tolist(), values[slots].flatten().tolist(), strict=True))
            value = hash_entries(entries[: len(slots) - len(tokens)])
            for token, entry in zip(tokens, entries[len(slots) - len(tokens) :], strict=True):
                value = hash_entries([entry], value)
                out[token] = float(value)


class ReadingBackend(AttentionBackend[SoftmaxInputs]):
    """Reads what the page table says, entry by entry."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        Capability(
            spec_kinds=frozenset({SpecKind.SOFTMAX}),
            devices=frozenset({DeviceKind.CPU}),
            compute_capabilities=ANY,
            dtypes=frozenset({DTYPE}),
            cache_dtypes=frozenset({DTYPE}),
            head_dims=frozenset({1}),
            group_sizes=frozenset({1}),
            page_sizes=ANY,
            features=frozenset(),
            host_lengths=HostLengths.EXACT,
        ),
    )

    def __init__(self, context: BackendContext) -> None:
        self._pool = context.cache.pools["kv"]

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReadingPlan:
        del buffers
        batch, size = step.batch, self._pool.page_size
        offsets = batch.query_offsets_host()
        rows = []
        for row, context_len in enumerate(batch.context_lens.exact()):
            tokens = range(offsets[row], offsets[row + 1])
            pages = self._pool.table.pages[batch.rows[row]].tolist()
            slots = [pages[entry // size] * size + entry % size for entry in range(context_len + len(tokens))]
            rows.append((tokens, slots))
        return _ReadingPlan(self._pool, batch.pools[self._pool.key].write_slots, tuple(rows))


class ReadingModel(Model):
    """Two layers, of two groups, which must agree on what they read."""

    @property
    def turns(self) -> bool:
        return False

    def reserve(self, scratch: Scratch) -> None:
        """It needs no memory."""

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        del scratch
        batch = planned.batch
        shape = (batch.num_tokens, 1, 1)
        inputs = SoftmaxInputs(
            q=torch.zeros(shape, dtype=DTYPE),
            k=batch.tokens.to(DTYPE).view(shape),
            v=batch.positions.to(DTYPE).view(shape),
            sinks=None,
        )
        read = [torch.zeros(shape, dtype=DTYPE) for _ in SPECS]
        for layer, out in enumerate(read):
            planned.attend(layer, inputs, out)
        logits = torch.zeros(batch.logit_indices.shape[0], VOCAB)
        for index, token in enumerate(batch.logit_indices.tolist()):
            hashes = {int(out[token, 0, 0]) for out in read}
            # Groups that read differently give no number, which ends the request with an error.
            logits[index, min(hashes) % VOCAB] = 1.0 if len(hashes) == 1 else torch.nan
        return logits


class ReadingDefinition(ModelDefinition):
    """What the engine asks of a model before it is built."""

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def max_positions(self) -> int:
        return 1 << 16

    def attention_specs(self) -> tuple[SoftmaxSpec, ...]:
        return SPECS

    def load(self, weights: WeightReader) -> Model:
        del weights
        return ReadingModel()
