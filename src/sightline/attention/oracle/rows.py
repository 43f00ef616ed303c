"""A step as the oracle's backends see it: tokens, slots and visibility for each row.

Finds slots by walking the page table itself, so that it shares no index arithmetic with the code under test. Does not
know what an entry holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.contract import CachePolicy, StepView
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.oracle.attention import loaded_entries, stored_entries, visible_keys
from sightline.attention.spec import AttentionSpec
from sightline.cache.pools import Pool
from sightline.cache.spec import SCALED_DTYPES
from sightline.cache.states import StatePool
from sightline.core.batch import MaskKind
from sightline.core.device import DeviceKind

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, eq=False)
class ReferenceRow:
    """One row of a step."""

    tokens: slice
    slots: tuple[int, ...] | None
    """Slots of all its entries, context and new; None if the row reads only the step's own entries."""
    visible: Tensor
    """[query_len, num_entries] bool: seq_len entries, or context_len if the row sees the context alone."""

    def stored(self, plane: Tensor, scale: float) -> Tensor:
        """The entries that the row reads from a layer's plane, [num_entries, ...]."""
        assert self.slots is not None, "a row without slots reads the step"
        return loaded_entries(plane[list(self.slots)], scale)

    def entries(self, plane: Tensor, scale: float, new: Tensor) -> Tensor:
        """The entries that the row reads, [num_entries, ...]: from a layer's plane, or from the step."""
        return new[self.tokens] if self.slots is None else self.stored(plane, scale)


@dataclass(frozen=True, eq=False)
class ReferenceStep:
    """A step, row by row."""

    rows: tuple[ReferenceRow, ...]
    write_slots: tuple[int, ...]
    """Slot per token; empty if nothing is written."""
    needs_lse: bool

    @staticmethod
    def of(step: StepView, spec: AttentionSpec, pool: Pool) -> ReferenceStep:
        batch = step.batch
        writes = step.policy is CachePolicy.PAGED
        write_slots = tuple(batch.pools[pool.key].write_slots.tolist()) if writes else ()
        offsets = batch.query_offsets_host()
        rows = []
        for row, (context_len, mask) in enumerate(zip(batch.context_lens.exact(), batch.masks, strict=True)):
            tokens = slice(offsets[row], offsets[row + 1])
            if tokens.start == tokens.stop:
                continue
            visible = visible_keys(spec, mask, context_len, batch.positions[tokens])
            if mask.kind is MaskKind.CONTEXT:
                visible = visible[:, :context_len]
            slots = None if step.is_transient else tuple(_walk(pool, batch.rows[row], visible.shape[1]))
            rows.append(ReferenceRow(tokens, slots, visible))
        return ReferenceStep(tuple(rows), write_slots, Feature.LSE in step.needs)

    def write(self, plane: Tensor, scale: float, new: Tensor) -> None:
        """Writes the new entries of a layer to their slots, one by one."""
        for token, slot in enumerate(self.write_slots):
            plane[slot] = stored_entries(new[token], plane.dtype, scale)


@dataclass(frozen=True, eq=False)
class StateRow:
    """One row of a step, with the slots of its states."""

    tokens: slice
    read_slot: int | None
    """None if the row begins with an empty state."""
    write_slots: tuple[int, ...]
    """The slot of the state behind each token, 0 for none; empty if none is kept."""

    def read(self, states: StatePool, plane: str, layer: int, empty: Tensor) -> Tensor:
        """Returns the state that the row begins with, from a layer's plane."""
        return empty if self.read_slot is None else states.plane(plane)[layer, self.read_slot]

    def write(self, states: StatePool, plane: str, layer: int, found: Tensor) -> None:
        """Writes the states in `found` [query_len, ...] that are kept, one by one."""
        for token, slot in enumerate(self.write_slots):
            if slot:
                states.plane(plane)[layer, slot] = found[token]


def state_rows(step: StepView) -> tuple[StateRow, ...]:
    """The rows of a step that have tokens."""
    offsets, slots, rows = step.batch.query_offsets_host(), step.states, []
    for row, (start, stop) in enumerate(pairwise(offsets)):
        if start == stop:
            continue
        if slots is None:
            rows.append(StateRow(slice(start, stop), None, ()))
        else:
            written = tuple(slots.write_slots[start:stop].tolist())
            rows.append(StateRow(slice(start, stop), int(slots.read_slots[row]), written))
    return tuple(rows)


def _walk(pool: Pool, table_row: int, length: int) -> list[int]:
    pages, size = pool.table.pages[table_row].tolist(), pool.page_size
    return [pages[entry // size] * size + entry % size for entry in range(length)]


def reference_capability(
    kind: SpecKind, features: frozenset[Feature], *, hot_entries: bool = False, scaled: bool = True
) -> Capability:
    """A capability row that serves everything of one kind. `scaled` says that a cache may have 8-bit floats."""
    return Capability(
        spec_kinds=frozenset({kind}),
        devices=frozenset({DeviceKind.CPU, DeviceKind.CUDA}),
        compute_capabilities=ANY,
        dtypes=_DTYPES,
        cache_dtypes=_DTYPES | SCALED_DTYPES if scaled else _DTYPES,
        head_dims=ANY,
        group_sizes=ANY,
        page_sizes=ANY,
        features=features,
        host_lengths=HostLengths.EXACT,
        hot_entries=hot_entries,
    )
