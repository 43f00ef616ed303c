"""Entries in host memory, with a bounded buffer of hot ones on the device for each row and layer (HiSparse).

    write    new entry ──▶ host pool, and the step's own part of the plane
    few new tokens a row    chosen ─ hot? ─ no ─▶ host ──copy──▶ hot slot, in place of what was chosen longest ago
    many new tokens a row   the row's whole context ──copy──▶ staged part of the plane

    plane  |- layer 0: row 0, row 1, ... -|- layer 1 ... -|- staged | step -|   of each lane

The host pool always has every entry. A hot entry is a copy of an entry whose tokens are all in its row's context.
`prepare` forgets the others, which this step or a later one writes anew, and all of a row whose pages changed owner.

An entry may stand for several tokens; the last of them writes it. Lengths and places of a choice are then counts of
entries, and the step's part of the plane has the entry of a token at the token's index.

Knows pools, plans and choices. Does not know what computes attention, nor how a copy is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import EntryCoordinator, EntryCounts, EntryPlan, EntryTurn, StepLimits, StepView
from sightline.attention.shared.entry_planes import EntryPlane, accessors, entry_planes
from sightline.attention.shared.tile_tokens import TileTokens
from sightline.attention.shared.tiles import RowSpan, row_spans
from sightline.attention.sparse.coordinator import ENTRY, plan_without_cache
from sightline.attention.sparse.late_numbers import LateNumbers
from sightline.attention.workspace import Lane, poison_
from sightline.cache.pools import GroupCache
from sightline.core.batch import PADDING_ROW, Batch
from sightline.core.errors import ConfigError
from sightline.core.lengths import moved
from sightline.kernels.hot_entries import FetchEntries, HotBuffer, TurnRows, as_words, drop_entries

FEW_TOKENS = 16
"""The most new tokens of a row that uses its hot buffer. More choose most of the context: it is copied once instead."""


@dataclass(frozen=True)
class HotSizes:
    """The numbers of a group's entries on the device."""

    buffer: int
    """Hot entries of each row and layer."""
    rows: int
    """Rows of the page table, the padding row included."""
    layers: int
    staged: int
    """Entries of the longest row, for each lane."""
    step: int
    """Most new tokens of a step, for each lane."""

    @property
    def hot(self) -> int:
        """Hot entries of all rows and layers."""
        return self.layers * self.rows * self.buffer

    def num_slots(self, num_lanes: int) -> int:
        return self.hot + num_lanes * (self.staged + self.step)


@dataclass(frozen=True, eq=False)
class _LaneMemory:
    """The memory of one lane."""

    buffer: HotBuffer
    staged: int
    """The first slot of staged contexts."""
    step: int
    """The first slot of the step's own entries."""
    numbers: Tensor
    """[max_step_tokens] int64: 0, 1, 2, ..."""
    step_slots: Tensor
    """[max_step_tokens] int64: the slots of the step's own entries."""
    slots: Tensor
    """[max_rows, top_k] int64: the slots of what the tokens of a turn chose. Every turn fills them anew."""

    def entries(self, lens: Tensor) -> Tensor:
        """The numbers of entries of so many tokens."""
        ratio = self.buffer.apart
        return lens if ratio == 1 else lens.div(ratio, rounding_mode="floor")

    def span_entries(self, span: RowSpan) -> tuple[int, int]:
        """How many entries a row's context has, and the slot of the first new one: that of the token that completes
        it."""
        ratio = self.buffer.apart
        context = span.context_len // ratio
        return context, self.step + span.first_token + (context + 1) * ratio - 1 - span.context_len


@dataclass(frozen=True, eq=False)
class _HotTurn(EntryTurn):
    """Few new tokens of each row: what they chose is looked up in the rows' hot buffers."""

    tokens: TileTokens
    memory: _LaneMemory
    rows: TurnRows
    copy: FetchEntries
    planned: tuple[RowSpan, ...]

    def spans(self) -> tuple[RowSpan, ...]:
        return self.planned

    def fetch(self, layer: int, chosen: Tensor) -> None:
        its = self.tokens.of(chosen)
        self.copy(self.memory.buffer, layer, self.rows, its, self.memory.slots[: its.shape[0] * its.shape[1]])

    def slots(self, chosen: Tensor, part: slice) -> Tensor:
        del chosen
        return self.memory.slots[part]

    def prepare(self) -> None:
        """Nothing to do: the host knew the rows."""


@dataclass(frozen=True, eq=False)
class _DecodeTurn(_HotTurn):
    """One new token of each row. Its rows are listed on the device, which alone may know the lengths."""

    batch: Batch

    def spans(self) -> tuple[RowSpan, ...]:
        return row_spans(self.batch, None)

    def prepare(self) -> None:
        """Finds the row and the context of each token; padding tokens count as the padding row's."""
        batch, rows = self.batch, self.rows
        if not batch.num_rows:
            return
        ends = batch.query_lens.device.cumsum(0)
        row = torch.searchsorted(ends, self.tokens.indices, right=True)
        is_padding = row >= batch.num_rows
        row.clamp_(max=batch.num_rows - 1)
        rows.rows.copy_(batch.table_rows[row].masked_fill_(is_padding, PADDING_ROW))
        rows.contexts.copy_(self.memory.entries(batch.context_lens.device[row]))


@dataclass(frozen=True, eq=False)
class _StagedTurn(EntryTurn):
    """Many new tokens of a few rows, whose contexts are copied to the device as they are."""

    tokens: TileTokens
    memory: _LaneMemory
    sources: Tensor
    """[num_entries] int64: the slots of the rows' contexts in the host pool, row after row."""
    firsts: Tensor
    """[3, num_tokens] int64, by token: the slot of its row's first staged entry, that of the row's first new entry, and
    the entries of the row's context."""
    planned: tuple[RowSpan, ...]

    def spans(self) -> tuple[RowSpan, ...]:
        return self.planned

    def fetch(self, layer: int, chosen: Tensor) -> None:
        del chosen
        buffer, first = self.memory.buffer, self.memory.staged
        staged = buffer.plane[first : first + self.sources.shape[0]]
        torch.index_select(buffer.host[layer], 0, self.sources, out=staged)

    def prepare(self) -> None:
        """Nothing to do: the host knew the rows."""

    def slots(self, chosen: Tensor, part: slice) -> Tensor:
        its = self.tokens.part(part).of(chosen).squeeze(1)
        # A token that chose nothing, because no entry is complete, has slots that nothing reads.
        places = torch.where(its < 0, its[:, :1], its).clamp(min=0).to(torch.int64)
        staged, new, contexts = self.firsts[:, part].unsqueeze(2)
        new = new + (places - contexts) * self.memory.buffer.apart
        return torch.where(places < contexts, staged + places, new)


@dataclass(frozen=True, eq=False)
class _HotPlan(EntryPlan):
    turns: tuple[_HotTurn | _StagedTurn, ...]
    reads_step: bool
    memory: _LaneMemory
    owners: Tensor
    """[rows] int64: the version of the pages that each row's hot entries were copied from. `prepare` updates it."""
    rows: Tensor
    stamps: Tensor
    contexts: Tensor
    """All [num_rows] int64: the rows of the page table, the versions of their pages, and the context lengths."""
    on_device: Tensor
    """The plane: [num_slots, entry], for every layer."""
    entries: Sequence[EntryPlane]
    """Accessors for the plane on the device, per layer."""
    host: Sequence[EntryPlane]
    """Accessors for the pool, per layer."""
    write_slots: Tensor
    """[num_tokens] int64 of the pool."""
    new_slots: Tensor

    def prepare(self) -> None:
        contexts = self.memory.entries(self.contexts)
        drop_entries(self.memory.buffer.held, self.owners, self.rows, self.stamps, contexts)
        for turn in self.turns:
            turn.prepare()

    def write(self, layer: int, new: Tensor) -> None:
        self.host[layer].write(self.write_slots, new)
        if self.turns:
            self.entries[layer].write(self.new_slots, new)

    def keep(self, layer: int) -> None:
        # What tokens have that complete no entry goes to the padding slot.
        buffer, first = self.memory.buffer, self.memory.step
        new = buffer.plane[first : first + self.write_slots.shape[0]]
        buffer.host[layer].index_copy_(0, self.write_slots, new)

    def plane(self, layer: int) -> Tensor:
        del layer
        return self.on_device

    def gather(self, layer: int, slots: Tensor, out: Tensor) -> None:
        self.entries[layer].gather(slots, out)


def _check(cache: GroupCache, top_k: int, buffer_size: int) -> None:
    """Raises `ConfigError` if there is nothing to keep hot, or no room for what one token chooses."""
    if not cache.is_on_host:
        raise ConfigError(
            f"expected a group with entries in host memory, got {cache.group} with its entries on the "
            "device; use ResidentEntries"
        )
    if buffer_size < top_k:
        raise ConfigError(
            f"expected a buffer of at least {top_k} entries a row, as many as a token chooses, got "
            f"{buffer_size}; raise device_buffer_size"
        )


class HotEntries(EntryCoordinator):
    """Serves a group that attends to chosen entries, whose one pool is in host memory."""

    def __init__(
        self,
        cache: GroupCache,
        top_k: int,
        limits: StepLimits,
        buffer_size: int,
        copy: FetchEntries,
        *,
        poison: bool = False,
    ) -> None:
        """`copy` makes entries hot on this device; `poison` fills the plane with NaN at first."""
        _check(cache, top_k, buffer_size)
        [self._pool] = cache.pools.values()
        self.cache, self._top_k, self._copy, self._max_rows = cache, top_k, copy, limits.max_rows
        layers, device = self._pool.spec.num_layers, self._pool.table.pages.device
        rows, longest = self._pool.num_table_rows + 1, limits.max_seq_len // self._pool.tokens_per_entry
        self.sizes = sizes = HotSizes(buffer_size, rows, layers, longest, limits.max_step_tokens)
        stored = self._pool.plane(ENTRY)
        shape = (sizes.num_slots(len(limits.lanes)), stored.shape[2])
        self._plane = torch.empty(shape, dtype=stored.dtype, device=device)
        if poison:
            poison_(self._plane)
        self._host = entry_planes(self._pool, ENTRY)
        self._entries = accessors([self._plane] * layers, self._pool, ENTRY)
        held = torch.full((layers, rows, buffer_size), -1, dtype=torch.int32, device=device)
        order = torch.arange(buffer_size, dtype=torch.int32, device=device).repeat(layers, rows, 1)
        self._owners = torch.full((rows,), -1, dtype=torch.int64, device=device)
        """The version of the pages that each row's hot entries were copied from."""
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._counts = LateNumbers(counts)

        def memory(number: int) -> _LaneMemory:
            places = torch.zeros(rows, longest + 1, dtype=torch.int32, device=device)
            slots = torch.zeros(max(limits.max_rows, FEW_TOKENS), top_k, dtype=torch.int64, device=device)
            buffer = HotBuffer(
                as_words(self._plane),
                as_words(stored),
                self._pool.entry_pages,
                self._pool.entries_per_page,
                self._pool.tokens_per_entry,
                held,
                order,
                places,
                counts,
                torch.zeros(2, slots.shape[0], buffer_size, dtype=torch.int32, device=device),
                torch.zeros_like(slots),
            )
            staged = sizes.hot + number * (sizes.staged + sizes.step)
            step = staged + sizes.staged
            numbers = torch.arange(sizes.step, device=device)
            return _LaneMemory(buffer, staged, step, numbers, numbers + step, slots)

        self._memory: dict[Lane, _LaneMemory] = {lane: memory(number) for number, lane in enumerate(limits.lanes)}

    @property
    def num_bytes(self) -> int:
        lanes = list(self._memory.values())
        shared = [self._plane, lanes[0].buffer.held, lanes[0].buffer.order, self._owners, lanes[0].buffer.counts]
        own = [
            (each.buffer.places, each.buffer.work, each.buffer.sources, each.numbers, each.step_slots, each.slots)
            for each in lanes
        ]
        return sum(each.nbytes for each in (*shared, *itertools.chain(*own)))

    def counts(self) -> EntryCounts:
        return EntryCounts(*self._counts.read())

    def plan(self, step: StepView, buffers: PlanBuffers) -> EntryPlan:
        if step.is_transient:
            return plan_without_cache(step, self._pool, buffers)
        batch, memory = step.batch, self._memory[step.lane]
        versions = batch.pools[self._pool.key].versions
        stamps = buffers.take("owners of rows", (batch.num_rows,), torch.int64)
        stamps.copy_(moved([versions], stamps.device)[0])
        write_slots = step.write_slots(self._pool)
        assert write_slots is not None, "chosen entries are never borrowed"
        return _HotPlan(
            turns=tuple(self._turns(step, buffers, memory)) if step.is_sparse else (),
            reads_step=False,
            memory=memory,
            owners=self._owners,
            rows=batch.table_rows,
            stamps=stamps,
            contexts=batch.context_lens.device,
            on_device=self._plane,
            entries=self._entries,
            host=self._host,
            write_slots=write_slots,
            new_slots=memory.step_slots[: batch.num_tokens],
        )

    def _turns(self, step: StepView, buffers: PlanBuffers, memory: _LaneMemory) -> Iterator[_HotTurn | _StagedTurn]:
        if max(step.batch.query_lens.bound, default=0) <= 1:
            yield self._decode_turn(step, buffers, memory)
            return
        spans = row_spans(step.batch, None)
        names = (f"turn{number}" for number in itertools.count())
        few = sorted([span for span in spans if span.query_len <= FEW_TOKENS], key=lambda span: span.query_len)
        for count, members in itertools.groupby(few, key=lambda span: span.query_len):
            yield from self._few_turns(names, step, buffers, memory, list(members), count)
        many = [span for span in spans if span.query_len > FEW_TOKENS]
        while many:
            taken = self._staged_together(many)
            yield self._staged_turn(next(names), step, buffers, memory, many[:taken])
            many = many[taken:]

    def _decode_turn(self, step: StepView, buffers: PlanBuffers, memory: _LaneMemory) -> _DecodeTurn:
        """Plans the turn of a step with one new token per row. Shapes depend on the sizes of the step alone."""
        # Tokens beyond the most rows are padding.
        count = min(step.batch.num_tokens, self._max_rows)
        columns = buffers.take("turn", (2, count), torch.int64)
        rows = TurnRows(columns[0], columns[1], memory.step_slots[:count])
        tokens = TileTokens(count, 1, memory.numbers[:count], slice(0, count))
        return _DecodeTurn(tokens, memory, rows, self._copy, (), step.batch)

    def _few_turns(
        self,
        names: Iterator[str],
        step: StepView,
        buffers: PlanBuffers,
        memory: _LaneMemory,
        spans: Sequence[RowSpan],
        query_len: int,
    ) -> Iterator[_HotTurn]:
        """Plans turns for rows with the same number of new tokens, few enough at a time that what they choose fits."""
        most = min(query_len, self.sizes.buffer // self._top_k)
        num_rows = memory.slots.shape[0] // most
        for first, start in itertools.product(range(0, len(spans), num_rows), range(0, query_len, most)):
            name, its = next(names), spans[first : first + num_rows]
            count = min(most, query_len - start)
            parts = [replace(span, first_token=span.first_token + start, query_len=count) for span in its]
            columns = buffers.take(name, (3, len(its)), torch.int64)
            rows = [step.batch.rows[span.row] for span in its]
            contexts, firsts = zip(*map(memory.span_entries, its), strict=True)
            columns.view(-1).copy_(moved([[*rows, *contexts, *firsts]], columns.device)[0])
            turn = TurnRows(columns[0], columns[1], columns[2])
            yield _HotTurn(TileTokens.planned(name, parts, buffers), memory, turn, self._copy, tuple(parts))

    def _staged_together(self, spans: Sequence[RowSpan]) -> int:
        """Counts the leading rows, at least one, that are adjacent in the step and whose contexts fit together."""
        ratio = self._pool.tokens_per_entry
        total = spans[0].context_len // ratio
        for number, (before, span) in enumerate(itertools.pairwise(spans), 1):
            total += span.context_len // ratio
            if total > self.sizes.staged or span.first_token != before.first_token + before.query_len:
                return number
        return len(spans)

    def _staged_turn(
        self, name: str, step: StepView, buffers: PlanBuffers, memory: _LaneMemory, spans: Sequence[RowSpan]
    ) -> _StagedTurn:
        first, stop = spans[0].first_token, spans[-1].first_token + spans[-1].query_len
        facts = [memory.span_entries(span) for span in spans]
        sources = buffers.take(f"{name}.sources", (sum(context for context, _ in facts),), torch.int64)
        firsts = buffers.take(f"{name}.firsts", (3, stop - first), torch.int64)
        indices = buffers.take(f"{name}.tokens", (stop - first,), torch.int64)
        torch.arange(first, stop, out=indices)
        start = 0
        for span, (context, first_new) in zip(spans, facts, strict=True):
            entries = torch.arange(context, device=sources.device)
            rows = torch.full_like(entries, step.batch.rows[span.row])
            sources[start : start + context] = self._pool.entry_slots(rows, entries)
            tokens = slice(span.first_token - first, span.first_token - first + span.query_len)
            firsts[0, tokens] = memory.staged + start
            firsts[1, tokens] = first_new
            firsts[2, tokens] = context
            start += context
        tokens_of_turn = TileTokens(stop - first, 1, indices, slice(first, stop))
        return _StagedTurn(tokens_of_turn, memory, sources, firsts, tuple(spans))
