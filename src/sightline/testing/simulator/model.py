"""A model whose next token is a hash of the cache entries that it reads.

The cache holds the id and position of each token. Attention reads a row's entries through its page table, in order, and
hashes them; the hash decides which tokens are likely. A page that is stale, freed, out of order or another row's thus
gives other tokens than the sequence's history. Two tokens are special: `RAISING` in a row makes the forward pass raise,
and `SPOILING` makes the row's logits NaN.

Knows batches and pools. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.compressed.spec import CompressedSpec
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    RecurrentInputs,
    SoftmaxInputs,
    StepView,
)
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import AttentionSpec, IndexingSpec, SoftmaxSpec
from sightline.core.batch import Batch
from sightline.core.device import DeviceKind
from sightline.layers.scratch import Scratch
from sightline.models.contract import NO_TAPS, Model, ModelDefinition, Taps
from sightline.models.weights import WeightReader
from sightline.testing.simulator.compressed_model import compressed_inputs, picking_inputs, picking_spec
from sightline.testing.simulator.faults import LOGIT_TICKS, UNBEARABLE, Faults
from sightline.testing.simulator.numbers import DTYPE
from sightline.testing.simulator.oracle import (
    MASK,
    MAX_LEN,
    NUM_ORDINARY,
    RAISING,
    VOCAB,
    WEIGHTS,
    logits_of_hashes,
)
from sightline.testing.simulator.sparse_model import index_inputs, latent_inputs, sparse_specs
from sightline.testing.simulator.state_model import PIECES, STATE_SPEC

SPECS = (SoftmaxSpec(1, 1, 1, 1.0), SoftmaxSpec(1, 1, 1, 2.0))
"""Two groups, each with its own pools."""
_MASK = np.uint64(MASK)
_IntArray = NDArray[np.int64]


class _Tree(NamedTuple):
    """The new tokens of a row that form a tree."""

    token: int
    """Which new token of the batch is its first."""
    start: int
    """The first entry of its row."""
    stop: int
    """The end of its row's entries."""
    seen: NDArray[np.uint64]
    """[query_len, query_len]: 1 where a token sees another."""


@dataclass(frozen=True, eq=False)
class Reading:
    """The entries that the rows of a batch read, row after row."""

    rows: _IntArray
    """[num_entries]: the page-table row of each entry."""
    entries: _IntArray
    """[num_entries]: its index in its row."""
    weights: NDArray[np.uint64]
    """[num_entries]: its factor in the hash, by its position."""
    starts: _IntArray
    """[num_tokens]: the first entry that each new token sees."""
    stops: _IntArray
    """[num_tokens]: the end of the entries that it sees."""
    trees: tuple[_Tree, ...]
    """Rows in which tokens do not see all tokens before them."""

    @staticmethod
    def of(batch: Batch) -> Reading:
        query_lens = np.array(batch.query_lens.exact(), dtype=np.int64)
        seq_lens = query_lens + batch.context_lens.exact()
        ends = seq_lens.cumsum()
        starts = ends - seq_lens
        entries = np.arange(ends[-1] if len(ends) else 0) - starts.repeat(seq_lens)
        skipped = (ends - query_lens.cumsum()).repeat(query_lens)
        rows = np.array(batch.rows, dtype=np.int64).repeat(seq_lens)
        stops = np.arange(1, len(skipped) + 1) + skipped
        places, trees = entries, list[_Tree]()
        if any(mask.tree is not None for mask in batch.masks):
            places, first_tokens = entries.copy(), query_lens.cumsum() - query_lens
            for row, mask in enumerate(batch.masks):
                if mask.tree is not None:
                    token, stop, count = int(first_tokens[row]), int(ends[row]), int(query_lens[row])
                    trees.append(_Tree(token, int(starts[row]), stop, mask.tree.numpy().astype(np.uint64)))
                    places[stop - count : stop] = batch.positions[token : token + count].numpy()
        return Reading(rows, entries, WEIGHTS[places], starts.repeat(query_lens), stops, tuple(trees))

    def slots(self, pages: _IntArray, page_size: int) -> _IntArray:
        """[num_entries]: the slots of the entries according to a page table."""
        index, offset = np.divmod(self.entries, page_size)
        found: _IntArray = pages[self.rows, index] * page_size + offset
        return found

    def sums(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """[num_tokens]: the sum of the values [num_entries] that each new token sees."""
        sums = np.zeros(len(values) + 1, dtype=np.uint64)
        values.cumsum(out=sums[1:])
        difference: NDArray[np.uint64] = sums[self.stops] - sums[self.starts]
        for token, start, stop, seen in self.trees:
            first = stop - len(seen)
            context = sums[first : first + 1] - sums[start : start + 1]
            difference[token : token + len(seen)] = context + seen @ values[first:stop]
        return difference


@dataclass(frozen=True, eq=False)
class _ReadingPlan(AttentionPlan[SoftmaxInputs]):
    tokens: NDArray[np.float64]
    """[num_slots]: the token ids in the pool."""
    positions: NDArray[np.float64]
    """[num_slots]: the positions in the pool."""
    write_slots: _IntArray
    read_slots: _IntArray
    reading: Reading

    def prepare(self) -> None:
        """Nothing is shared between layers."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
        """Writes the new entries, and hashes the entries that each new token sees.

        A hash is NaN if an entry spoils the logits or was never written, and infinity if one makes the pass raise.
        """
        del layer
        self.tokens[self.write_slots] = inputs.k.numpy().ravel()
        self.positions[self.write_slots] = inputs.v.numpy().ravel()
        tokens, positions = self.tokens[self.read_slots], self.positions[self.read_slots]
        spoilt = ~(tokens < NUM_ORDINARY)
        is_spoilt = spoilt.any()
        values = tokens * 64 + positions * 8192 + 1
        mixed = (np.nan_to_num(values) if is_spoilt else values).astype(np.uint64) * self.reading.weights
        hashes = (self.reading.sums(mixed) & _MASK).astype(np.float64)
        if is_spoilt:
            raising = tokens == RAISING
            hashes[self.reading.sums((spoilt & ~raising).astype(np.uint64)) > 0] = np.nan
            hashes[self.reading.sums(raising.astype(np.uint64)) > 0] = np.inf
        out.numpy().reshape(-1)[: len(hashes)] = hashes


class ReadingBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """Reads the entries that the page table names."""

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
            features=frozenset({Feature.TREE_MASK}),
            host_lengths=HostLengths.EXACT,
        ),
    )

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._pool = context.cache.pools["kv"]
        self._pages = self._pool.table.pages.numpy()
        self._tokens, self._positions = (self._pool.plane(name)[0].view(-1).numpy() for name in ("k", "v"))

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReadingPlan:
        del buffers
        reading = Reading.of(step.batch)
        slots = reading.slots(self._pages, self._pool.page_size)
        write_slots = step.batch.pools[self._pool.key].write_slots.numpy()
        return _ReadingPlan(self._tokens, self._positions, write_slots, slots, reading)


class ReadingModel(Model):
    """Layers of two groups, which must read the same entries, and, if asked for, of others that must agree: one whose
    states follow the same tokens, one that keeps entries of several tokens, and one that attends to chosen ones."""

    def __init__(
        self,
        faults: Faults,
        watch: Callable[[Batch], None],
        *,
        compressed: CompressedSpec | None = None,
        top_k: int | None = None,
        shown: list[Tensor] | None = None,
        exchanges_rows: bool = False,
    ) -> None:
        """Calls `watch` with every batch before anything is written. With a `compressed` layer it keeps states. Adds
        its logits to `shown`, if they are to be compared. With `exchanges_rows`, steps of all replicas have one size.
        """
        self.exchanges_rows = exchanges_rows
        self._shown = shown
        self._faults = faults
        self._watch = watch
        self._state_layer = None if compressed is None else len(SPECS)
        self.specs: tuple[AttentionSpec, ...] = SPECS if compressed is None else (*SPECS, STATE_SPEC, compressed)
        self.indexers: dict[int, IndexingSpec] = {}
        if compressed is not None and (picking := picking_spec(compressed)) is not None:
            self.indexers[len(SPECS) + 1] = picking
        self._sparse_layer = None if top_k is None else len(self.specs)
        if top_k is not None:
            attention, self.indexers[len(self.specs)] = sparse_specs(top_k)
            self.specs = (*self.specs, attention)

    @property
    def turns(self) -> bool:
        return False

    def reserve(self, scratch: Scratch) -> None:
        """Reserves nothing: the model needs no memory."""

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        del scratch
        batch = planned.batch
        self._watch(batch)
        self._faults.begin_forward(batch.num_tokens, len(batch.logit_indices))
        shape = (batch.num_tokens, 1, 1)
        tokens = batch.tokens.to(DTYPE).view(shape)
        inputs = SoftmaxInputs(q=tokens, k=tokens, v=batch.positions.to(DTYPE).view(shape), sinks=None)
        read = torch.empty(len(self.specs), *shape, dtype=DTYPE)
        for layer in range(len(SPECS)):
            planned.attend(layer, inputs, read[layer])
        if self._state_layer is not None:
            read[self._state_layer] = self._summed(planned, self._state_layer)
            read[self._state_layer + 1] = self._added(planned, self._state_layer + 1)
        hashes = read[0].view(-1)
        if self._sparse_layer is not None:
            chosen = planned.choose(self._sparse_layer, index_inputs(hashes, batch.positions))
            planned.attend(self._sparse_layer, latent_inputs(hashes, batch.positions, chosen), read[self._sparse_layer])
        logits = torch.from_numpy(self._logits(batch, read.view(len(self.specs), -1).numpy()))
        if self._shown is not None:
            self._shown.append(logits.clone())
        return logits

    @staticmethod
    def _summed(planned: PlannedBatch, layer: int) -> Tensor:
        """[num_tokens, 1, 1]: the hashes that the recurrent layer finds."""
        batch = planned.batch
        mixed = torch.zeros(batch.num_tokens, STATE_SPEC.channels, dtype=DTYPE)
        mixed[:, 0], mixed[:, 1] = batch.tokens, batch.positions
        ones = torch.ones(batch.num_tokens, 1)
        out = torch.empty(batch.num_tokens, 1, STATE_SPEC.value_dim, dtype=DTYPE)
        planned.attend(layer, RecurrentInputs(mixed, -ones, ones, None, None), out)
        return out[:, :, :1]

    def _added(self, planned: PlannedBatch, layer: int) -> Tensor:
        """[num_tokens, 1, 1]: the hashes that the compressed layer finds."""
        batch = planned.batch
        out = torch.empty(batch.num_tokens, 1, PIECES, dtype=DTYPE)
        inputs = compressed_inputs(batch.tokens, batch.positions)
        if layer in self.indexers:
            inputs = replace(inputs, chosen=planned.choose(layer, picking_inputs(inputs)))
        planned.attend(layer, inputs, out)
        return out[:, :, :1]

    def _logits(self, batch: Batch, read: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns NaN for a token whose groups read different entries, or one that was never written."""
        # What layers give for padding is whatever was in memory.
        if np.isposinf(read[:, : sum(batch.work.query_lens)]).any():
            self._faults.fail(UNBEARABLE)
        wanted = read[:, batch.logit_indices.numpy()]
        agreed = (wanted == wanted[0]).all(axis=0).tolist()
        hashes = wanted[0].tolist()
        return logits_of_hashes([int(value) if same else None for value, same in zip(hashes, agreed, strict=True)])


class ReadingDefinition(ModelDefinition):
    """What the engine asks about a model before it is built."""

    def __init__(self, model: ReadingModel) -> None:
        self._model = model

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def max_positions(self) -> int:
        return MAX_LEN

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return self._model.specs

    @property
    def indexers(self) -> Mapping[int, IndexingSpec]:
        return self._model.indexers

    @property
    def exchanges_rows(self) -> bool:
        return self._model.exchanges_rows

    def step_costs(self) -> tuple[float, float]:
        return LOGIT_TICKS, 0.0

    def load(self, weights: WeightReader, taps: Taps = NO_TAPS) -> Model:
        del weights, taps
        return self._model
