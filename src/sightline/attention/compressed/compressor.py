"""Compresses the tokens of a step: writes the entries that they complete, and the sums behind kept tokens.

Jobs are computed in blocks of bounded size, with tokens side by side, in fp32. Indices are made once per step, for all
layers. Does not know attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.compressed.inputs import CompressionInputs
from sightline.attention.compressed.layout import CompressionLayout, SumJob
from sightline.attention.compressed.spec import BEFORE, NEXT, OWN, Compression
from sightline.attention.compressed.sums import finished_entries, mixed_sums, sum_tokens
from sightline.core.lengths import moved

MAX_ELEMENTS = 1 << 22
"""Elements of the largest intermediate result: 16 MiB in fp32. Larger ones are split."""


@dataclass(frozen=True, eq=False)
class SumBlock:
    """Jobs that are computed together."""

    jobs: slice
    tokens: Tensor
    """[num_jobs * width] int64: the tokens of each job; its last one is repeated."""
    missing: Tensor | None
    """[num_jobs, width, 1] bool: True where a token is repeated; None if none is."""
    starts: Tensor
    """[num_jobs] int64: the row whose sums each goes on from."""


@dataclass(frozen=True, eq=False)
class KeptSlots:
    """The sums that are kept."""

    jobs: Tensor
    """[num_kept] int64: the number of jobs for an open window without tokens."""
    before: Tensor
    """[num_kept] int64: see `CompressionLayout`."""
    slots: Tensor
    """[num_kept] int64."""


@dataclass(frozen=True, eq=False)
class Compressor:
    """A planned step of a group's compression."""

    compression: Compression
    head_dim: int
    num_jobs: int
    read_slots: Tensor | None
    """[num_rows] int64: the states that rows begin with; None if these are empty."""
    num_rows: int
    blocks: tuple[SumBlock, ...]
    entry_jobs: Tensor
    """[num_entries] int64."""
    entry_before: Tensor
    """[num_entries] int64: see `CompressionLayout`."""
    entry_tokens: Tensor
    """[num_entries] int64: the tokens that complete the entries."""
    kept: KeptSlots | None

    def run(self, inputs: CompressionInputs, plane: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[num_entries, head_dim] of `dtype`: the new entries. Writes the sums that are kept to `plane` [num_slots,
        num_sums, 3, head_dim], a layer's, which is None if there are no states."""
        starts, found = self._starts(inputs, plane), self._found(inputs)
        for block in self.blocks:
            self._sum(block, inputs, starts, found)
        before = self._before(starts, found)
        if self.kept is not None and plane is not None:
            plane.index_copy_(0, self.kept.slots, self._kept(self.kept, found, before))
        own = found.index_select(0, self.entry_jobs)[..., -self.head_dim :]
        mixed = mixed_sums(own, None if before is None else before.index_select(0, self.entry_before))
        cos, sin = (each.index_select(0, self.entry_tokens) for each in (inputs.cos, inputs.sin))
        return finished_entries(mixed, inputs.norm, self.compression.norm_eps, cos, sin).to(dtype)

    def _starts(self, inputs: CompressionInputs, plane: Tensor | None) -> Tensor:
        """[num_rows + 1, num_sums, 3, head_dim] fp32: the sums that rows begin with, and empty ones."""
        shape = (self.num_rows + 1, self.compression.num_sums, 3, self.head_dim)
        starts = torch.zeros(shape, dtype=torch.float32, device=inputs.values.device)
        if plane is not None and self.read_slots is not None:
            torch.index_select(plane, 0, self.read_slots, out=starts[:-1])
        return starts

    def _found(self, inputs: CompressionInputs) -> Tensor:
        """[num_jobs + 1, 3, width] fp32: room for the sums of jobs, and empty ones behind them."""
        shape = (self.num_jobs + 1, 3, self.compression.width(self.head_dim))
        found = torch.empty(shape, dtype=torch.float32, device=inputs.values.device)
        found[-1] = 0.0
        return found

    def _sum(self, block: SumBlock, inputs: CompressionInputs, starts: Tensor, found: Tensor) -> None:
        shape = (block.starts.shape[0], -1, found.shape[2])
        values, gates = (
            each.index_select(0, block.tokens).float().view(shape) for each in (inputs.values, inputs.gates)
        )
        if block.missing is not None:
            gates = gates.masked_fill(block.missing, -torch.inf)
        begun = starts.index_select(0, block.starts)
        whole = torch.cat([begun[:, NEXT], begun[:, OWN]], dim=2) if self.compression.overlap else begun[:, OWN]
        found[block.jobs] = sum_tokens(whole, values, gates)

    def _before(self, starts: Tensor, found: Tensor) -> Tensor | None:
        """[num_rows + num_jobs + 1, 3, head_dim]: what an entry may mix of the window before; None without overlap."""
        if not self.compression.overlap:
            return None
        return torch.cat([starts[:-1, BEFORE], found[..., : self.head_dim]])

    def _kept(self, kept: KeptSlots, found: Tensor, before: Tensor | None) -> Tensor:
        """[num_kept, num_sums, 3, head_dim] fp32."""
        own = found.index_select(0, kept.jobs)
        if before is None:
            return own.unsqueeze(1)
        sums = own.new_empty(own.shape[0], self.compression.num_sums, 3, self.head_dim)
        sums[:, OWN], sums[:, NEXT] = own[..., self.head_dim :], own[..., : self.head_dim]
        sums[:, BEFORE] = before.index_select(0, kept.before)
        return sums


def plan_compressor(
    compression: Compression, head_dim: int, layout: CompressionLayout, read_slots: Tensor | None, device: torch.device
) -> Compressor:
    """Makes the indices of a step. `read_slots` [num_rows] are those of rows that have tokens."""
    # Jobs of about as many tokens are computed together.
    order = sorted(range(len(layout.jobs)), key=lambda job: layout.jobs[job].length)
    place = {job: index for index, job in enumerate(order)}
    jobs = [layout.jobs[job] for job in order]

    def before(source: int) -> int:
        number = source - layout.num_rows
        return source if number < 0 else layout.num_rows + place[number]

    entry_jobs, entry_before, entry_tokens, kept_jobs, kept_before, kept_slots = moved(
        [
            [place[each.job] for each in layout.entries],
            [before(each.before) for each in layout.entries],
            [each.token for each in layout.entries],
            [len(jobs) if each.job is None else place[each.job] for each in layout.kept],
            [before(each.before) for each in layout.kept],
            [each.slot for each in layout.kept],
        ],
        device,
    )
    return Compressor(
        compression=compression,
        head_dim=head_dim,
        num_jobs=len(jobs),
        read_slots=read_slots,
        num_rows=layout.num_rows,
        blocks=tuple(_blocks(jobs, MAX_ELEMENTS // compression.width(head_dim), device)),
        entry_jobs=entry_jobs,
        entry_before=entry_before,
        entry_tokens=entry_tokens,
        kept=KeptSlots(kept_jobs, kept_before, kept_slots) if layout.kept else None,
    )


def _blocks(jobs: Sequence[SumJob], most_tokens: int, device: torch.device) -> Iterator[SumBlock]:
    """Blocks of jobs in order of their numbers of tokens, with at most `most_tokens` places, and at least one job."""
    start = 0
    while start < len(jobs):
        stop = start + 1
        while stop < len(jobs) and (stop + 1 - start) * jobs[stop].length <= most_tokens:
            stop += 1
        yield _block(jobs, slice(start, stop), device)
        start = stop


def _block(jobs: Sequence[SumJob], run: slice, device: torch.device) -> SumBlock:
    members = jobs[run]
    width = members[-1].length
    firsts, counts, starts = moved(list(zip(*members, strict=True)), device)
    places = torch.arange(width, device=device)
    tokens = firsts.unsqueeze(1) + torch.minimum(places, counts.unsqueeze(1) - 1)
    missing = (places >= counts.unsqueeze(1)).unsqueeze(2) if members[0].length < width else None
    return SumBlock(run, tokens.flatten(), missing, starts)
