"""Softmax attention with FlashInfer's wrappers, planned once per step for all layers of the group.

    rows of at most one new token     paged, the Ampere kernel: it splits contexts, and can be captured
    all rows without a context        ragged, over the step's own keys and values
    others                            paged, the Hopper kernel, or Ampere's if the spec or the cache requires it

Keys and values are written first, by a kernel of ours. The launches of a captured step depend on its size only: there
is one wrapper for each of a few row counts, and rows beyond the step's are empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import flashinfer
import numpy as np
import torch
from torch import Tensor

from sightline.attention.backends.flashinfer.plans import (
    CopiesInFlight,
    RowLists,
    fill_pages,
    last_page_lens,
    offsets,
    on_host,
    padded,
    partial_bytes,
    row_sizes,
    streaming_multiprocessors,
    token_indices,
    window_left,
)
from sightline.attention.backends.flashinfer.rows import ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    Lse,
    SoftmaxInputs,
    StepView,
)
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import Lane
from sightline.core.batch import PADDING_ROW, MaskKind
from sightline.kernels.triton.write import write_keys_values

Wrapper: TypeAlias = Any
"""A wrapper object of the library, which is untyped."""

LN_2 = math.log(2)
"""The library's log-sum-exp is to the base 2."""
EAGER_PLAN_BYTES = 8 << 20
"""Memory for a plan's index arrays, on the device and pinned: the library's default."""
HOPPER_DIM = 128
"""The head dimension that the Hopper kernels are used for."""
DECODE_PLAN_BYTES = 1 << 20
"""A step of 4096 rows of one token has 17 bytes for each of its 8192 tiles at most."""


class _Planes(NamedTuple):
    """One layer of the pool."""

    keys: Tensor
    """[num_slots, kv_heads, head_dim]."""
    values: Tensor
    """[num_slots, kv_heads, head_dim]."""
    paged: tuple[Tensor, Tensor]
    """Both as [num_pages, page_size, kv_heads, head_dim]."""
    k_scale: float
    v_scale: float
    scales: tuple[Tensor, Tensor] | tuple[None, None]
    """One number each on the device; None unless the cache dtype is scaled."""


class _Call(NamedTuple):
    """Rows computed by one planned wrapper."""

    wrapper: Wrapper
    num_tokens: int
    tokens: Tensor | None
    """[num_tokens] int64: the step's tokens that take part; None for its first tokens."""
    paged: bool

    def __call__(self, inputs: SoftmaxInputs, planes: _Planes, out: Tensor, lse: Tensor | None) -> None:
        """Fills `out`, not yet multiplied by the value scale, and `lse`, to base 2, for the call's tokens."""
        count, tokens = self.num_tokens, self.tokens
        q = inputs.q[:count] if tokens is None else inputs.q.index_select(0, tokens)
        found = out[:count] if tokens is None else torch.empty_like(q, memory_format=torch.contiguous_format)
        logs = None
        if lse is not None:
            logs = lse[:count] if tokens is None else lse.new_empty(count, lse.shape[1])
        wanted = {"out": found, "lse": logs, "return_lse": logs is not None}
        if self.paged:
            scale = None if planes.scales[0] is None else planes.k_scale
            self.wrapper.run(q, planes.paged, k_scale=scale, **wanted)
        else:
            k, v = (each[:count] if tokens is None else each.index_select(0, tokens) for each in (inputs.k, inputs.v))
            self.wrapper.run(q, k, v, **wanted)
        if tokens is not None:
            out.index_copy_(0, tokens, found)
            if lse is not None and logs is not None:
                lse.index_copy_(0, tokens, logs)


@dataclass(frozen=True, eq=False)
class _FlashInferPlan(AttentionPlan[SoftmaxInputs]):
    planes: tuple[_Planes, ...]
    """Per layer."""
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, when no call reads a pool."""
    calls: tuple[_Call, ...]
    real: Tensor | None
    """[num_tokens, 1, 1] bool: True for tokens of rows; None unless values are scaled after the kernel."""
    needs_lse: bool

    def prepare(self) -> None:
        """Nothing to do: the library has planned everything."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        planes = self.planes[layer]
        if self.write_slots is not None:
            write_keys_values(inputs.k, inputs.v, planes.keys, planes.values, self.write_slots, *planes.scales)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) if self.needs_lse else None
        rescaled = self.real is not None and planes.v_scale != 1.0
        found = torch.empty_like(out) if rescaled else out
        for call in self.calls:
            call(inputs, planes, found, lse)
        if self.real is not None and rescaled:
            # Keep the output of padding tokens, which the library would scale too.
            torch.where(self.real, found * planes.v_scale, out, out=out)
        return None if lse is None else lse.mul_(LN_2)


class _Decode:
    """A captured step's wrapper for one row count. Every plan has the same launches and addresses."""

    def __init__(self, wrapper: Wrapper, num_rows: int) -> None:
        self.wrapper = wrapper
        self.num_rows = num_rows
        self.is_opened = False
        """The first plan of a wrapper fixes its maximum token count, so it must have full rows."""


@dataclass(frozen=True, eq=False)
class _Lane:
    """State shared by the steps of one lane."""

    decode: tuple[_Decode, ...]
    """In order of row count."""
    pages: Tensor
    """[max_rows * max_pages] int32: page lists of captured steps."""
    paged: dict[bool, Wrapper]
    """Keyed by whether the wrapper is causal."""
    ragged: dict[bool, Wrapper]
    """Keyed by whether the wrapper is causal."""
    copies: CopiesInFlight


class FlashInferBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """Fast on NVIDIA Hopper."""

    capabilities: ClassVar[tuple[Capability, ...]] = ROWS

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["kv"]
        self._dtype = context.dtype
        self._cache_dtype = self._pool.plane("k").dtype
        self._planes = tuple(self._plane(layer) for layer in range(self._pool.spec.num_layers))
        self._is_rescaled = any(planes.v_scale != 1.0 for planes in self._planes)
        # A window or a softcap needs its own compiled module for each kernel. The Ampere kernel, which decode needs
        # anyway, serves prefill too in that case.
        plain = context.spec.window is None and context.spec.softcap is None
        # Use the Hopper kernels for the most common shape only: each one is a module that takes minutes to compile.
        self._ragged_kernel = "fa3" if plain and context.spec.head_dim == HOPPER_DIM else "fa2"
        self._paged_kernel = self._ragged_kernel if self._cache_dtype == context.dtype else "fa2"
        self._lanes = {lane: self._lane(context, lane) for lane in context.limits.lanes}

    def _plane(self, layer: int) -> _Planes:
        keys, values = self._pool.plane("k")[layer], self._pool.plane("v")[layer]
        paged = (keys.shape[0] // self._pool.page_size, self._pool.page_size, *keys.shape[1:])
        scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if self._cache_dtype == torch.float8_e4m3fn:
            scales = (
                self._pool.scales_device("k")[layer : layer + 1],
                self._pool.scales_device("v")[layer : layer + 1],
            )
        return _Planes(
            keys,
            values,
            (keys.view(paged), values.view(paged)),
            self._pool.scales("k")[layer],
            self._pool.scales("v")[layer],
            scales,
        )

    def _lane(self, context: BackendContext[SoftmaxSpec], lane: Lane) -> _Lane:
        limits, device = context.limits, context.device

        def lease(name: str, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return context.workspace.lease(context.group, f"flashinfer {name}", lane, (size,), dtype)

        needed = partial_bytes(context.spec, limits.max_rows, streaming_multiprocessors(device))
        partial = lease("partial results", needed, torch.uint8)
        # At most two plans of a step are alive at once: one per mask.
        plans = {causal: lease(f"plan causal={causal}", EAGER_PLAN_BYTES, torch.uint8) for causal in (True, False)}
        decode_plan = lease("plan decode", DECODE_PLAN_BYTES, torch.uint8)
        query_offsets = lease("query offsets", limits.max_rows + 1)
        page_offsets = lease("page offsets", limits.max_rows + 1)
        last_pages = lease("last pages", limits.max_rows)
        pages = lease("pages", limits.max_rows * self._pool.table.max_pages)

        def decode(num_rows: int) -> _Decode:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                partial,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=query_offsets[: num_rows + 1],
                paged_kv_indptr_buf=page_offsets[: num_rows + 1],
                paged_kv_indices_buf=pages,
                paged_kv_last_page_len_buf=last_pages[:num_rows],
                backend="fa2",
            )
            wrapper.reset_workspace_buffer(partial, decode_plan)
            return _Decode(wrapper, num_rows)

        def eager(kind: type[Wrapper], kernel: str, *, causal: bool) -> Wrapper:
            wrapper = kind(partial, "NHD", backend=kernel)
            wrapper.reset_workspace_buffer(partial, plans[causal])
            return wrapper

        paged, ragged = (
            flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        )
        return _Lane(
            decode=tuple(decode(num_rows) for num_rows in row_sizes(limits.max_rows)),
            pages=pages,
            paged={causal: eager(paged, self._paged_kernel, causal=causal) for causal in (True, False)},
            ragged={causal: eager(ragged, self._ragged_kernel, causal=causal) for causal in (True, False)},
            copies=CopiesInFlight(device),
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> _FlashInferPlan:
        batch, transient, lane = step.batch, step.is_transient, self._lanes[step.lane]
        lane.copies.wait()
        calls: tuple[_Call, ...] = ()
        if not transient and batch.num_rows and max(batch.query_lens.bound) <= 1:
            calls = (self._plan_decode(step, lane, buffers),)
        elif batch.num_rows:
            calls = self._plan_rows(step, lane, buffers)
        lane.copies.mark()
        real = None
        if self._is_rescaled and not transient:
            real = buffers.take("real", (batch.num_tokens, 1, 1), torch.bool).fill_(False)
            real[: sum(batch.query_lens.exact())] = True
        return _FlashInferPlan(
            planes=self._planes,
            write_slots=step.write_slots(self._pool),
            calls=tuple([call for call in calls if call.num_tokens]),
            real=real,
            needs_lse=step.needs_lse,
        )

    def _plan_decode(self, step: StepView, lane: _Lane, buffers: PlanBuffers) -> _Call:
        """Plans even if no row has a token, because a captured step may be replayed on the plan."""
        decode = next(each for each in lane.decode if each.num_rows >= step.batch.num_rows)
        if not decode.is_opened:
            self._plan_paged(decode.wrapper, _full_rows(decode.num_rows), lane.pages, decode.num_rows, causal=False)
            # Its index arrays use the same pinned memory as those of the plan that follows.
            lane.copies.mark()
            lane.copies.wait()
            decode.is_opened = True
        rows, num_rows = RowLists.of(step.batch), step.batch.num_rows
        pages = padded(rows.pages(self._pool.page_size), num_rows, 0)
        table_rows = padded(rows.table_rows, num_rows, PADDING_ROW)
        listed = fill_pages("decode", self._pool.table, table_rows, pages, buffers, lane.pages)
        # A single query sees its whole row, or its whole window.
        self._plan_paged(decode.wrapper, rows, listed, decode.num_rows, causal=False)
        return _Call(decode.wrapper, rows.num_tokens, None, paged=True)

    def _plan_rows(self, step: StepView, lane: _Lane, buffers: PlanBuffers) -> tuple[_Call, ...]:
        """Plans one call of the library, or two if some rows are causal and others are not."""
        batch = step.batch
        is_fresh = step.is_transient or (self._cache_dtype == self._dtype and not any(batch.context_lens.exact()))
        by_mask = {
            causal: RowLists.of(
                batch, [row for row, mask in enumerate(batch.masks) if (mask.kind is MaskKind.CAUSAL) == causal]
            )
            for causal in (True, False)
        }
        found = {causal: rows for causal, rows in by_mask.items() if rows.num_rows}
        return tuple(
            self._plan_call(rows, step, lane, buffers, causal=causal, ragged=is_fresh, alone=len(found) == 1)
            for causal, rows in found.items()
        )

    def _plan_call(
        self,
        rows: RowLists,
        step: StepView,
        lane: _Lane,
        buffers: PlanBuffers,
        *,
        causal: bool,
        ragged: bool,
        alone: bool,
    ) -> _Call:
        name = "causal" if causal else "full"
        tokens = None if alone else token_indices(name, rows, step, buffers)
        # Both wrappers of a mask plan into one lease; taking this buffer tells an earlier plan that its memory was
        # reused.
        buffers.take(f"{name}.planned", (1,), torch.int64).fill_(rows.num_tokens)
        if ragged:
            self._plan_ragged(lane.ragged[causal], rows, causal=causal)
            return _Call(lane.ragged[causal], rows.num_tokens, tokens, paged=False)
        pages = rows.pages(self._pool.page_size)
        memory = buffers.take(f"{name}.pages", (int(pages.sum()),), torch.int32)
        listed = fill_pages(name, self._pool.table, rows.table_rows, pages, buffers, memory)
        self._plan_paged(lane.paged[causal], rows, listed, rows.num_rows, causal=causal)
        return _Call(lane.paged[causal], rows.num_tokens, tokens, paged=True)

    def _plan_paged(self, wrapper: Wrapper, rows: RowLists, pages: Tensor, num_rows: int, *, causal: bool) -> None:
        """Leaves rows beyond those of `rows` empty."""
        spec, page_size = self._spec, self._pool.page_size
        wrapper.plan(
            on_host(offsets(rows.query_lens, num_rows)),
            on_host(offsets(rows.pages(page_size), num_rows)),
            pages,
            on_host(padded(last_page_lens(rows.seq_lens, page_size), num_rows, 0)),
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            page_size,
            causal=causal,
            sm_scale=spec.scale,
            window_left=window_left(spec),
            logits_soft_cap=spec.softcap,
            q_data_type=self._dtype,
            kv_data_type=self._cache_dtype,
            # Passed so that the library does not compute it from the other arguments.
            seq_lens=on_host(padded(rows.seq_lens, num_rows, 0)),
            max_token_per_sequence=int(rows.query_lens.max(initial=1)),
            max_sequence_kv=int(rows.seq_lens.max(initial=1)),
        )

    def _plan_ragged(self, wrapper: Wrapper, rows: RowLists, *, causal: bool) -> None:
        spec, query_offsets = self._spec, on_host(offsets(rows.query_lens))
        wrapper.plan(
            query_offsets,
            query_offsets,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            causal=causal,
            sm_scale=spec.scale,
            window_left=window_left(spec),
            logits_soft_cap=spec.softcap,
            q_data_type=self._dtype,
        )


def _full_rows(num_rows: int) -> RowLists:
    """Rows of one token and one entry each, in the padding page."""
    ones = np.ones(num_rows, dtype=np.int32)
    return RowLists(np.arange(num_rows, dtype=np.int32), ones, ones, ones)
