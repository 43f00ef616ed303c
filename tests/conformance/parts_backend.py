"""A small correct backend made of replaceable parts. Serves everything, in plain torch.

Each token looks at its row's keys split by split, and what the splits give is merged. Works from device lengths and
host bounds. On a GPU the number of splits is the limits', so that a captured graph serves any lengths; on a CPU the
bounds', which saves time and changes no bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conformance.parts import CORRECT, KINDS, Kept, Keys, Parts, Planes, Tokens, total
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    Lse,
    SoftmaxInputs,
    SoftmaxQueries,
    StepView,
)
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import Lane
from sightline.cache.pools import Pool
from sightline.cache.spec import SCALED_DTYPES
from sightline.core.batch import PADDING_ROW, PADDING_SLOT, Batch, MaskKind
from sightline.core.device import DeviceKind

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
EVERYTHING = Capability(
    spec_kinds=frozenset({SpecKind.SOFTMAX}),
    devices=frozenset({DeviceKind.CPU, DeviceKind.CUDA}),
    compute_capabilities=ANY,
    dtypes=DTYPES,
    cache_dtypes=DTYPES | SCALED_DTYPES,
    head_dims=ANY,
    group_sizes=ANY,
    page_sizes=ANY,
    features=frozenset(Feature),
    host_lengths=HostLengths.BOUND,
    graph=GraphLevel.FULL,
)


@dataclass(frozen=True, eq=False)
class Scratch:
    """One lane's leases."""

    out: Tensor
    """[max_step_tokens, num_q_heads, head_dim] fp32: merged so far."""
    lse: Tensor
    """[max_step_tokens, num_q_heads] fp32."""
    num_merged: Tensor
    """[max_step_tokens] int32: parts that were merged. 0 between runs: each run leaves it so."""


@dataclass(frozen=True, eq=False)
class _Memory:
    """The plan buffers. One row more than the batch's: padding tokens belong to it, and it has nothing."""

    query_lens: Tensor
    context_lens: Tensor
    table_rows: Tensor
    kinds: Tensor
    positions: Tensor
    write_slots: Tensor
    tree: Tensor
    """[num_tokens, num_tokens] bool: the trees of all rows, one below the other; or empty."""
    tree_starts: Tensor
    """Where each row's tree begins."""
    kv_heads: Tensor
    """[num_q_heads] int64."""


@dataclass(eq=False)
class _PartsPlan(AttentionPlan[SoftmaxInputs]):
    parts: Parts
    context: BackendContext[SoftmaxSpec]
    pool: Pool
    step: StepView
    memory: _Memory
    scratch: Scratch
    split_size: int
    num_splits: int
    kept: Kept
    prepared: dict[str, Tokens] = field(default_factory=dict)

    def prepare(self) -> None:
        memory = self.memory
        token = torch.arange(memory.positions.shape[0], device=memory.positions.device)
        ends = memory.query_lens.cumsum(0)
        real = self.parts.real(token, ends[-1])
        row = torch.searchsorted(ends, token, right=True).clamp(max=ends.shape[0] - 1)
        first = (ends - memory.query_lens)[row]

        def of_row(values: Tensor) -> Tensor:
            return values[row].unsqueeze(1)

        self.prepared["tokens"] = Tokens(
            index=(token - first).unsqueeze(1),
            first=first.unsqueeze(1),
            context_len=of_row(memory.context_lens),
            query_len=of_row(memory.query_lens),
            table_row=of_row(memory.table_rows),
            kind=of_row(memory.kinds),
            tree_line=of_row(memory.tree_starts) + (token - first).unsqueeze(1),
            position=memory.positions.unsqueeze(1),
            real=real.unsqueeze(1),
        )

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        parts, tokens = self.parts, self.prepared["tokens"]
        inputs = parts.inputs(inputs, self.kept)
        if parts.writes(self.step):
            slots = parts.write_slots(self.memory.write_slots, tokens, self.pool)
            for name, new in (("k", inputs.k), ("v", inputs.v)):
                parts.write(self._planes(name, layer, layer, new), slots, self.kept)
        result, lse = self._merge_splits(layer, inputs, tokens)
        if inputs.sinks is not None:
            result, lse = parts.add_sinks(result, lse, inputs.sinks, self.context.spec)
        out.copy_(torch.where(tokens.real.unsqueeze(2), result.to(out.dtype), out))
        return parts.lse(lse) if Feature.LSE in self.step.needs else None

    def _merge_splits(self, layer: int, inputs: SoftmaxInputs, tokens: Tokens) -> tuple[Tensor, Tensor]:
        num_tokens = inputs.q.shape[0]
        out, lse = self.scratch.out[:num_tokens], self.scratch.lse[:num_tokens]
        num_merged = self.scratch.num_merged[:num_tokens]
        for split in range(self.num_splits):
            part_out, part_lse = self._attend_split(split, layer, inputs, tokens)
            merged_out, merged_lse = self.parts.merge(torch.stack([out, part_out]), torch.stack([lse, part_lse]), split)
            is_first = (num_merged == 0).unsqueeze(1)
            out.copy_(torch.where(is_first.unsqueeze(2), part_out, merged_out))
            lse.copy_(torch.where(is_first, part_lse, merged_lse))
            num_merged += 1
        num_merged.zero_()
        return out.clone(), lse.clone()

    def _attend_split(self, split: int, layer: int, inputs: SoftmaxInputs, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The output and the LSE over one split's keys, fp32; 0 and -inf where none is seen."""
        parts, spec, page_size = self.parts, self.context.spec, self.pool.page_size
        keys = self._keys(split, tokens)
        visible = parts.sees(tokens, keys, self.memory.tree, page_size)
        window = parts.window(self.context)
        if window is not None:
            visible = visible & parts.within(parts.distance(tokens, keys), window)
        if parts.reads(self.step):
            visible = visible & parts.readable(self.pool.table, tokens.table_row, keys.entry, page_size)
        used = parts.head_dim(spec.head_dim)
        k, v = (self._fetch(name, layer, inputs, tokens, keys) for name in ("k", "v"))
        scores = total(inputs.q[..., :used].float().unsqueeze(1) * k[..., :used], 3) * parts.scale(spec)
        if spec.softcap is not None:
            scores = parts.cap(scores, spec.softcap)
        scores = scores.masked_fill(~visible.unsqueeze(2), -torch.inf)
        lse = parts.log_sum_exp(scores)
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(1))
        return parts.weigh(weights, parts.hide(v, visible, tokens, keys, page_size), inputs.q.dtype), lse

    def _keys(self, split: int, tokens: Tokens) -> Keys:
        num_tokens = self.memory.positions.shape[0]
        start = split * self.split_size
        entry = torch.arange(start, start + self.split_size, device=tokens.index.device).expand(num_tokens, -1)
        new = entry - tokens.context_len
        token = (tokens.first + new).clamp(0, max(num_tokens - 1, 0))
        position = torch.where(new < 0, entry, self.memory.positions[token])
        return Keys(entry, new, token, position)

    def _planes(self, name: str, layer: int, read_layer: int, new: Tensor) -> Planes:
        plane, scales = self.pool.plane(name), self.pool.scales(name)
        return Planes(name, layer, self.step, plane[read_layer], scales[self.parts.scale_layer(layer)], new)

    def _fetch(self, name: str, layer: int, inputs: SoftmaxInputs, tokens: Tokens, keys: Keys) -> Tensor:
        """[num_tokens, num_keys, num_q_heads, head_dim] fp32."""
        new = inputs.k if name == "k" else inputs.v
        if self.parts.reads(self.step):
            # The last split may reach beyond the page table.
            entry = keys.entry.clamp(max=self.context.limits.max_seq_len - 1)
            slots = self.parts.slots(self.pool.table, tokens.table_row, entry, self.pool.page_size)
            read_layer = self.parts.read_layer(layer)
            entries = self.parts.read(self._planes(name, layer, read_layer, new), slots, self.kept)
        else:
            entries = new[keys.token]
        return entries.float().index_select(2, self.memory.kv_heads)


@dataclass(frozen=True, eq=False)
class _BorrowedPlan(AttentionPlan[SoftmaxQueries]):
    """The same plan without keys and values of the step: NaN shows where they are read."""

    inner: _PartsPlan

    def prepare(self) -> None:
        self.inner.prepare()

    def run(self, layer: int, inputs: SoftmaxQueries, out: Tensor) -> Lse | None:
        spec = self.inner.context.spec
        nothing = inputs.q.new_full((inputs.q.shape[0], spec.num_kv_heads, spec.head_dim), torch.nan)
        return self.inner.run(layer, SoftmaxInputs(q=inputs.q, k=nothing, v=nothing, sinks=inputs.sinks), out)


class PartsBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """Made by `make_backend`, which gives it its parts."""

    parts: Parts

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self.parts.accept(context)
        self._context = context
        self._pool = context.cache.pools["kv"]
        self._kept: Kept = {}
        self._scratch = {lane: self._lease(lane) for lane in context.limits.lanes}
        self._prepared: dict[str, Tokens] = {}

    def _lease(self, lane: Lane) -> Scratch:
        context, spec = self._context, self._context.spec
        lease, tokens = context.workspace.lease, context.limits.max_step_tokens
        per_head = (tokens, spec.num_q_heads)
        return Scratch(
            lease(context.group, "parts.out", lane, (*per_head, spec.head_dim), torch.float32),
            lease(context.group, "parts.lse", lane, per_head, torch.float32),
            lease(context.group, "parts.num_merged", lane, (tokens,), torch.int32, zeroed=self.parts.zeroed),
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[SoftmaxInputs]:
        batch = step.batch
        split_size = self.parts.split_size(batch, self._kept)
        bounds = [sum(pair) for pair in zip(batch.context_lens.bound, batch.query_lens.bound, strict=True)]
        longest = self.parts.longest(self._context, bounds, batch.query_lens.bound)
        plan = _PartsPlan(
            parts=self.parts,
            context=self._context,
            pool=self._pool,
            step=step,
            memory=self._fill(step, buffers),
            scratch=self._scratch[step.lane],
            split_size=split_size,
            num_splits=max(1, -(-longest // split_size)),
            kept=self._kept,
        )
        if self.parts.one_memory_for_lanes:
            plan.prepared = self._prepared
        return _BorrowedPlan(plan) if step.is_borrowed else plan

    def _fill(self, step: StepView, buffers: PlanBuffers) -> _Memory:
        batch, parts, kept, device = step.batch, self.parts, self._kept, self._context.device

        def take(name: str, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return parts.take(buffers, step, kept, name, shape, dtype)

        def by_row(name: str, values: Tensor, of_padding: int) -> Tensor:
            buffer = take(name, (batch.num_rows + 1,))
            buffer[:-1] = values
            buffer[-1:] = of_padding
            return buffer

        def by_token(name: str, values: Tensor) -> Tensor:
            return take(name, (batch.num_tokens,)).copy_(values)

        spec = self._context.spec
        kv_heads = take("kv_heads", (spec.num_q_heads,))
        parts.fill_constant(kv_heads, parts.kv_head(torch.arange(spec.num_q_heads, device=device), spec), kept)
        kinds = torch.tensor([KINDS.index(mask.kind) for mask in batch.masks], dtype=torch.int64)
        paged = batch.pools.get(self._pool.key)
        return _Memory(
            query_lens=by_row("query_lens", parts.query_lens(batch.query_lens, batch, kept), 0),
            context_lens=by_row("context_lens", parts.context_lens(batch.context_lens, batch, kept), 0),
            table_rows=by_row("table_rows", torch.tensor(batch.rows, dtype=torch.int64), PADDING_ROW),
            kinds=by_row("kinds", kinds, KINDS.index(MaskKind.CAUSAL)),
            positions=by_token("positions", batch.positions),
            write_slots=by_token(
                "write_slots",
                torch.full_like(batch.positions, PADDING_SLOT) if paged is None else paged.write_slots,
            ),
            tree=self._fill_tree(step, take),
            tree_starts=by_row("tree_starts", torch.tensor(_tree_starts(batch), dtype=torch.int64), 0),
            kv_heads=kv_heads,
        )

    def _fill_tree(self, step: StepView, take: Callable[[str, Sequence[int], torch.dtype], Tensor]) -> Tensor:
        num_tokens = step.batch.num_tokens if Feature.TREE_MASK in step.needs else 0
        tree = take("tree", (num_tokens, num_tokens), torch.bool).zero_()
        for start, mask in zip(_tree_starts(step.batch), step.batch.masks, strict=True):
            if mask.tree is not None:
                query_len = mask.tree.shape[0]
                tree[start : start + query_len, :query_len] = mask.tree
        return tree


def _tree_starts(batch: Batch) -> list[int]:
    sizes = [0 if mask.tree is None else mask.tree.shape[0] for mask in batch.masks]
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def make_backend(parts: Parts = CORRECT, *, declares: Capability = EVERYTHING) -> type[PartsBackend]:
    """A backend of these parts that declares this row."""
    return type("MadeOfParts", (PartsBackend,), {"parts": parts, "capabilities": (declares,)})
