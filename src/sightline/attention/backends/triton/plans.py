"""Planning shared by both Triton backends: decoded and extended rows, leases, and non-causal masks.

Knows devices, leases and batches. Does not know what a layer caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import StepView
from sightline.cache.pools import Pool
from sightline.core.batch import Batch, MaskKind, RowMask
from sightline.kernels.triton.decode_shares import DecodeConfig, DecodeRows, DecodeScratch
from sightline.kernels.triton.extend_rules import CAUSAL_ROWS, CONTEXT_ROWS, FULL_ROWS, ExtendMasks, LaunchMask
from sightline.kernels.triton.extend_tiles import ExtendConfig, Tiles, prepare_tiles

Lease = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Takes a lease, given a name, a shape and a dtype."""

_KINDS = {
    MaskKind.CAUSAL: LaunchMask.CAUSAL,
    MaskKind.FULL: LaunchMask.FULL,
    MaskKind.TREE: LaunchMask.TREE,
    MaskKind.CONTEXT: LaunchMask.CONTEXT,
}
_ALIKE = {MaskKind.CAUSAL: CAUSAL_ROWS, MaskKind.FULL: FULL_ROWS, MaskKind.CONTEXT: CONTEXT_ROWS}
"""The masks of steps whose rows all have the same."""


@dataclass(frozen=True, eq=False)
class PlannedDecode:
    """Rows of at most one new token."""

    rows: DecodeRows
    scratch: DecodeScratch
    config: DecodeConfig


@dataclass(frozen=True, eq=False)
class PlannedExtend:
    """Rows of any number of new tokens."""

    query_lens: Tensor
    context_lens: Tensor | None
    """None under `TRANSIENT`, like the page-table rows."""
    table_rows: Tensor | None
    served: Tensor | None
    """[num_rows] int8: 1 for extended rows; None if all are."""
    query_offsets: Tensor
    tiles: Tiles
    masks: ExtendMasks
    config: ExtendConfig
    num_tokens: int

    @staticmethod
    def of(
        step: StepView,
        config: ExtendConfig,
        tiles: Tiles,
        query_offsets: Tensor,
        served: Tensor | None,
        buffers: PlanBuffers,
    ) -> PlannedExtend:
        """The rows that are `served`; `query_offsets` [max_rows + 1] int64."""
        batch = step.batch
        return PlannedExtend(
            query_lens=batch.query_lens.device,
            context_lens=None if step.is_transient else batch.context_lens.device,
            table_rows=None if step.is_transient else batch.table_rows,
            served=served,
            query_offsets=query_offsets[: batch.num_rows + 1],
            tiles=tiles,
            masks=plan_masks(batch, buffers),
            config=config,
            num_tokens=batch.num_tokens,
        )

    def prepare(self) -> None:
        """Distributes the queries over tiles, on the device."""
        prepare_tiles(
            self.query_lens,
            self.context_lens,
            self.table_rows,
            self.num_tokens,
            self.query_offsets,
            self.tiles,
            self.served,
        )


def lease_decode(lease: Lease, config: DecodeConfig, max_rows: int, value_dim: int) -> DecodeScratch:
    programs = config.num_programs
    return DecodeScratch(
        starts=lease("starts", (programs, 8), torch.int32),
        cuts=lease("cuts", (programs, 8), torch.int32),
        row_tokens=lease("row tokens", (max_rows,), torch.int32),
        out=lease("parts", (2 * programs, config.heads, value_dim), torch.float32),
        stats=lease("part stats", (2 * programs, 2, config.heads), torch.float32),
    )


def decode_rows(batch: Batch, count: int, pool: Pool) -> DecodeRows:
    """Decode inputs for the first `count` rows of a batch."""
    return DecodeRows(
        query_lens=batch.query_lens.device[:count],
        context_lens=batch.context_lens.device[:count],
        table_rows=batch.table_rows[:count],
        write_slots=batch.pools[pool.key].write_slots,
        pages=pool.table.pages,
        page_size=pool.page_size,
    )


def layer_scales(pool: Pool, plane: str) -> tuple[Tensor | None, ...]:
    """Per layer: [1] fp32, or None if entries are not scaled."""
    if pool.plane(plane).dtype is not torch.float8_e4m3fn:
        return (None,) * pool.spec.num_layers
    return tuple(pool.scales_device(plane).unsqueeze(1).unbind(0))


def plan_masks(batch: Batch, buffers: PlanBuffers) -> ExtendMasks:
    """The masks of all rows. If all are of one kind, nothing is needed on the device."""
    kinds = {mask.kind for mask in batch.masks}
    if not kinds:
        return CAUSAL_ROWS
    if len(kinds) == 1 and MaskKind.TREE not in kinds:
        return _ALIKE[kinds.pop()]
    row_kinds = buffers.take("row kinds", (batch.num_rows,), torch.int8)
    row_kinds.copy_(torch.tensor([_KINDS[mask.kind] for mask in batch.masks], dtype=torch.int8), non_blocking=True)
    if MaskKind.TREE not in kinds:
        return ExtendMasks(LaunchMask.BY_ROW, row_kinds)
    trees, offsets = _plan_trees(batch.masks, buffers)
    return ExtendMasks(LaunchMask.BY_ROW, row_kinds, trees, offsets, batch.positions)


def _plan_trees(masks: Sequence[RowMask], buffers: PlanBuffers) -> tuple[Tensor, Tensor]:
    """All trees concatenated, and the offset of each row's tree."""
    sizes = [0 if mask.tree is None else mask.tree.numel() for mask in masks]
    trees = buffers.take("trees", (sum(sizes),), torch.uint8)
    torch.cat([mask.tree.reshape(-1).to(trees) for mask in masks if mask.tree is not None], out=trees)
    offsets = buffers.take("tree offsets", (len(sizes),), torch.int64)
    offsets.copy_(torch.tensor([0, *itertools.accumulate(sizes[:-1])], dtype=torch.int64), non_blocking=True)
    return trees, offsets
