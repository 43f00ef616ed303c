"""Calls of the attention kernels, shared by both backends: leases, plans and records.

Knows kernels, leases and lengths. Does not know what a layer caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import StepView
from sightline.cache.pools import Pool
from sightline.core.batch import MaskKind
from sightline.kernels.cpu.attend import (
    FIELDS,
    SLOTS,
    make_attend,
    make_locate,
    make_merge,
    make_write,
    scratch_floats,
)
from sightline.kernels.cpu.attend_prompt import make_attend_prompt, scratch_numbers
from sightline.kernels.cpu.compiled import Kernel, compiled
from sightline.kernels.cpu.instructions import ELEMENTS
from sightline.kernels.cpu.record import Launcher, Record, float_bits

Lease = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Takes a lease, given a name, a shape and a dtype."""
UNITS_PER_THREAD = 8
"""Contexts are split until each thread has so many units, so that all are done at about the same time."""


@dataclass(frozen=True)
class AttentionShape:
    """What the kernels are compiled and leased for."""

    num_kv_heads: int
    group: int
    """Query heads that share a key head."""
    key_dim: int
    value_dim: int

    def num_splits(self, num_tokens: int, num_threads: int) -> int:
        """How often each context is split: as often as the threads need to be busy."""
        return -(-UNITS_PER_THREAD * num_threads // max(1, num_tokens))

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass(frozen=True, eq=False)
class AttentionScratch:
    """A lane's leases."""

    located: Tensor
    """[max_step_tokens, FIELDS] int64: which keys each token sees."""
    parts: Tensor
    """[most parts, value_dim + 2] fp32: results of splits."""
    threads: Tensor
    """[num_threads, floats of a thread] fp32."""
    slots: Tensor
    """[num_threads, SLOTS] int64."""
    prompts: Tensor
    """[num_threads, floats of a thread] fp32, for rows with many new tokens."""

    @staticmethod
    def of(lease: Lease, shape: AttentionShape, max_tokens: int, num_threads: int) -> AttentionScratch:
        # Splits times units is less than twice what the threads need.
        most_parts = 2 * UNITS_PER_THREAD * num_threads * shape.num_heads
        floats = scratch_floats(shape.num_heads, shape.group, shape.key_dim, shape.value_dim)
        return AttentionScratch(
            lease("located", (max_tokens, FIELDS), torch.int64),
            lease("parts", (most_parts, shape.value_dim + 2), torch.float32),
            lease("threads", (num_threads, floats), torch.float32),
            lease("slots", (num_threads, SLOTS), torch.int64),
            lease(
                "prompts",
                (num_threads, scratch_numbers(shape.group, shape.key_dim, shape.value_dim)),
                torch.float32,
            ),
        )


@dataclass(frozen=True, eq=False)
class Entries:
    """Keys or values of a layer, [num_slots, num_heads, size], and the factor that gives their real values."""

    plane: Tensor
    scale: float

    @property
    def place(self) -> tuple[int, int, int]:
        return self.plane.data_ptr(), self.plane.stride(0), self.plane.stride(1)


@dataclass(frozen=True, eq=False)
class Pages:
    """Where a row's entries are in a pool."""

    table: Tensor
    page_size: int


_KINDS = {MaskKind.CAUSAL: 0, MaskKind.FULL: 1, MaskKind.TREE: 2}


@dataclass(frozen=True, eq=False)
class RowMasks:
    """Masks of a step in which not all rows are causal."""

    kinds: Tensor
    """[num_rows] int64, see `kernels.cpu.attend.make_locate`."""
    places: Tensor
    """[num_rows] int64: where each row's tree begins."""
    trees: Tensor
    """All trees, uint8."""


def layer_entries(pool: Pool, name: str) -> tuple[Entries, ...]:
    """The entries of each layer of a pool."""
    return tuple(
        Entries(plane if plane.dim() == 3 else plane.unsqueeze(1), scale)
        for plane, scale in zip(pool.plane(name).unbind(0), pool.scales(name), strict=True)
    )


class AttentionCalls:
    """Makes and launches the records of attention of one shape."""

    def __init__(
        self,
        launcher: Launcher,
        shape: AttentionShape,
        q: torch.dtype,
        cache: torch.dtype,
        entry: torch.dtype,
        out: torch.dtype,
    ) -> None:
        """`q` and `out` are the dtypes that attention reads and writes, `entry` the one of new entries."""
        self._launcher = launcher
        self._shape = shape
        elements = ELEMENTS[q], shape.key_dim, shape.value_dim, shape.group, ELEMENTS[out]
        self._attend = {
            dtype: compiled(make_attend, elements[0], ELEMENTS[dtype], *elements[1:]) for dtype in {cache, entry}
        }
        self._attend_prompt = {
            dtype: compiled(make_attend_prompt, elements[0], ELEMENTS[dtype], *elements[1:]) for dtype in {cache, entry}
        }
        self._write = compiled(make_write, ELEMENTS[entry], ELEMENTS[cache])
        self._merge = compiled(make_merge, ELEMENTS[q], shape.value_dim, ELEMENTS[out])
        self._locate = compiled(make_locate)

    def locate(self, step: StepView, masks: RowMasks | None, window: int | None, scratch: AttentionScratch) -> None:
        """Finds which keys each token sees."""
        batch = step.batch
        lens = batch.query_lens.device
        rows = () if step.is_transient else (batch.context_lens.device, batch.table_rows)
        extra = () if masks is None else (masks.kinds, masks.places, masks.trees, batch.positions)
        arguments = (
            lens.data_ptr(),
            *([each.data_ptr() for each in rows] or [0, 0]),
            batch.num_rows,
            batch.num_tokens,
            window or 0,
            scratch.located.data_ptr(),
            *([each.data_ptr() for each in extra] or [0, 0, 0, 0]),
        )
        self._launch(self._locate, arguments, lens, *rows, *extra, scratch.located)

    def write(self, x: Tensor, entries: Entries, slots: Tensor) -> None:
        """Writes x [num_tokens, num_heads, size] to the cache."""
        arguments = (x.data_ptr(), *x.stride()[:2], *x.shape, *entries.place, slots.data_ptr())
        self._launch(self._write, (*arguments, float_bits(entries.scale)), x, entries.plane, slots)

    def attend(
        self,
        q: Tensor,
        keys: Entries,
        values: Entries,
        pages: Pages | None,
        scratch: AttentionScratch,
        out: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """Writes `out` [num_tokens, num_q_heads, value_dim] and `lse` [num_tokens, num_q_heads] fp32 if it is given.

        Without pages, `keys` and `values` are those of the step's tokens.
        """
        num_tokens, heads = q.shape[:2]
        if num_tokens == 0:
            return
        num_splits = self._shape.num_splits(num_tokens, self._launcher.num_threads)
        sink_place = 0 if sinks is None else sinks.data_ptr()
        lse_place = 0 if lse is None else lse.data_ptr()
        value_factor = float_bits(values.scale)
        place = (out.data_ptr(), *out.stride()[:2])
        table = (0, 0, 1) if pages is None else (pages.table.data_ptr(), pages.table.stride(0), pages.page_size)
        arguments = (
            *(q.data_ptr(), *q.stride()[:2], *keys.place, *values.place, *table),
            *(scratch.located.data_ptr(), num_tokens, self._shape.num_kv_heads, num_splits),
            *(float_bits(scale * keys.scale), float_bits(softcap or 0.0), value_factor, sink_place),
            *(*place, lse_place, scratch.parts.data_ptr()),
            *(scratch.threads.data_ptr(), scratch.threads.stride(0), scratch.slots.data_ptr(), heads),
        )
        kept = (q, keys.plane, values.plane, pages, scratch, sinks, out, lse)
        self._launch(self._attend[keys.plane.dtype], arguments, *kept)
        if num_splits > 1:
            counts = (scratch.located.data_ptr(), num_tokens, heads, num_splits, value_factor, sink_place)
            self._launch(self._merge, (scratch.parts.data_ptr(), *counts, *place, lse_place), *kept)

    def attend_prompt(
        self,
        step: StepView,
        q: Tensor,
        keys: Entries,
        values: Entries,
        pages: Pages | None,
        scratch: AttentionScratch,
        out: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """`attend`, for rows with many new tokens and without trees."""
        lens = step.batch.query_lens.device
        table = (0, 0, 1) if pages is None else (pages.table.data_ptr(), pages.table.stride(0), pages.page_size)
        arguments = (
            *(q.data_ptr(), *q.stride()[:2], *keys.place, *values.place, *table),
            *(scratch.located.data_ptr(), lens.data_ptr(), step.batch.num_rows, self._shape.num_kv_heads),
            *(float_bits(scale * keys.scale), float_bits(softcap or 0.0), float_bits(values.scale)),
            *(0 if sinks is None else sinks.data_ptr(), out.data_ptr(), *out.stride()[:2]),
            *(0 if lse is None else lse.data_ptr(), scratch.prompts.data_ptr(), scratch.prompts.stride(0)),
        )
        kept = (q, keys.plane, values.plane, pages, scratch, lens, sinks, out, lse)
        self._launch(self._attend_prompt[keys.plane.dtype], arguments, *kept)

    def _launch(self, kernel: Kernel, arguments: tuple[int, ...], *keeps: object) -> None:
        numbers = np.array(arguments, dtype=np.int64)
        self._launcher.launch(Record(kernel.address, numbers, (kernel, *keeps), kernel.name))


def plan_masks(step: StepView, buffers: PlanBuffers) -> RowMasks | None:
    """The masks of all rows; None if all are causal."""
    masks = step.batch.masks
    if all(mask.kind is MaskKind.CAUSAL for mask in masks):
        return None
    trees = [mask.tree.reshape(-1) for mask in masks if mask.tree is not None]
    sizes = [0 if mask.tree is None else mask.tree.numel() for mask in masks]
    places = [0, *itertools.accumulate(sizes[:-1])]
    planned = RowMasks(
        buffers.take("mask kinds", (len(masks),), torch.int64),
        buffers.take("tree places", (len(masks),), torch.int64),
        buffers.take("trees", (sum(sizes),), torch.uint8),
    )
    planned.kinds.copy_(torch.tensor([_KINDS[mask.kind] for mask in masks]))
    planned.places.copy_(torch.tensor(places))
    if trees:
        torch.cat([tree.to(torch.uint8) for tree in trees], out=planned.trees)
    return planned
