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
from sightline.attention.contract import LatentInputs, StepView
from sightline.cache.pools import Pool
from sightline.core.batch import MaskKind
from sightline.kernels.cpu.attend import FIELDS, make_locate, make_write
from sightline.kernels.cpu.attend_kernel import (
    STATE_EXTRA,
    AttendArguments,
    attend_kernel,
    merge_kernel,
    scratch_bytes,
)
from sightline.kernels.cpu.attend_prompt import attend_prompt_kernel, prompt_scratch_bytes
from sightline.kernels.cpu.attend_tiles import AttendForm
from sightline.kernels.cpu.compiled import compiled
from sightline.kernels.cpu.compiler import CompiledKernel
from sightline.kernels.cpu.instructions import ELEMENTS
from sightline.kernels.cpu.latent import make_absorb, make_project
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.record import Launcher, Record, float_bits

Lease = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Takes a lease, given a name, a shape and a dtype."""
UNITS_PER_THREAD = 2
"""Contexts are split until each thread has so many units. Units of rows of different lengths take different times."""

NO_PAGES = 1 << 31
"""The size of the one page that a row has if it has no page table."""


@dataclass(frozen=True)
class AttentionShape:
    """The sizes that kernels are compiled for and scratch memory is leased for."""

    num_kv_heads: int
    group: int
    """Query heads that share a key head."""
    key_dim: int
    value_dim: int
    has_prompts: bool = False
    """True if rows with many new tokens have a kernel of their own."""

    def num_splits(self, num_tokens: int, num_threads: int) -> int:
        """The number of parts of each context: enough to keep all threads busy."""
        return -(-UNITS_PER_THREAD * num_threads // max(1, num_tokens))

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def thread_bytes(self) -> int:
        """The memory that a thread needs."""
        decode = scratch_bytes(self.num_heads, self.key_dim, self.value_dim)
        prompts = prompt_scratch_bytes(self.group, self.key_dim, self.value_dim)
        return max(decode, prompts) if self.has_prompts else decode


@dataclass(frozen=True, eq=False)
class AttentionScratch:
    """A lane's leases."""

    located: Tensor
    """[max_step_tokens, FIELDS] int64: which keys each token sees."""
    parts: Tensor
    """[most parts, value_dim + STATE_EXTRA] fp32: states of splits."""
    threads: Tensor
    """[num_threads, bytes of a thread] uint8."""

    @staticmethod
    def of(lease: Lease, shape: AttentionShape, max_tokens: int, num_threads: int) -> AttentionScratch:
        # Splits times units is less than twice what the threads need.
        most_parts = 2 * UNITS_PER_THREAD * num_threads * shape.num_heads
        return AttentionScratch(
            lease("located", (max_tokens, FIELDS), torch.int64),
            lease("parts", (most_parts, shape.value_dim + STATE_EXTRA), torch.float32),
            lease("threads", (num_threads, shape.thread_bytes), torch.uint8),
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


_KINDS = {MaskKind.CAUSAL: 0, MaskKind.FULL: 1, MaskKind.TREE: 2, MaskKind.CONTEXT: 3}


@dataclass(frozen=True, eq=False)
class RowMasks:
    """Masks of a step in which not all rows are causal."""

    kinds: Tensor
    """[num_rows] int64, see `kernels.cpu.attend.make_locate`."""
    places: Tensor
    """[num_rows] int64: where each row's tree begins."""
    trees: Tensor
    """All trees, uint8."""


def place_in_bytes(rows: Tensor) -> tuple[int, int, int]:
    """The address of [num_rows, num_heads, size], and the bytes from a row to the next and from a head to the next."""
    return rows.data_ptr(), rows.stride(0) * rows.itemsize, rows.stride(1) * rows.itemsize


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
        processor, sizes = Processor.detect(), (shape.group, shape.key_dim, shape.value_dim)
        forms = {dtype: AttendForm(q, dtype, out, *sizes) for dtype in {cache, entry}}
        self._attend = {dtype: attend_kernel(form, processor) for dtype, form in forms.items()}
        self._merge = {dtype: merge_kernel(form, processor) for dtype, form in forms.items()}
        prompt_forms = forms if shape.has_prompts else {}
        self._attend_prompt = {dtype: attend_prompt_kernel(form, processor) for dtype, form in prompt_forms.items()}
        self._write = {dtype: compiled(make_write, ELEMENTS[entry], ELEMENTS[dtype]) for dtype in {cache, entry}}
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
        launch_kernel(self._launcher, self._locate, arguments, lens, *rows, *extra, scratch.located)

    def write(self, x: Tensor, entries: Entries, slots: Tensor) -> None:
        """Writes x [num_tokens, num_heads, size] to slots of the entries."""
        arguments = (x.data_ptr(), *x.stride()[:2], *x.shape, *entries.place, slots.data_ptr())
        kernel = self._write[entries.plane.dtype]
        launch_kernel(self._launcher, kernel, (*arguments, float_bits(entries.scale)), x, entries.plane, slots)

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
        query_lens: Tensor | None = None,
    ) -> None:
        """Writes `out` [num_tokens, num_q_heads, value_dim] and `lse` [num_tokens, num_q_heads] fp32 if it is given.

        Without pages, `keys` and `values` are those of the step's tokens. Given `query_lens` [num_rows] int64, the
        tokens of a row share the keys that are read; rows must not have trees.
        """
        num_tokens = q.shape[0]
        if num_tokens == 0:
            return
        num_splits = self._shape.num_splits(num_tokens, self._launcher.num_threads)
        attend, is_split, rows = self._attend, num_splits > 1, (0, 0)
        if query_lens is not None:
            attend, is_split, rows = self._attend_prompt, False, (query_lens.data_ptr(), len(query_lens))
        table = (0, 0, NO_PAGES)
        if pages is not None:
            table = (pages.table.data_ptr(), 8 * pages.table.stride(0), pages.page_size)
        arguments = AttendArguments(
            *place_in_bytes(q),
            *place_in_bytes(keys.plane),
            *place_in_bytes(values.plane),
            *table,
            located=scratch.located.data_ptr(),
            num_tokens=num_tokens,
            num_kv_heads=self._shape.num_kv_heads,
            num_splits=num_splits,
            score_factor=float_bits(scale * keys.scale),
            softcap=float_bits(softcap or 0.0),
            value_factor=float_bits(values.scale),
            sinks=address(sinks),
            out=out.data_ptr(),
            out_token_bytes=out.stride(0) * out.itemsize,
            out_head_bytes=out.stride(1) * out.itemsize,
            lse=address(lse),
            parts=scratch.parts.data_ptr(),
            scratch=scratch.threads.data_ptr(),
            scratch_bytes=scratch.threads.stride(0),
            query_lens=rows[0],
            num_rows=rows[1],
        )
        kept = (q, keys.plane, values.plane, pages, scratch, sinks, out, lse, query_lens)
        launch_kernel(self._launcher, attend[keys.plane.dtype], arguments, *kept)
        if is_split:
            launch_kernel(self._launcher, self._merge[keys.plane.dtype], arguments, *kept)


class LatentCalls:
    """Makes and launches the records around absorbed latent attention."""

    def __init__(self, launcher: Launcher, dtype: torch.dtype) -> None:
        """`dtype` is the one of queries, projections and outputs."""
        self._launcher = launcher
        self._absorb = compiled(make_absorb, ELEMENTS[dtype], ELEMENTS[dtype])
        self._project = compiled(make_project, ELEMENTS[dtype], ELEMENTS[dtype])

    def absorb(self, inputs: LatentInputs, out: Tensor) -> None:
        """Writes queries in latent space, out [num_tokens, heads, latent + rope] fp32."""
        nope, rope, key_up = inputs.q_nope, inputs.q_rope, inputs.key_up
        arguments = (
            *(nope.data_ptr(), *nope.stride()[:2], rope.data_ptr(), *rope.stride()[:2]),
            *(key_up.data_ptr(), *key_up.stride()[:2], out.data_ptr(), *nope.shape[:2]),
            *(*key_up.shape[1:], rope.shape[2]),
        )
        launch_kernel(self._launcher, self._absorb, arguments, nope, rope, key_up, out)

    def project(self, found: Tensor, value_up: Tensor, located: Tensor, out: Tensor) -> None:
        """Writes values, out [num_tokens, heads, value_dim], of weighted latents [num_tokens, heads, latent] fp32."""
        arguments = (
            *(found.data_ptr(), value_up.data_ptr(), *value_up.stride()[:2], out.data_ptr(), *out.stride()[:2]),
            *(located.data_ptr(), *out.shape, found.shape[2]),
        )
        launch_kernel(self._launcher, self._project, arguments, found, value_up, located, out)


def launch_kernel(launcher: Launcher, kernel: CompiledKernel, arguments: tuple[int, ...], *keeps: object) -> None:
    """Launches a call of a kernel; `keeps` owns the memory that it reads and writes."""
    numbers = np.array(arguments, dtype=np.int64)
    launcher.launch(Record(kernel.address, numbers, (kernel, *keeps), kernel.name))


def address(tensor: Tensor | None) -> int:
    """The address of a tensor's memory; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


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
