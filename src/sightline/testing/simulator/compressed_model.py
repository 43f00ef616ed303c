"""A group of compressed attention whose entries and open window add up to the hash of all tokens, for the simulated
model.

An entry holds the sum of what its tokens add to the hash, in pieces as `state_model` cuts them, and so does the open
window in the state. The ring has what each of the last tokens adds: those of the open window must add up to the same.
An entry that a refused guess left, one that is missing, or a state behind another number of tokens thus gives another
hash than the entries of other groups do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.compressed.inputs import CompressedIndexInputs, CompressedInputs, CompressionInputs
from sightline.attention.compressed.spec import OWN, WEIGHTED, CompressedIndexSpec, CompressedSpec, Compression
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, EntryPlan, StepView
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.sparse.chosen import fetch_slots
from sightline.cache.pools import Pool
from sightline.core.device import DeviceKind
from sightline.core.errors import PlanError
from sightline.core.page_shape import fits
from sightline.testing.simulator.numbers import DTYPE
from sightline.testing.simulator.oracle import MASK
from sightline.testing.simulator.state_model import PIECES, Total, added, behind_token, cut, joined

WINDOW = 5
_RATIOS = (2, 3, 4, 5, 8, 16)


def compressed_spec(page_size: int, choice: int, top_k: int | None = None) -> CompressedSpec:
    """A layer whose entries fit pages of that size; `choice` says which of several it is. With a `top_k` an indexer
    chooses so many entries, which the layer looks at; it adds up all of them either way."""
    fitting = [ratio for ratio in _RATIOS if fits(page_size, ratio)]
    compression = Compression(fitting[choice % len(fitting)], overlap=False, rope_dim=0, norm_eps=1e-6)
    return CompressedSpec(1, PIECES, 1.0, WINDOW, compression, top_k)


def picking_spec(spec: CompressedSpec) -> CompressedIndexSpec | None:
    """The indexer of a layer; None if it chooses nothing."""
    if spec.top_k is None or spec.compression is None:
        return None
    return CompressedIndexSpec(1, 1, spec.top_k, spec.compression)


def picking_inputs(inputs: CompressedInputs) -> CompressedIndexInputs:
    """The inputs of the layer's indexer, which reads positions alone."""
    assert inputs.entries is not None, "the layer has entries"
    return CompressedIndexInputs(inputs.q, inputs.key, inputs.entries)


def picked(position: int, ratio: int, top_k: int) -> list[int]:
    """The entries that the token at a position looks at: some of those that it sees, most of them the same as for the
    token before."""
    seen = range((position + 1) // ratio)
    return sorted(sorted(seen, key=lambda entry: (entry * 37 + position // 3 * 11) % 101)[:top_k])


def compressed_inputs(tokens: Tensor, positions: Tensor) -> CompressedInputs:
    """Tokens and positions as keys; nothing else is read."""
    key = torch.zeros(len(tokens), PIECES, dtype=DTYPE)
    key[:, 0], key[:, 1] = tokens, positions
    none = torch.empty(len(tokens), 0)
    entries = CompressionInputs(key, key, torch.ones(PIECES), none, none)
    return CompressedInputs(key.unsqueeze(1), key, torch.zeros(1), entries)


class _Row(NamedTuple):
    """One row of a step."""

    read_slot: int
    context: int
    length: int
    slots: Sequence[int]
    """The slots of its entries."""


class _Planes(NamedTuple):
    """What the layer keeps."""

    window: NDArray[np.float64]
    """[num_slots, window, pieces]."""
    sums: NDArray[np.float32]
    """[num_slots, pieces]."""
    entries: NDArray[np.float64]
    """[num_slots, pieces]."""


@dataclass(frozen=True, eq=False)
class _AddingPlan(AttentionPlan[CompressedInputs]):
    planes: _Planes
    ratio: int
    rows: tuple[_Row, ...]
    kept: tuple[int, ...]
    hot: EntryPlan | None
    """None if entries are on the device."""

    def prepare(self) -> None:
        if self.hot is not None:
            self.hot.prepare()

    def run(self, layer: int, inputs: CompressedInputs, out: Tensor) -> None:
        """Hashes the tokens up to each new one, and keeps what later steps go on from."""
        numbers, results, place = inputs.key.numpy(), out.numpy(), 0
        for row in self.rows:
            self._run_row(row, numbers[place : place + row.length], results, place)
            place += row.length
        if self.hot is not None:
            self.hot.keep(layer)
            self._look(layer, self.hot, inputs, out)

    def _look(self, layer: int, hot: EntryPlan, inputs: CompressedInputs, out: Tensor) -> None:
        """Gives NaN for tokens whose choice is wrong, or of which an entry is not where the coordinator says."""
        chosen, plane = inputs.chosen, hot.plane(layer)
        if chosen is None:
            out[:] = torch.nan
            return
        rows = [row for row in self.rows for _ in range(row.length)]
        slots = torch.zeros(chosen.shape, dtype=torch.int64)
        for turn in hot.turns:
            fetch_slots(turn, layer, chosen, slots)
            for token in [each for each in turn.tokens.indices.tolist() if each < len(rows)]:
                wanted = picked(int(inputs.key[token, 1]), self.ratio, chosen.shape[1])
                found = plane[slots[token, : len(wanted)]].numpy()
                right = self.planes.entries[[rows[token].slots[number] for number in wanted]]
                is_right = chosen[token, : len(wanted)].tolist() == wanted
                if not (is_right and np.array_equal(found, right, equal_nan=True)):
                    out[token] = torch.nan

    def _store(self, row: _Row, number: int, token: int, entry: NDArray[np.float64]) -> None:
        """Writes an entry that a token of the step completes."""
        if self.hot is None or self.hot.new_slots is None:
            self.planes.entries[row.slots[number]] = entry
        else:
            self.hot.plane(0)[self.hot.new_slots[token]] = torch.from_numpy(entry)

    def _run_row(self, row: _Row, numbers: NDArray[Any], results: NDArray[Any], place: int) -> None:
        planes, ratio = self.planes, self.ratio
        ring, opened = planes.window[row.read_slot].copy(), joined(planes.sums[row.read_slot])
        known: Total = 0
        for slot in row.slots[: row.context // ratio]:
            known = added(known, joined(planes.entries[slot]))
        for index, (token, number) in enumerate(numbers[:, :2].tolist()):
            position = int(number)
            part = behind_token(0, token, position)
            ring[position % WINDOW], opened = cut(part), added(opened, part)
            if (position + 1) % ratio == 0:
                entry = np.asarray(cut(opened))
                self._store(row, position // ratio, place + index, entry)
                known, opened = added(known, joined(entry)), 0
            total = added(known, opened)
            if not _agree(ring, position, (position + 1) % ratio, opened):
                total = math.nan
            results[place + index] = total if isinstance(total, float) else float(total & MASK)
            if slot := self.kept[place + index]:
                planes.window[slot], planes.sums[slot] = ring, cut(opened)


def _agree(ring: NDArray[np.float64], position: int, count: int, opened: Total) -> bool:
    """True if the last `count` tokens of a ring add up to the sum of an open window, as far as the ring has them."""
    if count > WINDOW:
        return True
    near: Total = 0
    for back in range(count):
        near = added(near, joined(ring[(position - back) % WINDOW]))
    return isinstance(opened, float) or near == opened


class AddingBackend(AttentionBackend[CompressedSpec, CompressedInputs]):
    """Reads the states that the step names, and the entries that the page table names."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        Capability(
            spec_kinds=frozenset({SpecKind.COMPRESSED}),
            devices=frozenset({DeviceKind.CPU}),
            compute_capabilities=ANY,
            dtypes=frozenset({DTYPE}),
            cache_dtypes=frozenset({DTYPE}),
            head_dims=frozenset({PIECES}),
            group_sizes=frozenset({1}),
            page_sizes=ANY,
            features=frozenset({Feature.WINDOW, Feature.SPARSE}),
            host_lengths=HostLengths.EXACT,
            hot_entries=True,
        ),
    )

    def __init__(self, context: BackendContext[CompressedSpec]) -> None:
        self._ratio = context.spec.tokens_per_entry
        self._pool: Pool = context.cache.pools["entry"]
        self._cache, self._coordinator = context.cache, context.coordinator
        states = context.cache.states
        self._planes = _Planes(
            states.plane("window")[0].numpy(),
            states.plane("sums")[0, :, OWN, WEIGHTED].numpy(),
            self._pool.plane("entry")[0].numpy(),
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> _AddingPlan:
        hot = self._coordinator.plan(step, buffers) if self._cache.is_on_host else None
        slots, batch = step.states, step.batch
        if slots is None:
            raise PlanError("expected steps with a cache, which is all that the simulation runs, got one without")
        rows = []
        facts = zip(slots.read_slots.tolist(), batch.context_lens.exact(), batch.query_lens.exact(), strict=True)
        for place, (read_slot, context, count) in enumerate(facts):
            entries = torch.arange((context + count) // self._ratio)
            table_rows = torch.full_like(entries, batch.rows[place] if place < len(batch.rows) else 0)
            found = self._pool.entry_slots(table_rows, entries).tolist()
            rows.append(_Row(read_slot, context, count, found))
        return _AddingPlan(self._planes, self._ratio, tuple(rows), slots.kept_host, hot)


@dataclass(frozen=True, eq=False)
class _PickingPlan(AttentionPlan[CompressedIndexInputs]):
    spec: CompressedIndexSpec
    is_sparse: bool

    def prepare(self) -> None:
        """Nothing is shared between layers."""

    def run(self, layer: int, inputs: CompressedIndexInputs, out: Tensor) -> None:
        del layer
        for token, position in enumerate(inputs.weights[:, 1].tolist() if self.is_sparse else ()):
            wanted = picked(int(position), self.spec.compression.ratio, self.spec.top_k)
            out[token] = torch.tensor([*wanted, *[-1] * (self.spec.top_k - len(wanted))], dtype=torch.int32)


class PickingBackend(AttentionBackend[CompressedIndexSpec, CompressedIndexInputs]):
    """Chooses entries by their numbers and the token's position, and keeps nothing."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        replace(
            AddingBackend.capabilities[0],
            spec_kinds=frozenset({SpecKind.COMPRESSED_INDEX}),
            head_dims=ANY,
            features=frozenset({Feature.SPARSE}),
            hot_entries=False,
        ),
    )

    def __init__(self, context: BackendContext[CompressedIndexSpec]) -> None:
        self._spec = context.spec

    def plan(self, step: StepView, buffers: PlanBuffers) -> _PickingPlan:
        del buffers
        return _PickingPlan(self._spec, step.is_sparse)
