"""Latent attention with FlashInfer: absorbed rows on its kernel over paged entries, others on its ragged prefill.

    rows of at most one new token     absorbed, one call that can be captured
    rows of a sparse step             absorbed, every token as a row of its own over what it chose
    others                            the phases of `latent.phases`: absorbed, in calls of limited size, or with keys
                                      and values expanded from entries, by `latent.varlen`

Entries are written first, by a kernel of ours. Every wrapper except the captured ones belongs to one plan, because
several are planned before the first of them runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import flashinfer
import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from torch import Tensor

from sightline.attention.backends.flashinfer.plans import (
    CopiesInFlight,
    HostInts,
    RowLists,
    chosen_counts,
    fill_pages,
    offsets,
    on_host,
    packed,
    padded,
    row_sizes,
    slot_lists,
    streaming_multiprocessors,
    token_indices,
)
from sightline.attention.backends.flashinfer.rows import LATENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    EntryPlan,
    EntryTurn,
    LatentInputs,
    Lse,
    StepView,
)
from sightline.attention.latent.phases import cheapest_way, plan_phases, split_absorbed
from sightline.attention.latent.varlen import LatentVarlen, VarlenPhases, never_absorbed
from sightline.attention.shared.tiles import row_spans
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Lane
from sightline.core.batch import PADDING_ROW
from sightline.core.errors import ConfigError, PlanError
from sightline.kernels.latent_attention import absorb_queries, project_values
from sightline.kernels.triton.project import project_real
from sightline.kernels.triton.slots import list_slots
from sightline.kernels.triton.write import write_latents

Wrapper: TypeAlias = Any
"""A wrapper object of the library, which is untyped."""

RAGGED_DIMS = (192, 128)
"""Key and value dimensions of a head: the only unequal pair that the Hopper ragged kernel supports."""
ABSORBED_TOKENS = 1024
"""Tokens per absorbed call, unless the step has more rows than that; sizes the buffers for queries and latents."""
QUERY_TILE = 128
"""New tokens of a row that form one work item of the ragged kernel."""


class _Scratch(NamedTuple):
    """A lane's leases."""

    queries: Tensor
    """[absorbed tokens, heads, latent + rope]."""
    latents: Tensor
    """[absorbed tokens, heads, latent]: attention results in latent space."""
    values: Tensor
    """[absorbed tokens, heads, value]."""
    partial: Tensor
    """The library's float workspace, in bytes."""
    pages: Tensor
    """[max_rows * max_pages] int32, or more: page lists of captured steps, and the slots of chosen entries."""
    entries: Tensor | None
    """[max_step_tokens, latent + rope]: the entries of a sparse step without a cache; None if no step is sparse."""


class _Slots(NamedTuple):
    """Finds the slots of what some tokens chose, before they attend to it."""

    turn: EntryTurn
    place: slice
    """The tokens, in the turn."""
    lists: Tensor
    """[2, n] int64; see `list_slots`."""

    def find(self, run: _LayerRun) -> None:
        chosen = run.inputs.chosen
        assert chosen is not None, "a sparse step has a choice"
        if self.place.start == 0:
            self.turn.fetch(run.layer, chosen)
        list_slots(self.turn.slots(chosen, self.place), self.lists, run.scratch.pages)


class _LayerRun(NamedTuple):
    """One layer of one step."""

    layer: int
    entries: Tensor
    """[num_pages, page_size, latent + rope]."""
    scale: float | None
    """None unless the cache dtype is scaled."""
    inputs: LatentInputs
    scratch: _Scratch
    out: Tensor
    lse: Tensor | None


class _Absorbed(NamedTuple):
    """Rows computed by one wrapper over entries."""

    wrapper: Wrapper
    num_queries: int
    """Number of planned queries; in a captured step this includes padding rows."""
    num_tokens: int
    """Number of the step's tokens, which are the first queries."""
    tokens: Tensor | None
    """[num_tokens] int64; None for the step's first tokens."""
    num_real: Tensor | None
    """[1] int64: number of non-padding tokens, which come first; None unless the step may be captured."""
    slots: _Slots | None
    """None if queries attend to all entries of their rows."""

    def __call__(self, run: _LayerRun) -> None:
        if self.slots is not None:
            self.slots.find(run)
        inputs, scratch, count = run.inputs, run.scratch, self.num_tokens
        q_nope, q_rope = (self._of(each) for each in (inputs.q_nope, inputs.q_rope))
        queries = scratch.queries[:count]
        if self.num_real is not None:
            # Queries beyond the real ones hold stale data, and their results are not projected.
            project_real(q_nope, inputs.key_up.transpose(1, 2), self.num_real, queries, beside=q_rope)
        else:
            absorb_queries(q_nope, q_rope, inputs.key_up, queries)
        found = scratch.latents[: self.num_queries]
        lse = None
        if run.lse is not None:
            lse = torch.empty(found.shape[:2], dtype=torch.float32, device=found.device)
        self.wrapper.run(
            query=scratch.queries[: self.num_queries],
            kv_cache=run.entries,
            out=found,
            lse=lse,
            return_lse=lse is not None,
            return_lse_base_on_e=lse is not None,
            ckv_scale=run.scale,
            kpe_scale=run.scale,
        )
        if self.num_real is not None:
            project_real(found[:count], inputs.value_up, self.num_real, run.out[:count])
        else:
            values = scratch.values[:count]
            project_values(found[:count], inputs.value_up, values)
            self._put(run.out, values)
        if run.lse is not None and lse is not None:
            self._put(run.lse, lse[:count])

    def _of(self, values: Tensor) -> Tensor:
        return values[: self.num_tokens] if self.tokens is None else values.index_select(0, self.tokens)

    def _put(self, target: Tensor, values: Tensor) -> None:
        if self.tokens is not None:
            target.index_copy_(0, self.tokens, values)
        else:
            target[: self.num_tokens] = values


@dataclass(frozen=True, eq=False)
class _FlashInferLatentPlan(AttentionPlan[LatentInputs]):
    entries: tuple[Tensor, ...]
    """Per layer: [num_slots, latent + rope]."""
    page_size: int
    """1 in a sparse step."""
    scales: tuple[float | None, ...]
    """Per layer; None unless the cache dtype is scaled."""
    device_scales: tuple[Tensor | None, ...]
    """Per layer: one number each."""
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`."""
    scratch: _Scratch
    absorbed: tuple[_Absorbed, ...]
    expanded: VarlenPhases | None
    kept: EntryPlan
    """Keeps the new entries of a sparse step, and finds chosen ones."""
    is_sparse: bool
    needs_lse: bool

    def prepare(self) -> None:
        """The library has planned everything else."""
        self.kept.prepare()

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Lse | None:
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) if self.needs_lse else None
        entries, scale = self._write(layer, inputs)
        paged = entries.view(-1, self.page_size, entries.shape[1])
        run = _LayerRun(layer, paged, scale, inputs, self.scratch, out, lse)
        for absorbed in self.absorbed:
            absorbed(run)
        if self.expanded is not None:
            self.expanded.run(layer, inputs, out, lse)
        return lse

    def _write(self, layer: int, inputs: LatentInputs) -> tuple[Tensor, float | None]:
        """Keeps the new entries. Returns those that are read, and their scale."""
        entries, scale = self.entries[layer], self.scales[layer]
        if self.is_sparse and self.scratch.entries is not None:
            new = self.scratch.entries[: inputs.latent.shape[0]]
            torch.cat((inputs.latent, inputs.k_rope), dim=-1, out=new)
            self.kept.write(layer, new)
            return (new, None) if self.kept.reads_step else (self.kept.plane(layer), scale)
        if self.write_slots is not None:
            write_latents(inputs.latent, inputs.k_rope, entries, self.write_slots, self.device_scales[layer])
        return entries, scale


class _Decode(NamedTuple):
    """A captured step's wrapper for one row count. Every row has one token in every plan."""

    wrapper: Wrapper
    num_rows: int


@dataclass(frozen=True, eq=False)
class _Lane:
    """State shared by the steps of one lane."""

    scratch: _Scratch
    decode: tuple[_Decode, ...]
    """In order of row count."""
    copies: CopiesInFlight


@dataclass(frozen=True, eq=False)
class _RaggedCall:
    wrapper: Wrapper

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.wrapper.run(q, k, v, out=out, lse=lse, return_lse=True, lse_base="ln")
        return lse


@dataclass(frozen=True, eq=False)
class _RaggedKernel:
    """The library's ragged prefill as a `VarlenKernel`."""

    spec: LatentSpec
    dtype: torch.dtype
    partial: Tensor
    multiprocessors: int

    def plan(
        self, name: str, query_lens: Sequence[int], key_lens: Sequence[int], *, causal: bool, buffers: PlanBuffers
    ) -> _RaggedCall:
        heads = self.spec.num_q_heads
        tiles = sum(-(-query_len // QUERY_TILE) for query_len in query_lens)
        # Seven numbers per tile per head and one per multiprocessor; each list is aligned to 16 bytes.
        num_bytes = 4 * (7 * heads * tiles + self.multiprocessors + 1) + 256
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.partial, "NHD", backend="fa3")
        wrapper.reset_workspace_buffer(self.partial, buffers.take(f"{name}.plan", (num_bytes,), torch.uint8))
        wrapper.plan(
            on_host(offsets(np.array(query_lens, dtype=np.int32))),
            on_host(offsets(np.array(key_lens, dtype=np.int32))),
            heads,
            heads,
            self.spec.nope_dim + self.spec.rope_dim,
            head_dim_vo=self.spec.value_dim,
            causal=causal,
            sm_scale=self.spec.scale,
            q_data_type=self.dtype,
        )
        return _RaggedCall(wrapper)


class FlashInferLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """Fast on NVIDIA Hopper."""

    capabilities: ClassVar[tuple[Capability, ...]] = LATENT_ROWS

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        self._spec = spec = context.spec
        dims = (spec.nope_dim + spec.rope_dim, spec.value_dim)
        if dims != RAGGED_DIMS:
            raise ConfigError(
                f"expected heads of {RAGGED_DIMS} for keys and values, got {dims}, which FlashInfer's ragged kernel "
                "does not have; choose another attention backend"
            )
        self._pool = pool = context.cache.pools["latent"]
        self._dtype = context.dtype
        self._coordinator = context.coordinator
        self._entries = pool.plane("entry").unbind(0)
        self._is_scaled = pool.plane("entry").dtype == torch.float8_e4m3fn
        scales = pool.scales_device("entry")
        self._device_scales = tuple(
            scales[layer : layer + 1] if self._is_scaled else None for layer in range(len(self._entries))
        )
        self._absorbed_tokens = max(context.limits.max_rows, ABSORBED_TOKENS)
        self._lanes = {lane: self._lane(context, lane) for lane in context.limits.lanes}
        multiprocessors = streaming_multiprocessors(context.device)
        kernels = {
            lane: _RaggedKernel(spec, context.dtype, own.scratch.partial, multiprocessors)
            for lane, own in self._lanes.items()
        }
        self._varlen = LatentVarlen(context, kernels, entry_scales=pool.scales("entry"))

    def _lane(self, context: BackendContext[LatentSpec], lane: Lane) -> _Lane:
        limits, spec, tokens = context.limits, context.spec, self._absorbed_tokens

        def lease(name: str, *shape: int, dtype: torch.dtype = context.dtype) -> Tensor:
            return context.workspace.lease(context.group, f"flashinfer {name}", lane, shape, dtype)

        heads = spec.num_q_heads
        # A partial result of the captured kernel has one vector and one number for each of 64 rows of each block,
        # twice.
        partial_bytes = 2 * 64 * streaming_multiprocessors(context.device) * (2 * spec.latent_dim + 4) + 1024
        num_pages = max(limits.max_rows * self._pool.table.max_pages, tokens * (spec.top_k or 0))
        own_entries = None if spec.top_k is None else lease("step entries", limits.max_step_tokens, spec.head_dim)
        scratch = _Scratch(
            queries=lease("queries", tokens, heads, spec.head_dim),
            latents=lease("latents", tokens, heads, spec.latent_dim),
            values=lease("values", tokens, heads, spec.value_dim),
            partial=lease("partial results", partial_bytes, dtype=torch.uint8),
            pages=lease("pages", num_pages, dtype=torch.int32),
            entries=own_entries,
        )
        query_offsets = lease("query offsets", limits.max_rows + 1, dtype=torch.int32)
        page_offsets = lease("page offsets", limits.max_rows + 1, dtype=torch.int32)
        lens = lease("lengths", limits.max_rows, dtype=torch.int32)

        def decode(num_rows: int) -> _Decode:
            wrapper = BatchMLAPagedAttentionWrapper(
                scratch.partial,
                use_cuda_graph=True,
                qo_indptr=query_offsets[: num_rows + 1],
                kv_indptr=page_offsets[: num_rows + 1],
                kv_indices=scratch.pages,
                kv_len_arr=lens[:num_rows],
                backend="fa3",
            )
            return _Decode(wrapper, num_rows)

        sizes = row_sizes(limits.max_rows)
        return _Lane(scratch, tuple(decode(size) for size in sizes), CopiesInFlight(context.device))

    def plan(self, step: StepView, buffers: PlanBuffers) -> _FlashInferLatentPlan:
        batch, lane = step.batch, self._lanes[step.lane]
        num_layers = len(self._entries)
        lane.copies.wait()
        absorbed: tuple[_Absorbed, ...] = ()
        expanded = None
        kept = self._coordinator.plan(step, buffers)
        if step.is_sparse and batch.num_rows:
            absorbed = tuple(self._plan_chosen(step, kept, lane, buffers))
        elif not step.is_transient and batch.num_rows and max(batch.query_lens.bound) <= 1:
            absorbed = (self._plan_decode(step, lane, buffers),)
        elif batch.num_rows:
            choose = never_absorbed if step.is_transient else cheapest_way
            phases = plan_phases(row_spans(batch, None), self._spec, self._varlen.room, choose)
            spans, others = split_absorbed(phases)
            absorbed = tuple(self._plan_absorbed([span.row for span in spans], step, lane, buffers))
            expanded = self._varlen.plan(others, step, buffers)
        lane.copies.mark()
        return _FlashInferLatentPlan(
            entries=self._entries,
            page_size=1 if step.is_sparse else self._pool.page_size,
            scales=self._pool.scales("entry") if self._is_scaled else (None,) * num_layers,
            device_scales=self._device_scales,
            write_slots=step.write_slots(self._pool),
            scratch=lane.scratch,
            absorbed=absorbed,
            expanded=expanded,
            kept=kept,
            is_sparse=step.is_sparse,
            needs_lse=step.needs_lse,
        )

    def _plan_decode(self, step: StepView, lane: _Lane, buffers: PlanBuffers) -> _Absorbed:
        """Gives every row one query, and rows beyond the step's one entry of the padding page.

        The library picks one of two launch shapes by the average number of queries, which must not depend on padding.
        """
        batch = step.batch
        decode = next(each for each in lane.decode if each.num_rows >= batch.num_rows)
        rows = RowLists.of(batch)
        ones = np.ones(decode.num_rows, dtype=np.int32)
        whole = RowLists(
            rows=np.arange(decode.num_rows, dtype=np.int32),
            query_lens=ones,
            seq_lens=padded(rows.seq_lens, decode.num_rows, 1),
            table_rows=padded(rows.table_rows, decode.num_rows, PADDING_ROW),
        )
        self._plan_rows("decode", decode.wrapper, whole, lane.scratch.pages, step, buffers)
        num_tokens = min(batch.num_rows, batch.num_tokens)
        num_real = buffers.take("decode.real", (1,), torch.int64).fill_(rows.num_rows)
        return _Absorbed(decode.wrapper, decode.num_rows, num_tokens, None, num_real, None)

    def _plan_chosen(self, step: StepView, kept: EntryPlan, lane: _Lane, buffers: PlanBuffers) -> Iterator[_Absorbed]:
        """Gives every token a row of its own. A step that may be captured is one call, padded as by `_plan_decode`."""
        batch = step.batch
        if self._spec.top_k is None:
            raise PlanError(
                f"expected a spec with a top_k in a sparse step, got {self._spec.label}; plan it as a dense one"
            )
        counts = chosen_counts(step, self._spec.top_k)
        if not step.is_transient and max(batch.query_lens.bound) <= 1:
            decode = next(each for each in lane.decode if each.num_rows >= batch.num_rows)
            whole, count = padded(counts, decode.num_rows, 1), min(batch.num_rows, batch.num_tokens)
            self._plan_tokens(decode.wrapper, whole, lane, step)
            [turn] = kept.turns
            slots = _Slots(turn, slice(0, count), slot_lists("decode", whole, buffers))
            num_real = buffers.take("decode.real", (1,), torch.int64).fill_(len(counts))
            yield _Absorbed(decode.wrapper, decode.num_rows, count, None, num_real, slots)
            return
        for number, turn in enumerate(kept.turns):
            yield from self._plan_turn(f"turn{number}", turn, counts, lane, step, buffers)

    def _plan_turn(
        self, name: str, turn: EntryTurn, counts: HostInts, lane: _Lane, step: StepView, buffers: PlanBuffers
    ) -> Iterator[_Absorbed]:
        """Calls of limited size for the tokens of a turn, without padding."""
        where = turn.tokens.contiguous
        # Tokens that are not side by side are known to the device alone, which is waited for.
        listed = turn.tokens.indices.tolist() if where is None else range(where.start, min(where.stop, len(counts)))
        own = counts[np.array(listed, dtype=np.int64)]
        for start in range(0, len(own), self._absorbed_tokens):
            place = slice(start, min(start + self._absorbed_tokens, len(own)))
            wrapper = BatchMLAPagedAttentionWrapper(lane.scratch.partial, backend="fa3")
            self._plan_tokens(wrapper, own[place], lane, step)
            slots = _Slots(turn, place, slot_lists(f"{name}.{start}", own[place], buffers))
            size = place.stop - place.start
            yield _Absorbed(wrapper, size, size, turn.tokens.indices[place], None, slots)

    def _plan_absorbed(
        self, rows: Sequence[int], step: StepView, lane: _Lane, buffers: PlanBuffers
    ) -> Iterator[_Absorbed]:
        """Splits the rows into calls that fit the query buffer."""
        for index, chosen in enumerate(packed(rows, step.batch.query_lens.exact(), self._absorbed_tokens)):
            name, lists = f"absorbed{index}", RowLists.of(step.batch, chosen)
            wrapper = BatchMLAPagedAttentionWrapper(lane.scratch.partial, backend="fa3")
            num_pages = int(lists.pages(self._pool.page_size).sum())
            pages = buffers.take(f"{name}.pages", (num_pages,), torch.int32)
            self._plan_rows(name, wrapper, lists, pages, step, buffers)
            tokens = token_indices(name, lists, step, buffers)
            yield _Absorbed(wrapper, len(tokens), len(tokens), tokens, None, None)

    def _plan_rows(
        self, name: str, wrapper: Wrapper, rows: RowLists, memory: Tensor, step: StepView, buffers: PlanBuffers
    ) -> None:
        pages = rows.pages(self._pool.page_size)
        listed = fill_pages(name, self._pool.table, rows.table_rows, pages, buffers, memory)
        metadata = MLAPlanMetadata.csr(
            on_host(offsets(rows.query_lens)), on_host(offsets(pages)), listed, on_host(rows.seq_lens)
        )
        # A single query sees its whole row.
        self._plan_wrapper(wrapper, metadata, self._pool.page_size, step, causal=bool(rows.query_lens.max() > 1))

    def _plan_tokens(self, wrapper: Wrapper, counts: HostInts, lane: _Lane, step: StepView) -> None:
        """Plans one query a row, over as many pages of one token as `counts` says."""
        starts, queries = offsets(counts), np.arange(len(counts) + 1, dtype=np.int32)
        listed = lane.scratch.pages[: int(starts[-1])]
        metadata = MLAPlanMetadata.csr(on_host(queries), on_host(starts), listed, on_host(counts))
        self._plan_wrapper(wrapper, metadata, 1, step, causal=False)

    def _plan_wrapper(
        self, wrapper: Wrapper, metadata: MLAPlanMetadata, page_size: int, step: StepView, *, causal: bool
    ) -> None:
        spec, is_scaled = self._spec, self._is_scaled and not step.is_transient
        wrapper.plan(
            metadata=metadata,
            num_heads=spec.num_q_heads,
            head_dim_ckv=spec.latent_dim,
            head_dim_kpe=spec.rope_dim,
            page_size=page_size,
            causal=causal,
            sm_scale=spec.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype if step.is_transient else self._entries[0].dtype,
            lse_mode="basee" if step.needs_lse else "none",
            scale_mode="kv-per-tensor" if is_scaled else "default",
        )
