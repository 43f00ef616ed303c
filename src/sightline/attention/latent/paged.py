"""Absorbed latent attention on a kernel that reads paged entries in place.

Every new token is a row of its own for the kernel: one query, a row of a page table, and the number of entries that it
sees. So the kernel needs no causal mask, and a row may have any number of new tokens.

    context 5, 3 new tokens   ──▶   lens 6, 7, 8, each with the pages of the row

Runs the absorbed phase of `latent.phases`. Composed by backends, which own the kernel and the products around it. Does
not know which library the kernel is from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import BackendContext, LatentInputs, StepView
from sightline.attention.shared.page_rows import PageRows, TokenQueries
from sightline.attention.shared.step_tokens import StepTokens
from sightline.attention.shared.tiles import RowSpan
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Lane
from sightline.kernels.latent_attention import absorb_queries, project_values

CALL_TOKENS = 1024
"""Most tokens of one call; longer phases take several."""
TILE_ENTRIES = 128
"""Entries that the kernels read at once: a row of the page table is as long as whole tiles."""


class EntryKernel(Protocol):
    """Attention of one query per row to entries, of one spec: its heads, dimensions and scale."""

    def __call__(self, queries: Tensor, entries: Tensor, rows: PageRows, out: Tensor, lse: Tensor | None) -> None:
        """Fills out [n, heads, latent] for queries [n, heads, latent + rope]; n is at most `CALL_TOKENS`.

        entries [num_pages, page_size, latent + rope]. Fills `lse` [n, heads] fp32, contiguous, natural logarithm, if it
        is given.
        """


class ProjectReal(Protocol):
    """Signature of `kernels.triton.project.project_real`."""

    def __call__(
        self, given: Tensor, up: Tensor, num_real: Tensor, out: Tensor, *, beside: Tensor | None = None
    ) -> None:
        """A product per head, for the first `num_real` tokens only."""


class _Scratch(NamedTuple):
    """A lane's leases."""

    queries: Tensor
    """[call tokens, heads, latent + rope]."""
    found: Tensor
    """[call tokens, heads, latent]."""
    values: Tensor
    """[call tokens, heads, value]."""
    lse: Tensor
    """[call tokens, heads] fp32."""


@dataclass(frozen=True, eq=False)
class AbsorbedTokens:
    """The absorbed tokens of one step, in calls of limited size."""

    kernel: EntryKernel
    project: ProjectReal
    scratch: _Scratch
    calls: tuple[_Call, ...]

    def run(self, entries: Tensor, inputs: LatentInputs, out: Tensor, lse: Tensor | None) -> None:
        """Fills `out` [num_tokens, heads, value], and `lse` [num_tokens, heads] if given, for the tokens.

        entries [num_pages, page_size, latent + rope], with the step's own already written.
        """
        for call in self.calls:
            count, scratch = call.tokens.count, self.scratch
            queries, found = scratch.queries[:count], scratch.found[:count]
            own_lse = None if lse is None else scratch.lse[:count]
            self._absorb(call, inputs, queries)
            self.kernel(queries, entries, call.rows, found, own_lse)
            self._project(call, inputs, found, out)
            if lse is not None and own_lse is not None:
                call.tokens.put(lse, own_lse)

    def _absorb(self, call: _Call, inputs: LatentInputs, queries: Tensor) -> None:
        q_nope, q_rope = call.tokens.of(inputs.q_nope), call.tokens.of(inputs.q_rope)
        if call.num_real is None:
            absorb_queries(q_nope, q_rope, inputs.key_up, queries)
        else:
            # Queries of padding hold whatever was there before, and their results are not used.
            self.project(q_nope, inputs.key_up.transpose(1, 2), call.num_real, queries, beside=q_rope)

    def _project(self, call: _Call, inputs: LatentInputs, found: Tensor, out: Tensor) -> None:
        if call.num_real is None:
            values = self.scratch.values[: call.tokens.count]
            project_values(found, inputs.value_up, values)
            call.tokens.put(out, values)
        else:
            self.project(found, inputs.value_up, call.num_real, call.tokens.of(out))


class _Call(NamedTuple):
    tokens: StepTokens
    rows: PageRows
    num_real: Tensor | None
    """[1] int64: how many of the call's tokens are not padding, which come first; None if all are."""


class PagedEntries:
    """Plans absorbed tokens. Built once per group, with every lease that it needs."""

    def __init__(
        self, context: BackendContext[LatentSpec], kernels: Mapping[Lane, EntryKernel], project: ProjectReal
    ) -> None:
        self._pool = context.cache.pools["latent"]
        self._limits = context.limits
        self._kernels = dict(kernels)
        self._project = project
        self._per_tile = max(1, TILE_ENTRIES // self._pool.page_size)
        """Pages that a tile covers."""
        self._scratch = {lane: _lease(context, lane) for lane in context.limits.lanes}

    def plan_decode(self, step: StepView, buffers: PlanBuffers) -> AbsorbedTokens:
        """Plans a step in which no row has more than one new token. Launches depend on its size only."""
        decode = TokenQueries.of(step.batch)
        rows = self._rows("decode", decode.table_rows, decode.lens, self._limits.max_seq_len, buffers)
        calls = []
        for index, start in enumerate(range(0, len(decode.lens), CALL_TOKENS)):
            tokens = slice(start, min(start + CALL_TOKENS, len(decode.lens)))
            count = tokens.stop - start
            num_real = buffers.take(f"decode.real{index}", (1,), torch.int64)
            num_real.fill_(min(max(decode.num_real - start, 0), count))
            calls.append(_Call(StepTokens(count, tokens, None), rows.part(tokens), num_real))
        return self._planned(step, calls)

    def plan_rows(self, spans: Sequence[RowSpan], step: StepView, buffers: PlanBuffers) -> AbsorbedTokens:
        """Plans causal rows of any number of new tokens."""
        new = [(span, token) for span in spans for token in range(span.query_len)]
        calls = []
        for index, start in enumerate(range(0, len(new), CALL_TOKENS)):
            name, chosen = f"absorbed{index}", new[start : start + CALL_TOKENS]
            places = [span.first_token + token for span, token in chosen]
            lens = [span.context_len + token + 1 for span, token in chosen]
            table_rows = [step.batch.rows[span.row] for span, _ in chosen]
            tokens = StepTokens.planned(name, [slice(place, place + 1) for place in places], buffers)
            calls.append(_Call(tokens, self._rows(name, table_rows, lens, max(lens), buffers), None))
        return self._planned(step, calls)

    def _planned(self, step: StepView, calls: Sequence[_Call]) -> AbsorbedTokens:
        return AbsorbedTokens(self._kernels[step.lane], self._project, self._scratch[step.lane], tuple(calls))

    def _rows(
        self, name: str, table_rows: Sequence[int], lens: Sequence[int], longest: int, buffers: PlanBuffers
    ) -> PageRows:
        return PageRows.planned(name, self._pool, table_rows, lens, longest, buffers, per_tile=self._per_tile)


def _lease(context: BackendContext[LatentSpec], lane: Lane) -> _Scratch:
    spec = context.spec
    tokens, heads = min(CALL_TOKENS, max(context.limits.max_step_tokens, context.limits.max_rows)), spec.num_q_heads

    def lease(name: str, *shape: int, dtype: torch.dtype = context.dtype) -> Tensor:
        return context.workspace.lease(context.group, f"paged {name}", lane, shape, dtype)

    return _Scratch(
        queries=lease("queries", tokens, heads, spec.head_dim),
        found=lease("found", tokens, heads, spec.latent_dim),
        values=lease("values", tokens, heads, spec.value_dim),
        lse=lease("lse", tokens, heads, dtype=torch.float32),
    )
