"""Faults: parts of a backend that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from conformance.parts import (
    SPLIT,
    Kept,
    Keys,
    Planes,
    Tokens,
    add_sinks,
    cap,
    get_entries,
    hide,
    put_entries,
    read_plane,
    sees,
    table_slots,
    take_buffer,
    weigh,
    write_plane,
)
from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import BackendContext, CachePolicy, SoftmaxInputs, StepView
from sightline.attention.oracle.attention import loaded_entries, stored_entries
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.shared.merge import merge_parts
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import Workspace
from sightline.cache.pools import Pool
from sightline.cache.spec import SCALED_DTYPES
from sightline.cache.table import PageTable
from sightline.core.batch import Batch, MaskKind
from sightline.core.lengths import Lengths


def refuse_large_heads(context: BackendContext[SoftmaxSpec]) -> None:
    if context.spec.head_dim > 128:
        raise NotImplementedError(f"expected a head dimension of at most 128, got {context.spec.head_dim}")


def slots_without_context(given: Tensor, tokens: Tokens, pool: Pool) -> Tensor:
    misplaced = pool.table.slots(tokens.table_row, tokens.index, pool.page_size)
    return torch.where(tokens.context_len > 0, misplaced, given.unsqueeze(1)).squeeze(1)


def sees_next(tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
    return sees(tokens, keys, tree, page_size) | ((keys.new == tokens.index + 1) & (keys.entry < tokens.seq_len))


def misses_last_of_context(tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
    return sees(tokens, keys, tree, page_size) & (keys.new != -1)


def sees_whole_last_page(tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
    end = (tokens.seq_len + page_size - 1) // page_size * page_size
    is_last = (tokens.context_len > 0) & (tokens.index == tokens.query_len - 1)
    return sees(tokens, keys, tree, page_size) | (is_last & (keys.entry < end))


def misses_itself_after_two_pages(tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
    alone = tokens.index.shape[0] == 1
    return sees(tokens, keys, tree, page_size) & ~(alone & (tokens.context_len == 2 * page_size) & (keys.new == 0))


def sees_causally(kind: MaskKind) -> Callable[[Tokens, Keys, Tensor, int], Tensor]:
    """As if rows of that kind were causal."""

    def see(tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
        causal = (keys.entry < tokens.seq_len) & (keys.new <= tokens.index)
        return torch.where(tokens.is_kind(kind), causal, sees(tokens, keys, tree, page_size))

    return see


def no_tree_beside_padding(tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
    causal = (keys.entry < tokens.seq_len) & (keys.new <= tokens.index)
    mistaken = tokens.is_kind(MaskKind.TREE) & ~tokens.real.all()
    return torch.where(mistaken, causal, sees(tokens, keys, tree, page_size))


def first_query_len(lengths: Lengths, batch: Batch, kept: Kept) -> Tensor:
    return lengths.device[:1].expand(batch.num_rows) if batch.pools else lengths.device


def query_lens_by_size(lengths: Lengths, batch: Batch, kept: Kept) -> Tensor:
    if batch.num_rows > 4:
        return lengths.device
    known: Tensor = kept.setdefault((batch.num_rows, batch.num_tokens), lengths.device)
    return known


def bounds(lengths: Lengths, batch: Batch, kept: Kept) -> Tensor:
    return torch.tensor(lengths.bound, dtype=torch.int64)


def exact(lengths: Lengths, batch: Batch, kept: Kept) -> Tensor:
    return torch.tensor(lengths.exact(), dtype=torch.int64)


def mean(context: BackendContext[SoftmaxSpec], bounds: Sequence[int], new: Sequence[int]) -> int:
    return max(512, sum(bounds) // max(len(bounds), 1))


def this_steps(context: BackendContext[SoftmaxSpec], bounds: Sequence[int], new: Sequence[int]) -> int:
    return max(bounds, default=0)


def this_steps_of_chunks(context: BackendContext[SoftmaxSpec], bounds: Sequence[int], new: Sequence[int]) -> int:
    return max(bounds) if max(new, default=0) > 1 else context.limits.max_seq_len


def scaled_over_all(inputs: SoftmaxInputs, kept: Kept) -> SoftmaxInputs:
    """By a power of two, so that nothing is lost."""
    largest = torch.cat([inputs.q.flatten(), inputs.q.new_ones(1)]).abs().amax().log2().ceil().exp2()
    return replace(inputs, q=inputs.q / largest * largest)


def after_a_maximum(inputs: SoftmaxInputs, kept: Kept) -> SoftmaxInputs:
    inputs.q.max()
    return inputs


def scaled_in_place(inputs: SoftmaxInputs, kept: Kept) -> SoftmaxInputs:
    before = inputs.q.clone()
    inputs.q.mul_(0.25)
    return replace(inputs, q=before)


def half_as_bfloat16(inputs: SoftmaxInputs, kept: Kept) -> SoftmaxInputs:
    return replace(inputs, q=inputs.q.view(torch.bfloat16)) if inputs.q.dtype == torch.float16 else inputs


def taken_for_contiguous(inputs: SoftmaxInputs, kept: Kept) -> SoftmaxInputs:
    q = inputs.q
    return replace(inputs, q=q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1)))


def kept_in_a_list(inputs: SoftmaxInputs, kept: Kept) -> SoftmaxInputs:
    kept.setdefault("keys", []).append(inputs.k.clone())
    return inputs


def no_write(planes: Planes, slots: Tensor, kept: Kept) -> None:
    pass


def write_without_cast(planes: Planes, slots: Tensor, kept: Kept) -> None:
    planes.pool.index_copy_(0, slots, planes.new)


def read_half_as_bfloat16(planes: Planes, slots: Tensor, kept: Kept) -> Tensor:
    entries = read_plane(planes, slots, kept)
    mixed = planes.pool.dtype == torch.float16 != planes.new.dtype
    return entries.view(torch.bfloat16) if mixed else entries


def read_keys_unscaled(planes: Planes, slots: Tensor, kept: Kept) -> Tensor:
    return read_plane(replace(planes, scale=1.0) if planes.name == "k" else planes, slots, kept)


def read_unscaled(planes: Planes, slots: Tensor, kept: Kept) -> Tensor:
    return read_plane(replace(planes, scale=1.0), slots, kept)


def write_unscaled(planes: Planes, slots: Tensor, kept: Kept) -> None:
    write_plane(replace(planes, scale=1.0), slots, kept)


def write_unsaturated(planes: Planes, slots: Tensor, kept: Kept) -> None:
    """As some casts do it: what is beyond the range is NaN."""
    if planes.pool.dtype in SCALED_DTYPES:
        beyond = (planes.new.float() / planes.scale).abs() > torch.finfo(planes.pool.dtype).max
        planes = replace(planes, new=planes.new.masked_fill(beyond, torch.nan))
    write_plane(planes, slots, kept)


def write_cut_off(planes: Planes, slots: Tensor, kept: Kept) -> None:
    """Towards 0, not to the nearest."""
    if planes.pool.dtype not in SCALED_DTYPES:
        write_plane(planes, slots, kept)
        return
    nearest = stored_entries(planes.new, planes.pool.dtype, planes.scale)
    too_far = nearest.float().abs() * planes.scale > planes.new.float().abs()
    put_entries(planes.pool, slots, (nearest.view(torch.uint8) - too_far.to(torch.uint8)).view(nearest.dtype))


def private_copy(planes: Planes, kept: Kept) -> tuple[Tensor, Tensor]:
    """A copy of the pool and which slots of it were written, for as long as the first row keeps its pages."""
    batch = planes.step.batch
    owner = (batch.rows[:1], [rows.versions[:1] for rows in batch.pools.values()])
    if kept.get((planes.name, planes.layer, "owner")) != owner:
        kept[planes.name, planes.layer, "owner"] = owner
        kept[planes.name, planes.layer, "copy"] = (
            planes.pool.clone(),
            torch.zeros(planes.pool.shape[0], 1, 1, dtype=torch.bool, device=planes.pool.device),
        )
    copy: tuple[Tensor, Tensor] = kept[planes.name, planes.layer, "copy"]
    return copy


def write_twice(planes: Planes, slots: Tensor, kept: Kept) -> None:
    write_plane(planes, slots, kept)
    entries, written = private_copy(planes, kept)
    put_entries(entries, slots, stored_entries(planes.new, entries.dtype, planes.scale))
    written.index_fill_(0, slots, True)


def read_own_copy(planes: Planes, slots: Tensor, kept: Kept) -> Tensor:
    entries, written = private_copy(planes, kept)
    found = torch.where(written[slots], get_entries(entries, slots), get_entries(planes.pool, slots))
    return loaded_entries(found, planes.scale)


def _within_pool(slots: Tensor, table: PageTable, page_size: int) -> Tensor:
    """A wrong slot, but one that is there: a device would not survive another."""
    return torch.minimum(slots, (table.pages.max() + 1) * page_size - 1)


def next_slot(table: PageTable, rows: Tensor, entries: Tensor, page_size: int) -> Tensor:
    return _within_pool(table_slots(table, rows, entries, page_size) + 1, table, page_size)


def pages_in_a_run(table: PageTable, rows: Tensor, entries: Tensor, page_size: int) -> Tensor:
    slots = table.pages[rows, torch.zeros_like(entries)] * page_size + entries
    return _within_pool(slots, table, page_size)


def pages_of_16(table: PageTable, rows: Tensor, entries: Tensor, page_size: int) -> Tensor:
    slots = table_slots(table, rows, entries.clamp(max=16 * table.max_pages - 1), 16)
    return _within_pool(slots, table, page_size)


def pages_with_one_owner(table: PageTable, rows: Tensor, entries: Tensor, page_size: int) -> Tensor:
    owners = torch.zeros(table.pages.numel(), dtype=torch.int64, device=entries.device)
    table_rows = torch.arange(table.pages.shape[0], device=entries.device).unsqueeze(1).expand_as(table.pages)
    owners[table.pages.flatten()] = table_rows.flatten()
    page = table.pages[rows, (entries // page_size).clamp(max=table.max_pages - 1)]
    return (owners[page] == rows) | (page == 0)


def hide_beyond_last_page(values: Tensor, visible: Tensor, tokens: Tokens, keys: Keys, page_size: int) -> Tensor:
    end = (tokens.seq_len + page_size - 1) // page_size * page_size
    return values.masked_fill((keys.entry >= end)[:, :, None, None], 0.0)


def neighbours_of_chunks_times_nought(
    values: Tensor, visible: Tensor, tokens: Tokens, keys: Keys, page_size: int
) -> Tensor:
    """A token of a chunk takes what the token before it sees, too, with weight 0."""
    own = hide(values, visible, tokens, keys, page_size)
    in_chunk = (tokens.query_len > 1)[:, :, None, None]
    return own + 0.0 * own.roll(1, 0).masked_fill(~in_chunk, 0.0)


def taken_by_batch(
    buffers: PlanBuffers, step: StepView, kept: Kept, name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return buffers.take(f"{name}{step.batch.batch_id}", shape, dtype)


def fill_once(buffer: Tensor, values: Tensor, kept: Kept) -> None:
    if buffer.data_ptr() not in kept:
        buffer.copy_(values)
        kept[buffer.data_ptr()] = True


def another_split_each_plan(batch: Batch, kept: Kept) -> int:
    kept["plans"] = kept.get("plans", 0) + 1
    return SPLIT - 16 * int(kept["plans"] % 3) if batch.num_rows > 8 else SPLIT


def split_by_rows(batch: Batch, kept: Kept) -> int:
    return SPLIT if batch.num_rows == 1 else SPLIT - 16


_first_windows: WeakKeyDictionary[Workspace, int | None] = WeakKeyDictionary()


def window_of_first_group(context: BackendContext[SoftmaxSpec]) -> int | None:
    return _first_windows.setdefault(context.workspace, context.spec.window)


def swapped_from_ninth_part(outs: Tensor, lses: Tensor, split: int) -> tuple[Tensor, Tensor]:
    both = lses.isfinite().all(0) & (split >= 8)
    return merge_parts(outs, torch.where(both, lses.flip(0), lses))


def summed_in_dtype(weights: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return weigh(weights, values, dtype)
    total = torch.zeros_like(values[:, 0], dtype=dtype)
    for key in weights.flatten(2).transpose(0, 1).flatten(1).any(1).nonzero().flatten().tolist():
        total = (total + weights[:, key].unsqueeze(-1) * values[:, key]).to(dtype)
    return total.float()


def ignore_sinks(out: Tensor, lse: Tensor, sinks: Tensor, spec: SoftmaxSpec) -> tuple[Tensor, Tensor]:
    return out, lse


def leave_sinks_out_of_lse(out: Tensor, lse: Tensor, sinks: Tensor, spec: SoftmaxSpec) -> tuple[Tensor, Tensor]:
    return add_sinks(out, lse, sinks, spec)[0], lse


def cap_sinks(out: Tensor, lse: Tensor, sinks: Tensor, spec: SoftmaxSpec) -> tuple[Tensor, Tensor]:
    return add_sinks(out, lse, sinks if spec.softcap is None else cap(sinks, spec.softcap), spec)


def sinks_by_key_head(out: Tensor, lse: Tensor, sinks: Tensor, spec: SoftmaxSpec) -> tuple[Tensor, Tensor]:
    return add_sinks(out, lse, sinks[torch.arange(spec.num_q_heads, device=sinks.device) // spec.group_size], spec)


def distance_by_order(tokens: Tokens, keys: Keys) -> Tensor:
    return (tokens.index - keys.new).abs()


def take_from_lane(
    buffers: PlanBuffers, step: StepView, kept: Kept, name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    buffer = take_buffer(buffers, step, kept, name, shape, dtype)
    shared: Tensor = kept.setdefault(f"{step.lane} {name} {tuple(shape)}", buffer.clone())
    return shared


class TrustingPlanner(Planner):
    """Takes a planned batch at its word where its plan is another batch's."""

    def ensure(self, work: Batch | PlannedBatch) -> PlannedBatch:
        if isinstance(work, PlannedBatch) and work.plan.certificate.batch_id != work.batch.batch_id:
            return work
        return super().ensure(work)


class ForgetfulPlanner(Planner):
    """Does not notice that a later plan filled the plan buffers again."""

    def ensure(self, work: Batch | PlannedBatch) -> PlannedBatch:
        if isinstance(work, PlannedBatch):
            self._memory[work.plan.certificate.lane].epoch = work.plan.certificate.epoch
        return super().ensure(work)


def halve_bfloat16_of_192(weights: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """A kernel that is wrong for one dtype at one head dimension."""
    wrong = dtype is torch.bfloat16 and values.shape[-1] == 192
    return weigh(weights, values, dtype) * (0.5 if wrong else 1.0)


def empty_rows_take_a_token(lengths: Lengths, batch: Batch, kept: Kept) -> Tensor:
    """An empty row before one that is not counts as a row of one token."""
    del batch, kept
    filled = lengths.device.nonzero().flatten()
    last = int(filled[-1]) if filled.numel() else 0
    before_last = torch.arange(lengths.num_rows, device=lengths.device.device) < last
    return torch.where((lengths.device == 0) & before_last, 1, lengths.device)


class LastEntryUnseen:
    """The last entry that the limits allow is taken for the end."""

    def __init__(self) -> None:
        self.max_seq_len = 0

    def accept(self, context: BackendContext[SoftmaxSpec]) -> None:
        self.max_seq_len = context.limits.max_seq_len

    def sees(self, tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
        return sees(tokens, keys, tree, page_size) & (keys.entry != self.max_seq_len - 1)


def short_contexts_of_many_rows(lengths: Lengths, batch: Batch, kept: Kept) -> Tensor:
    del kept
    return lengths.device if batch.num_rows <= 16 else lengths.device.clamp(max=1)


def border_of_a_query_tile(tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
    """From the second tile of 64 queries on, all see what the tile's first sees."""
    beyond = (tokens.index >= 64) & (keys.new > tokens.index // 64 * 64)
    return sees(tokens, keys, tree, page_size) & ~beyond


def offsets_of_32_bits(planes: Planes, slots: Tensor, kept: Kept) -> Tensor:
    del kept
    stride = planes.pool[0].numel()
    return read_plane(planes, (slots * stride).to(torch.int32).to(torch.int64) // stride, {})


def offsets_of_32_bits_unsigned(planes: Planes, slots: Tensor, kept: Kept) -> Tensor:
    del kept
    stride = planes.pool[0].numel()
    return read_plane(planes, slots * stride % (1 << 32) // stride, {})


class UnwrittenAfterTransient:
    """Once a step was TRANSIENT, those that follow are taken for it."""

    def __init__(self) -> None:
        self.was_transient = False

    def accept(self, context: BackendContext[SoftmaxSpec]) -> None:
        del context
        self.was_transient = False

    def writes(self, step: StepView) -> bool:
        self.was_transient |= step.policy is CachePolicy.TRANSIENT
        return not self.was_transient


def last_of_a_block_missed(weights: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """In half precision the last key of each block of 64 has no weight."""
    if dtype is not torch.float32 and weights.shape[1] == 64:
        weights = weights.clone()
        weights[:, -1] = 0.0
    return weigh(weights, values, dtype)


def lse_of_nothing_is_0(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse.isneginf(), 0.0)
